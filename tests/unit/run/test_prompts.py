"""What prompts tell the model of its tools, from the settings to the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mgrpo.moving import from_values
from mgrpo.run.inputs.prompts import make_prompts
from mgrpo.run.inputs.reading import read_inputs
from tests.shipped import GAMES

MODEL = Path(__file__).parents[3] / "examples" / "calculator" / "model"
NAMES = "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"

TOOLS_FILE = '''
def look() -> str:
    """Look around."""

class Room:
    def reset(self, **columns): pass
    def enter(self) -> str:
        """Go in."""

class Hall:
    def reset(self, **columns): pass
    def leave(self) -> str:
        """Go out."""
'''


@pytest.fixture
def shown(tmp_path: Path) -> Callable[..., list[str]]:
    """The tools that the prompts of rows with these columns tell of."""
    template = (MODEL / "chat_template.jinja").read_text()
    (tmp_path / "template.jinja").write_text(NAMES + template)

    def make(*rows: dict[str, object], **settings: object) -> list[str]:
        asked = {"messages": [{"role": "user", "content": "1+1"}], "ground_truth": "2", "dataset": "integer"}
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(asked | row) + "\n" for row in rows))
        config = from_values(
            {
                "model_name_or_path": str(MODEL),
                "chat_template_name": str(tmp_path / "template.jinja"),
                "dataset_local_cache_dir": str(tmp_path / "cache"),
                "dataset_mixer_list": [str(tmp_path / "rows.jsonl"), "1.0"],
                "shuffle_dataset": False,
                "num_unique_prompts_rollout": 1,
                **settings,
            }
        )
        inputs, problems = read_inputs(config)
        assert inputs is not None and problems == []
        mixtures = (inputs.train, inputs.held_out)
        prompts, problems = make_prompts(config, mixtures, toolset=inputs.toolset, vocab=None, is_sound=True)
        assert problems == [] and prompts is not None and prompts.train is not None
        texts = [prompts.train.prompt((0, index)).text for index in range(len(rows))]
        assert all(text.endswith("<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n") for text in texts)
        return [text[: text.index("<|im_start|>")] for text in texts]

    return make


@pytest.fixture
def tools_file(tmp_path: Path) -> Path:
    """A function and two classes in TRL's form."""
    path = tmp_path / "own_tools.py"
    path.write_text(TOOLS_FILE)
    return path


def test_without_tools_a_column_of_their_name_is_like_any_other(shown: Callable[..., list[str]]) -> None:
    """Data of others have such a column; it says nothing to a run that has no tools."""
    assert shown({"tools": ["search"]}, {"tools": "x"}) == ["", ""]


def test_a_template_that_is_told_of_no_tools_shows_none(shown: Callable[..., list[str]]) -> None:
    """A system message of the rows describes them."""
    rows = {"tools": ["increment"]}, {"tools": None}
    assert shown(*rows, tools=[f"{GAMES}:Counter"], pass_tools_to_chat_template=False) == ["", ""]


def test_prompts_tell_of_the_tools_that_a_row_may_call_and_of_no_other(
    shown: Callable[..., list[str]], tools_file: Path
) -> None:
    """Of one that it is not told of a model cannot know; calling one that the row forbids is an error in its trajectory."""
    game = "(increment)(decrement)(submit)"
    rows: list[tuple[dict[str, object], str]] = [
        ({"tools": ["counter"]}, game),
        ({"tools": ["submit"]}, "(submit)"),
        ({"tools": ["look"], "env_config": {"env_name": "counter"}}, f"{game}(look)"),
        ({"tools": []}, ""),
        ({}, f"{game}(look)"),
    ]
    found = shown(*(row for row, _ in rows), tools=[f"{GAMES}:Counter", f"{tools_file}:look"])
    assert found == [expected for _, expected in rows]


def test_of_alternatives_a_prompt_tells_of_the_one_that_its_row_names(
    shown: Callable[..., list[str]], tools_file: Path
) -> None:
    """The others do not play."""
    classes = [f"a={tools_file}:Room", f"b={tools_file}:Hall"]
    assert shown({"environment": "a"}, {"environment": "b"}, environment_factory=classes) == ["(enter)", "(leave)"]
