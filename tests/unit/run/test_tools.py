"""The tools of a run, from settings to what plays: what is refused, what rows may name, and how flags of others arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mgrpo.config import Config
from mgrpo.config.validate import problems
from mgrpo.data.mixture import open_data
from mgrpo.data.tokenizer import load_tokenizer
from mgrpo.environments.environment import Tool
from mgrpo.environments.loop.episodes import EpisodeBounds
from mgrpo.environments.loop.language import TemplateLanguage
from mgrpo.environments.offered.description import Description, Offer
from mgrpo.environments.tools.indexing import build
from mgrpo.environments.workers.environment_catalog import Spec
from mgrpo.moving import from_values, parse
from mgrpo.run.inputs import toolset as tools_of_a_run
from mgrpo.run.inputs.prompts import Prompts, make_prompts
from mgrpo.run.inputs.reading import Inputs, read_inputs
from mgrpo.run.inputs.toolset import (
    UNLIMITED,
    Toolset,
    make_interaction,
    make_language,
    read_tools,
    remarks,
    row_problems,
    with_stop_strings,
)

pytest.importorskip("transformers")

MODEL = Path(__file__).parents[3] / "examples" / "calculator" / "model"
ON = {"tools": ["calculate"]}
ROW = {"messages": [{"role": "user", "content": "1+1"}], "ground_truth": "2", "dataset": "integer"}
MINE = '''
def twice(x: int) -> int:
    """Double a number.

    Args:
        x: the number
    """
    return 2 * x

def undescribed(x):
    return x

class Game:
    def reset(self, **row): ...

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess
        """
        return "no"
