"""Notes on prompts before a run starts: bos, the end token, and thoughts that the template opens."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mgrpo.moving import from_values
from mgrpo.rewards.builtin_functions import BUILTIN
from mgrpo.run.inputs.prompts import make_prompts
from mgrpo.run.inputs.reading import read_inputs

MODEL = Path(__file__).parents[3] / "examples" / "calculator" / "model"
ANY_ROLE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_SHAPE = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL)


def opened_format(completions: Sequence[str], **columns: object) -> list[float]:
    """Open-R1's form of a format reward."""
    return [float(_matches(text)) for text in completions]


def _matches(text: str) -> bool:
    return bool(_SHAPE.match(text))


def closed_format(completions: Sequence[str], **columns: object) -> list[float]:
    """Does not mind where a <think> stands."""
    return [float("</think>" in text) for text in completions]


class Counting:
    """An object as a reward function."""

    def __call__(self, completions: Sequence[str], **columns: object) -> list[float]:
        return [float(text.count("<think>")) for text in completions]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy whose tokenizer puts no bos in front."""
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def notes(model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The notes at the start of a run on these rows."""

    def make(*prompts: object, functions: Sequence[Any] = (), **settings: object) -> list[str]:
        rows = [{"prompt": prompt, "ground_truth": "2", "dataset": "integer", "solution": "2"} for prompt in prompts]
        config = from_values(
            {
                "model_name_or_path": str(model),
                "dataset_local_cache_dir": str(tmp_path / "cache"),
                "max_prompt_token_length": 200,
                "num_unique_prompts_rollout": 1,
                **settings,
            }
        )
        inputs, problems = read_inputs(config, functions=functions, dataset=rows)
        assert inputs is not None and problems == []
        made, problems = make_prompts(config, (inputs.train, inputs.held_out), vocab=None, is_sound=True)
        assert made is not None and problems == []
        return dataclasses.replace(inputs, prompts=made).notes(config)

    return make


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def put_bos_in_front(model: Path) -> int:
    """Have the tokenizer begin each text with its end token, which it calls bos as well; the token."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    token = next(each for each in tokenizer["added_tokens"] if each["content"] == "<|im_start|>")
    single = [{"SpecialToken": {"id": token["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token["content"]: {"id": token["content"], "ids": [token["id"]], "tokens": [token["content"]]}
        },
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    change(model / "tokenizer_config.json", bos_token=token["content"])
    return token["id"]


def test_a_healthy_model_has_no_notes(notes: Callable[..., list[str]]) -> None:
    """A note of every run is read in none."""
    assert notes("1+1=", [{"role": "user", "content": "1+1"}]) == []


def test_prompts_without_the_bos_of_the_tokenizer_are_noted(notes: Callable[..., list[str]], model: Path) -> None:
    """Some models write garbage without it, and TRL's prompts of text have it. Those that begin with it are not counted."""
    token = put_bos_in_front(model)
    # The template writes it, and so do rows of their own.
    conversation = [{"role": "user", "content": "1+1"}]
    own = "<|im_start|>7"
    (note,) = notes("1+1=", conversation, own, "2+2=")
    assert note.startswith(
        f"the tokenizer puts its bos token '<|im_start|>' ({token}) in front of a text, and 2 prompts"
    )
    assert note.endswith("add_bos=true puts it in front")
    assert notes("1+1=", "2+2=", add_bos=True) == [] == notes(conversation, own)
    # A prompt that is cut begins anywhere.
    assert notes("1" * 300, overlong_prompt_policy="truncate_left") == []


