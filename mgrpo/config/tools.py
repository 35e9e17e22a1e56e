"""The tools section: what answers a turn of the model, how far a trajectory goes, and what is scored of it."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mgrpo.config.annotations import (
    NO_ENTRIES,
    NOT_NEGATIVE,
    ONE_OR_MORE,
    OPEN_INSTRUCT,
    POSITIVE,
    TRL,
    JSONObject,
    Needs,
    Rule,
)
from mgrpo.processes.user_code import missing_file

SOURCES = ("tools", "environment_factory", "rollout_func")
"""Settings without which a completion has one turn; in Python they may hold functions and classes."""
PROGRAM = "rollout:"
"""Prefix of what `rollout_func` names."""
TRL_CLASS = "trl:"
"""Prefix of a class or function that `environment_factory` names: its public methods are the tools."""
PYTHON, SEARCH = frozenset({"python", "code"}), frozenset({"search", "serper_search", "s2_search"})
"""Names of the tools that an endpoint can stand for."""
CALL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
ACQUIRE_TIMEOUT_S = 60.0
"""Seconds for which completions may wait without any of them getting an environment."""
OWN_TEXT = ("legacy", "dr_tulu")
"""Formats that write what a tool answers by themselves, without the chat template."""

TURNS = Needs("tools or an agent", lambda has_turns: has_turns)
NO_PROGRAM = Needs("tools or environment_factory", lambda rollout_func, agent: rollout_func is None and agent is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool or environment as it was asked for."""

    entry: str
    """Its name, `module:attribute` or `path/file.py:attribute`; a TRL environment has the prefix `trl:`."""
    call_name: str = ""
    """Its name for the model; empty: its own name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    tools: Annotated[tuple[str, ...], OPEN_INSTRUCT, TRL] = ()
    """Tools that the model may call and environments that it plays against: names from docs/environments.md, or functions and
    environments of your own, package.module:name or file.py:name."""
    tool_call_names: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ()
    """Name of each of them for the model; empty: their own names."""
    tool_configs: Annotated[tuple[JSONObject, ...], OPEN_INSTRUCT] = ()
    """Settings of each of them, of rollout_func or of agent, as JSON objects, {} for none; empty: none for all."""
    environment_factory: Annotated[tuple[str, ...], TRL] = ()
    """Environments in TRL's form, classes whose public methods are the tools: package.module:Class or file.py:Class; of
    several, NAME=file.py:Class each."""
    rollout_func: Annotated[str | None, TRL] = None
    """A program that drives the model in place of tools: a function of your own, package.module:function or file.py:function."""
    tool_parser_type: Annotated[str, OPEN_INSTRUCT, TURNS] = "auto"
    """How calls are written in a turn, a name from docs/environments.md; auto: as the chat template writes them."""
    pass_tools_to_chat_template: Annotated[bool, OPEN_INSTRUCT, TURNS] = True
    """Describe the tools in every prompt, in the chat template's way."""
    max_tool_calls: Annotated[int | None, ONE_OR_MORE, TURNS, NO_PROGRAM] = 5
    """Calls that a completion may make, and turns against an environment; then it has one more turn to answer. A row's env_config
    may give another number as max_steps. none: no limit."""
    max_tool_calling_iterations: Annotated[int | None, NOT_NEGATIVE, TRL, TURNS, NO_PROGRAM] = None
    """Turns of a completion that may call tools, whatever the number of calls in each; none or 0: no limit."""
    per_turn_max_tokens: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT, TURNS] = None
    """Maximum tokens of one turn; none: what is left of response_length."""
    max_observation_tokens: Annotated[int | None, ONE_OR_MORE, TURNS] = None
    """Maximum tokens of what a tool answers, which is cut in the middle; none: a quarter of response_length."""
    thinking_history: Annotated[Literal["keep", "strip"], TURNS] = "keep"
    """Whether earlier turns keep their thinking when the user speaks again. strip: they are seen without it, where the chat
    template writes them so, and each part of such a completion is trained on by itself."""
    mask_tool_use: Annotated[bool, OPEN_INSTRUCT, TURNS] = True
    """Do not train on what tools answered; false: train on it as if the model had written it."""
    scored_text: Annotated[Literal["final", "assistant", "all"], TURNS] = "final"
    """Text that verifiers are given: the last turn without its calls and thinking, nothing if it was still calling; every turn of
    the model; or also what tools answered."""
    reward_aggregator: Annotated[Literal["last", "sum"], OPEN_INSTRUCT, TURNS] = "last"
    """A completion's reward from those of its turns; the score of verifiers or reward functions is added to the last."""
    only_reward_good_outputs: Annotated[bool, OPEN_INSTRUCT] = False
    """Scores of verifiers and reward functions count only for completions that have called a tool, and whose calls all succeeded
    in time."""
    turn_credit: Annotated[Literal["trajectory", "return"], TURNS] = "trajectory"
    """trajectory: every token has the advantage of the whole completion; return: that of the rewards from its turn on."""
    tool_timeout: Annotated[float, POSITIVE, TURNS] = 30.0
    """Seconds that a call may take; a later one has failed, which the model is told. An environment may take twice as long to begin, and at
    least 60; a completion whose environment fails to twice has no score."""
    trajectory_timeout: Annotated[float | None, POSITIVE, TURNS] = None
    """Seconds that a completion may take with all its turns; then it ends without a score. none: no limit."""
    pool_size: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT, TURNS] = None
    """Environments that exist at once; none: one for each completion."""
    env_workers: Annotated[int | None, ONE_OR_MORE, TURNS] = None
    """Processes that tools and environments run in; none: one for each core but one, at most 8."""
    env_python: Annotated[str | None, TURNS] = None
    """Interpreter of these processes, with the packages that environments need; it needs none of the trainer's. none: the
    trainer's own."""

    @property
    def reset_timeout_s(self) -> float:
        """Seconds that an environment may take to begin."""
        return max(ACQUIRE_TIMEOUT_S, 2 * self.tool_timeout)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The entries of `tools`, `environment_factory` and `rollout_func`, in this order; ValueError for settings that are not JSON."""
        names = self.tool_call_names or ("",) * len(self.tools)
        configs = self.tool_configs or (NO_ENTRIES,) * len(self.tools)
        own = [
            ToolSpec(entry=reference(entry), call_name=name, settings=settings_of(entry, text))
            for entry, name, text in zip(self.tools, names, configs, strict=bool(self.tools))
        ]
        program = [] if self.rollout_func is None else [self._program(self.rollout_func)]
        return (*own, *map(_factory, self.environment_factory), *program)

    def _program(self, word: str) -> ToolSpec:
        settings = settings_of(word, self.tool_configs[0]) if self.tool_configs else {}
        return ToolSpec(entry=PROGRAM + reference(word), settings=settings)


def settings_of(entry: str, text: str) -> dict[str, Any]:
    """The settings of one tool from their JSON; ValueError where that is not an object."""
    try:
        found = json.loads(text)
    except ValueError as err:
        raise ValueError(
            f"tool_configs: {text} of {entry} is not JSON ({err}); write an object, {{}} for none"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"tool_configs: {text} of {entry} must be a JSON object, {{}} for none")
    return found


def reference(word: str) -> str:
    """`package.module.NAME` as `package.module:NAME`; other words as they are."""
    module, dot, name = word.rpartition(".")
    is_dotted = dot and name != "py" and all(part.isidentifier() for part in word.split("."))
    return f"{module}:{name}" if is_dotted else word


def _factory(word: str) -> ToolSpec:
    name, _, entry = word.rpartition("=")
    return ToolSpec(entry=TRL_CLASS + reference(entry), call_name=name)


def source_problems(tools: Tools, agent: str | None) -> Iterator[str]:
    """Problems with words that name no tools, and with lists that do not fit them."""
    yield from _entries(tools.tools, tools.environment_factory, tools.rollout_func)
    yield from _lists(tools.tools, tools.rollout_func, agent, tools.tool_call_names, tools.tool_configs)


def _entries(tools: tuple[str, ...], environment_factory: tuple[str, ...], rollout_func: str | None) -> Iterator[str]:
    for name, words in (
        ("tools", tools),
        ("environment_factory", tuple(word.rpartition("=")[2] for word in environment_factory)),
        ("rollout_func", () if rollout_func is None else (rollout_func,)),
    ):
        for word in words:
            yield from _entry(name, word)


def _entry(name: str, word: str) -> Iterator[str]:
    module, _, attribute = reference(word.removeprefix(TRL_CLASS)).rpartition(":")
    if not word:
        yield f"{name} holds an empty word; name tools, or leave it out"
    elif word.endswith(".py"):
        yield f"{name}: {word} names a file but nothing in it; write {word}:NAME"
    elif module.endswith(".py") and missing_file(module):
        yield f"{name}: {missing_file(module)}"
    elif name == "rollout_func" and word == "verifiers":
        yield f"{name}: {word} is an agent; write agent=verifiers (verifiers 0.4 or later), with the same tool_configs"
    elif (module or name != "tools") and not (module and attribute.isidentifier()):
        yield f"{name}: {word} must be package.module:NAME or file.py:NAME"


def _lists(
    tools: tuple[str, ...],
    rollout_func: str | None,
    agent: str | None,
    tool_call_names: tuple[str, ...],
    tool_configs: tuple[JSONObject, ...],
) -> Iterator[str]:
    """One call name and one object of settings for each tool, and names that tell them apart."""
    driver = rollout_func or agent
    takers = tools if driver is None else (driver,)
    for name, count, wanted in (
        ("tool_call_names", len(tool_call_names), len(tools)),
        ("tool_configs", len(tool_configs), len(takers)),
    ):
        if count not in (0, wanted):
            entries = "1 entry" if count == 1 else f"{count} entries"
            whose = "the program" if name == "tool_configs" and takers is not tools else f"{len(tools)} tools"
            yield f"{name} has {entries} for {whose}; give one for each, or none"
    for entry, text in zip(takers, tool_configs, strict=False):
        try:
            settings_of(entry, text)
        except ValueError as err:
            yield str(err)
    for name in tool_call_names:
        if not CALL_NAME.fullmatch(name):
            yield f"tool_call_names: {name!r} must be a name of letters, digits and _ . -, at most 64, as models write it"
    for name, count in Counter(tool_call_names).items():
        if count > 1:
            yield f"tool_call_names has {name} {count} times; give each tool a name of its own"
    # One environment may be there twice with other settings, such as servers of other tools.
    alike = Counter(itertools.zip_longest(tools, tool_configs[: len(tools)]))
    for (name, _), count in alike.items():
        if count > 1 and not tool_call_names:
            yield f"tools has {name} {count} times; leave one out, or name them: --tool_call_names {name}_1 {name}_2"


def _interpreter(env_python: str | None) -> Iterator[str]:
    if env_python is not None and not (os.path.isfile(env_python) and os.access(env_python, os.X_OK)):
        yield f"env_python={env_python} must be the path of a Python interpreter, such as .venv-environments/bin/python"


def _program(tools: tuple[str, ...], environment_factory: tuple[str, ...], rollout_func: str | None) -> Iterator[str]:
    others = [name for name, on in (("tools", tools), ("environment_factory", environment_factory)) if on]
    if rollout_func is not None and others:
        yield (
            f"rollout_func={rollout_func} drives the model by itself, so {' and '.join(others)} would answer nothing; "
            "leave one of them out"
        )


def _masks(
    has_turns: bool,
    mask_tool_use: bool,
    use_vllm_logprobs: bool,
    use_rho_correction: bool,
    off_policy_mask_threshold: float | None,
) -> Iterator[str]:
    corrections = (
        ("use_vllm_logprobs=true", use_vllm_logprobs),
        ("use_rho_correction=true", use_rho_correction),
        ("off_policy_mask_threshold", off_policy_mask_threshold is not None),
    )
    used = [name for name, is_on in corrections if is_on]
    if has_turns and not mask_tool_use and used:
        yield (
            f"mask_tool_use=false trains on tokens that no engine has sampled, which have no logprob of one, but "
            f"{' and '.join(used)} compares with it; set mask_tool_use to true, or turn that off"
        )


def _stripping(has_turns: bool, thinking_history: str, mask_tool_use: bool) -> Iterator[str]:
    if has_turns and thinking_history == "strip" and not mask_tool_use:
        yield (
            "thinking_history=strip samples a turn after a context of its own, which is not trained on, but mask_tool_use=false "
            "trains on what environments answered; set mask_tool_use to true, or thinking_history to keep"
        )


def _lengths(
    per_turn_max_tokens: int | None, max_observation_tokens: int | None, response_length: int
) -> Iterator[str]:
    if per_turn_max_tokens is not None and per_turn_max_tokens > response_length:
        yield (
            f"per_turn_max_tokens={per_turn_max_tokens} is more than response_length={response_length}, which all turns share; "
            "lower it, or leave it out"
        )
    if max_observation_tokens is not None and max_observation_tokens >= response_length:
        yield (
            f"max_observation_tokens={max_observation_tokens} must be below response_length={response_length}, which also "
            "counts what tools answer; lower it, or leave it out"
        )


def _timeouts(
    has_turns: bool,
    tool_timeout: float,
    trajectory_timeout: float | None,
    reset_timeout_s: float,
    rollout_timeout: int,
) -> Iterator[str]:
    for name, seconds in (
        ("tool_timeout", tool_timeout),
        ("trajectory_timeout", trajectory_timeout),
    ):
        if has_turns and seconds is not None and seconds >= rollout_timeout:
            yield (
                f"{name}={seconds:g} must be below rollout_timeout={rollout_timeout}, after which the whole run ends; lower it, or "
                "raise rollout_timeout"
            )
    if has_turns and tool_timeout < rollout_timeout <= reset_timeout_s:
        yield (
            f"rollout_timeout={rollout_timeout}, after which the whole run ends, must be above the {reset_timeout_s:g} s that an "
            f"environment may take to begin, twice tool_timeout={tool_timeout:g} and at least {ACQUIRE_TIMEOUT_S:g}, for which completions "
            "also wait for a free one; raise it, or lower tool_timeout"
        )


def _good_outputs(has_turns: bool, only_reward_good_outputs: bool) -> Iterator[str]:
    if only_reward_good_outputs and not has_turns:
        yield (
            "only_reward_good_outputs=true rewards only completions that have called a tool, and there are none; name "
            "tools, or set it to false"
        )


def _credit(
    has_turns: bool, turn_credit: str, advantage_normalization_type: str, is_own_estimator: bool
) -> Iterator[str]:
    if turn_credit != "return" or not has_turns:
        return
    if advantage_normalization_type == "gdpo":
        yield (
            "turn_credit=return compares the rewards of turns, but advantage_normalization_type=gdpo those of whole "
            "completions, function by function; choose standard or centered, or turn_credit=trajectory"
        )
    elif is_own_estimator:
        yield (
            f"turn_credit=return has no effect with advantage_normalization_type={advantage_normalization_type}, a function "
            "that may give each token an advantage of its own; leave turn_credit out"
        )


def _pool(
    has_turns: bool, pool_size: int | None, num_samples_per_prompt_rollout: int, eval_pass_at_k: int
) -> Iterator[str]:
    for name, size in (
        ("num_samples_per_prompt_rollout", num_samples_per_prompt_rollout),
        ("eval_pass_at_k", eval_pass_at_k),
    ):
        if has_turns and pool_size is not None and pool_size < size:
            yield (
                f"pool_size={pool_size} must be at least {name}={size}: the completions of a prompt begin together; raise "
                "it, or leave it out"
            )


def _template(
    has_turns: bool, rollout_func: str | None, tool_parser_type: str, chat_template_name: str
) -> Iterator[str]:
    if rollout_func is not None and chat_template_name == "none":
        yield f"rollout_func={rollout_func} talks to the model in chats, but chat_template_name=none; choose a template"
        return
    if has_turns and chat_template_name == "none" and tool_parser_type not in OWN_TEXT:
        yield (
            f"tool_parser_type={tool_parser_type} writes what a tool answers by the chat template, but chat_template_name=none; "
            f"choose a template, or one of {', '.join(OWN_TEXT)}"
        )


RULES: tuple[Rule, ...] = (
    _entries,
    _lists,
    _interpreter,
    _program,
    _masks,
    _stripping,
    _lengths,
    _timeouts,
    _good_outputs,
    _credit,
    _template,
    _pool,
)


def _waiting(has_turns: bool, pool_size: int | None, batch_size: int) -> Iterator[str]:
    if has_turns and pool_size is not None and pool_size < batch_size:
        yield (
            f"pool_size={pool_size} is less than the {batch_size} completions of a step, so some wait for others' "
            f"environments; where none gets one for {ACQUIRE_TIMEOUT_S:g} s they have no score"
        )


def _reading_again(has_turns: bool, vllm_enable_prefix_caching: bool) -> Iterator[str]:
    if has_turns and not vllm_enable_prefix_caching:
        yield "vllm_enable_prefix_caching=false makes engines read all earlier turns of a completion again for each turn"


WARNINGS: tuple[Rule, ...] = (_waiting, _reading_again)