'''


def offer(name: str, *tools: str, **fields: Any) -> Offer:
    values = {"entry": name, "is_repeatable": True, "gives_reward": False, "is_alternative": False} | fields
    own = tuple(Tool(name=tool, description="", parameters={"type": "object", "properties": {}}) for tool in tools)
    return Offer(name=name, tools=own, **values)


def toolset(*offers: Offer, specs: tuple[Spec, ...] = ()) -> Toolset:
    return Toolset(specs=specs, description=Description(offers=offers))


CALCULATE = toolset(offer("calculate", "calculate"))


def language(values: dict[str, Any], of: Toolset = CALCULATE, *, prompt: str = "") -> TemplateLanguage:
    prompts = [SimpleNamespace(prompt=lambda prompt_id: SimpleNamespace(text=prompt)), None]
    return make_language(from_values(ON | values), of, tokenizer=load_tokenizer(MODEL), stop_ids=[2], prompts=prompts)


@pytest.mark.parametrize(
    ("values", "of", "words"),
    [
        ({"tool_parser_type": "hermess"}, CALCULATE, "tool_parser_type='hermess' is unknown; expected auto, hermes"),
        (
            {"chat_template_name": "simple_chat"},
            CALCULATE,
            "tool_parser_type=auto finds no format of tool calls in the",
        ),
        (
            {"chat_template_name": "tulu", "tool_parser_type": "hermes"},
            CALCULATE,
            "the chat template cannot be used with tools: it drops messages of the role tool",
        ),
        (
            {"chat_template_name": "r1_simple_chat_postpend_think", "tool_parser_type": "legacy"},
            toolset(offer("talker")),
            "the chat template cannot be used with an environment that answers as a user does",
        ),
    ],
)
def test_a_language_that_cannot_be_spoken_is_refused(values: dict[str, Any], of: Toolset, words: str) -> None:
    """Found at the first call, it would end the run, or go unseen."""
    with pytest.raises(ValueError) as raised:
        language(values, of)
    assert words in str(raised.value)


def test_a_special_token_in_a_tools_schema_is_refused() -> None:
    """The server that describes a tool could end the system's turn in each prompt."""
    eos = load_tokenizer(MODEL).eos_token
    for tool in (
        Tool(name="search", description=f"Finds.{eos}", parameters={"type": "object", "properties": {}}),
        Tool(name="search", description="", parameters={"type": "object", "properties": {"q": {"enum": [eos]}}}),
    ):
        described = toolset(replace(offer("search"), tools=(tool,)))
        with pytest.raises(ValueError, match=f"the tool 'search' hold the special token {re.escape(repr(eos))}"):
            language({}, described)
        assert language({"pass_tools_to_chat_template": False}, described)


def test_only_what_is_needed_of_the_template_is_proven() -> None:
    """A format that writes answers itself needs nothing of it, nor does a run without tools for what they answer."""
    assert language({"chat_template_name": "tulu", "tool_parser_type": "legacy"}).format.name == "legacy"
    for parser in ({}, {"tool_parser_type": "hermes"}):
        talks = language({"chat_template_name": "tulu"} | parser, toolset(offer("talker")))
        assert talks.format.name == "hermes"


def test_a_language_is_that_of_the_settings() -> None:
    found = language({"response_length": 400})
    assert (found.format.name, found.max_observation_tokens, found.is_thinking) == ("hermes", 100, False)
    found = language({"max_observation_tokens": 7, "tool_parser_type": "vllm_hermes"}, prompt="2+2 <think>\n")
    assert (found.format.name, found.max_observation_tokens, found.is_thinking) == ("hermes", 7, True)


def test_a_turn_ends_where_a_call_does() -> None:
    """The model would go on and make up the answer; the user's own strings end turns as before."""
    config = from_values(ON | {"stop_strings": ["END", "</calculate>"]})
    legacy = language({"tool_parser_type": "legacy"}, toolset(offer("a", "calculate", "look")))
    assert with_stop_strings(config, legacy).rollout.stop_strings == ("END", "</calculate>", "</look>")
    assert with_stop_strings(config, language({})) is config
    assert with_stop_strings(config, None) is config


@pytest.mark.parametrize(
    ("values", "is_repeatable", "in_rounds"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"async_steps": 1}, True, False),
        ({"active_sampling_oversample": 0.5}, True, False),
        ({"pool_size": 6}, True, False),
    ],
)
def test_turns_go_in_rounds_where_that_repeats(values: dict[str, Any], is_repeatable: bool, in_rounds: bool) -> None:
    """In rounds with too few environments, those that have one wait for those that wait for one."""
    own = {"num_unique_prompts_rollout": 3, "num_samples_per_prompt_rollout": 2, "async_steps": 0}
    config = from_values(ON | own | values)
    assert toolset(offer("a", "a", is_repeatable=is_repeatable)).plays_in_rounds(config) is in_rounds


def test_prompts_tell_of_tools_unless_they_shall_not() -> None:
    assert CALCULATE.shown(from_values(ON)) is CALCULATE.description
    assert CALCULATE.shown(from_values(ON | {"pass_tools_to_chat_template": False})) is None
    assert toolset(offer("talker")).shown(from_values(ON)) is None


def about(config: Config, of: Toolset) -> list[str]:
    return remarks(config, of, language({}))


def test_that_a_run_cannot_be_repeated_is_said_with_what_can_be_done() -> None:
    """A seed is given to get the same run again."""
    config = from_values(ON)
    assert about(config, CALCULATE) == []
    python = toolset(offer("python", "python", is_repeatable=False), offer("calculate"), specs=(Spec(entry="python"),))
    (found,) = about(config, python)
    assert found.startswith("python may answer equal calls differently, so this run cannot be repeated to the bit")
    assert "is_repeatable" not in found, "it has no such setting"
    own = offer("twice", "twice", entry="a.py:twice", is_repeatable=False)
    (found,) = about(config, toolset(own, *python.description.offers, specs=(Spec(entry="a.py:twice"),)))
    assert found.startswith("twice and python may") and found.endswith("set is_repeatable to true in its tool_configs")
    trl = toolset(offer("Game", "guess", entry="a.py:Game", is_repeatable=False), specs=(Spec(entry="trl:a.py:Game"),))
    assert "tool_configs" not in about(config, trl)[0], "environment_factory has none"


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Settings of data with these rows in `FOLDER/NAME.jsonl`."""

    def write(*rows: dict[str, Any], setting: str = "dataset_mixer_list") -> dict[str, Any]:
        path = tmp_path / f"{setting}.jsonl"
        path.write_text("".join(json.dumps(ROW | row) + "\n" for row in rows))
        return {setting: [str(path), "1.0"], "dataset_local_cache_dir": str(tmp_path / "cache")}

    return write


def test_what_rows_ask_for_and_the_run_lacks_is_told_by_file_and_line(rows: Callable[..., dict[str, Any]]) -> None:
    """Once for each mistake: a column holds the same one ten thousand times."""
    train = rows({}, {"tools": ["calc"]}, {"tools": ["calc"]}, {"tools": "calculate"}, {"tools": ["calculate"]})
    held_out = rows({"env_config": {"env_name": "calculate", "max_steps": 0}}, setting="dataset_mixer_eval_list")
    found = row_problems(CALCULATE, open_data(from_values(train | held_out).data))
    assert [problem.rpartition("/")[2].split(" (")[0] for problem in found] == [
        "dataset_mixer_list.jsonl:2: the row names calc; the tools and environments are calculate",
        "dataset_mixer_list.jsonl:4: tools: 'calculate' is not a list of names, such as ['python', 'search']",
        "dataset_mixer_eval_list.jsonl:1: env_config: max_steps=0 must be a whole number, at least 1",
    ]


def test_environments_that_rows_must_choose_from_are_a_problem_of_all_rows(rows: Callable[..., dict[str, Any]]) -> None:
    """Each row is alike where none has such a column, and an evaluation has no training rows."""
    two = toolset(*(offer(name, f"{name}_move", is_alternative=True) for name in ("chess", "go")))
    (found,) = row_problems(two, open_data(from_values(rows({}, {})).data))
    assert found == "every row: the row's environment is None, expected one of chess, go"
    choosing = rows({"environment": "go"}, {}, setting="dataset_mixer_eval_list")
    (found,) = row_problems(two, open_data(from_values(choosing).data))
    assert found.endswith("list.jsonl:2: the row's environment is None, expected one of chess, go")
    chosen = rows({"environment": "go"}, setting="dataset_mixer_eval_list")
    assert row_problems(two, open_data(from_values(chosen).data)) == []


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({"tools": ["python", "calculate"]}, [{}, {}]),
        ({"tools": ["code", "calculate"], "code_sandbox_accept_risk": True}, [{"accept_risk": True}, {}]),
        (
            {"tools": ["python"], "code_sandbox_accept_risk": True, "tool_configs": ['{"accept_risk": false}']},
            [{"accept_risk": False}],
        ),
    ],
)
def test_a_risk_that_is_accepted_for_verifiers_is_for_the_models_code(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], settings: list[dict[str, Any]]
) -> None:
    """Other tools have no such setting and would not be made."""
    monkeypatch.setattr(tools_of_a_run, "describe", lambda specs, folders, python, variables: Description(offers=()))
    found, wrong = read_tools(from_values(values))
    assert wrong == [] and found is not None and [spec.settings for spec in found.specs] == settings


def test_what_the_rules_say_of_tools_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started with words that are known to be wrong."""
    monkeypatch.setattr(tools_of_a_run, "describe", None)
    for wrong in (
        {"tool_call_names": ["a", "b"]},
        {"tool_configs": ["[1]"]},
        {"tools": ["nowhere.py:f"]},
        {"tools": [], "environment_factory": ["Chess"]},
    ):
        assert read_tools(from_values(ON | wrong)) == (None, [])
    assert read_tools(from_values({})) == (None, [])


def test_what_cannot_be_built_is_told_by_the_users_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    asked = {"tools": ["calculater", "mine.py:undescribed"], "environment_factory": ["mine.py:twice"]}
    found, (problem,) = read_tools(from_values(asked))
    assert found is None
    assert problem.startswith("the tools cannot be started: there is no tool calculater; did you mean calculate?")
    assert "; mine.py:undescribed cannot be made: " in problem and "; mine.py:twice cannot be made: " in problem


class Run:
    """What becomes of a command line."""

    def __init__(self, flags: list[str], data: dict[str, Any], folder: Path) -> None:
        lengths = "--max_prompt_token_length 400 --response_length 400 --pack_length 800 --num_unique_prompts_rollout 2"
        own = ["--model_name_or_path", str(MODEL), "--output_dir", str(folder / "out"), *lengths.split()]
        for name, value in data.items():
            own += [f"--{name}", *([value] if isinstance(value, str) else value)]
        self.config: Config = parse([*own, *flags])
        assert problems(self.config, world_size=1) == []
        inputs, found = read_inputs(self.config)
        assert found == [] and inputs is not None and inputs.toolset is not None
        mixtures = (inputs.train, inputs.held_out)
        prompts, found = make_prompts(self.config, mixtures, toolset=inputs.toolset, vocab=192, is_sound=True)
        assert found == [] and prompts is not None and prompts.language is not None
        self.inputs: Inputs = inputs
        self.prompts: Prompts = prompts
        self.language: TemplateLanguage = prompts.language
        self.bounds = bounds(self.config, inputs.toolset, prompts.language)

    @property
    def names(self) -> list[str]:
        assert self.inputs.toolset is not None
        return [tool.name for tool in self.inputs.toolset.description.tools]


def bounds(config: Config, of: Toolset, spoken: TemplateLanguage) -> EpisodeBounds:
    made = make_interaction(config, of, spoken, opened=print, asked=print)
    made.loop.close()
    return made.episodes.bounds


def test_open_instructs_tools_arrive(rows: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """A script with a code tool and a search, whose rows say what they may use."""
    documents = tmp_path / "documents.jsonl"
    documents.write_text('{"title": "Rome", "text": "A town."}\n')
    build([documents], tmp_path / "docs.db")
    data = rows({"tools": ["code"]}, {"tools": ["search"], "env_config": {"env_configs": [], "max_steps": 2}})
    flags = ["--tools", "python", "search", "--tool_call_names", "code", "search", "--tool_configs", "{}"]
    flags += [json.dumps({"index": str(tmp_path / "docs.db")}), "--tool_parser_type", "vllm_hermes", "--max_steps", "3"]
    run = Run([*flags, "--code_sandbox_accept_risk", "true", "--preset", "open_instruct_main"], data, tmp_path)
    assert run.names == ["code", "search"] and run.language.format.name == "hermes"
    assert (run.bounds.max_calls, run.bounds.max_calling_turns) == (3, None)
    assert run.prompts.train is not None
    assert [run.prompts.train.prompt((0, i)).columns["tools"] for i in range(2)] == [["code"], ["search"]]


def test_the_preset_of_open_instruct_reads_calls_as_open_instruct_does(
    rows: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Its default is to end a turn at the call's closing tag and to answer in place."""
    run = Run(["--tools", "calculate", "--preset", "open_instruct_main"], rows({}, {}), tmp_path)
    assert run.language.format.name == "legacy" and run.bounds.max_calls == 5
    assert with_stop_strings(run.config, run.language).rollout.stop_strings[-1] == "</calculate>"
    assert run.language.format.answer(["6"]) == "<output>\n6\n</output>\n"


def test_trls_tools_arrive(
    rows: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function and an environment of the user's own files, with a limit in TRL's unit."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    flags = "--tools mine.py:twice --environment_factory mine.py:Game --max_tool_calling_iterations 2"
    run = Run(flags.split(), rows({}, {}), tmp_path)
    assert run.names == ["twice", "guess"]
    assert (run.bounds.max_calls, run.bounds.max_calling_turns) == (UNLIMITED, 2)
    (said,) = remarks(run.config, run.inputs.toolset, run.language)
    assert said.startswith("twice and Game may answer equal calls differently")


@pytest.mark.parametrize(
    ("values", "calls", "turns"),
    [
        ({}, 5, None),
        ({"max_tool_calls": None}, UNLIMITED, None),
        ({"max_tool_calling_iterations": 3}, UNLIMITED, 3),
        ({"max_tool_calling_iterations": 0}, UNLIMITED, None),
        ({"max_tool_calling_iterations": 0, "max_tool_calls": 4}, 4, None),
    ],
)
def test_no_turns_with_calls_are_no_limit_of_them(values: dict[str, Any], calls: int, turns: int | None) -> None:
    """As in TRL, where 0 and None are the same."""
    found = bounds(from_values(ON | values), CALCULATE, language({}))
    assert (found.max_calls, found.max_calling_turns) == (calls, turns)