def test_an_eos_token_that_ends_nothing_is_noted(notes: Callable[..., list[str]], model: Path) -> None:
    """Each completion would run to the limit, and what follows the end be read as its answer."""
    from mgrpo.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    other = tokenizer.convert_tokens_to_ids("1")
    change(model / "generation_config.json", eos_token_id=other)
    (note,) = notes("1+1=")
    assert note == (
        f"the tokenizer's eos token {tokenizer.eos_token!r} ({tokenizer.eos_token_id}) does not end a completion, which goes on behind "
        f"it: eos_token_id in generation_config.json, or in config.json without one, names '1' ({other}) alone; add "
        f"{tokenizer.eos_token_id} there if the model ends with it"
    )
    assert notes("1+1=", stop_strings=[tokenizer.eos_token]) == []
    change(model / "generation_config.json", eos_token_id=[other, tokenizer.eos_token_id])
    assert notes("1+1=") == []


def test_a_reward_that_wants_the_thought_that_the_prompt_opens_is_noted(
    notes: Callable[..., list[str]], tmp_path: Path
) -> None:
    """It is 0 for every completion, and a run whose other rewards differ goes on without it."""
    (tmp_path / "opening.jinja").write_text(ANY_ROLE + "<think>\n")
    (tmp_path / "rewards.py").write_text(
        "def shape(completions, **_):\n    return [c.startswith('<think>') for c in completions]\n"
    )
    opening = {"chat_template_name": str(tmp_path / "opening.jinja")}
    asked = [{"role": "user", "content": "1+1"}]
    for function, name in (
        ("think_format_reward", "think_format_reward"),
        (BUILTIN["think_format_reward"](1, None), "think_format_reward"),
        (opened_format, "opened_format"),
        (Counting(), "Counting"),
        (f"{tmp_path / 'rewards.py'}:shape", "shape"),
    ):
        (note,) = notes(asked, "1+1", functions=[closed_format, function], **opening)
        assert note.startswith(f"1 prompts end with <think>, so completions begin behind it, and {name} looks for it")
        assert notes(asked, functions=[function]) == []
    others = [name for name in BUILTIN if name != "think_format_reward"]
    assert notes(asked, functions=[closed_format, *others], **opening) == []


def test_an_end_token_that_no_file_names_is_not_blamed_on_one(model: Path, tmp_path: Path) -> None:
    """It is a default of the tokenizer's class, which nobody finds in generation_config.json."""
    for name, lacks in (("generation_config.json", True), ("config.json", False)):
        for file in ("generation_config.json", "config.json") if lacks else ():
            values = json.loads((model / file).read_text())
            values.pop("eos_token_id", None)
            (model / file).write_text(json.dumps(values))
        if not lacks:
            change(model / name, eos_token_id=5)
        config = from_values({"model_name_or_path": str(model), "dataset_local_cache_dir": str(tmp_path / "cache")})
        _, (problem,) = make_prompts(config, (), vocab=1, is_sound=True)
        assert ("of the tokenizer, which model_name_or_path=" in problem) == lacks
        assert ("name the token that ends a completion in generation_config.json" in problem) == lacks


def test_row_tools_are_shown_without_tools_of_the_run_only(model: Path, tmp_path: Path) -> None:
    """In a run with tools the column names those, and an agent reads it itself."""
    (tmp_path / "t.jinja").write_text("{% for t in tools or [] %}({{ t.function.name }}){% endfor %}" + ANY_ROLE)
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    row = {"messages": [{"role": "user", "content": "1"}], "tools": [schema], "ground_truth": "2", "dataset": "integer"}
    values = {
        "num_unique_prompts_rollout": 1,
        "model_name_or_path": str(model),
        "chat_template_name": str(tmp_path / "t.jinja"),
    }
    config = from_values({**values, "dataset_local_cache_dir": str(tmp_path / "cache")})
    inputs, problems = read_inputs(config, dataset=[row])
    assert inputs is not None and problems == []
    made, problems = make_prompts(config, (inputs.train, inputs.held_out), vocab=None, is_sound=True)
    assert problems == [] and made is not None and made.train is not None
    assert made.train.prompt((0, 0)).text.startswith("(add)<|im_start|>user")
    _, problems = read_inputs(
        from_values({**values, "dataset_local_cache_dir": str(tmp_path / "cache"), "tools": ["calculate"]}),
        dataset=[row],
    )
    assert "is not a list of names" in " ".join(problems)
