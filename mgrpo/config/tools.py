"""The tools section of the configuration: what answers a turn of the model, how far a trajectory goes, and what is scored of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    Range,
)

SOURCES = ("tools", "environment_factory", "rollout_func")
"""Settings without which a completion has one turn; in Python they may hold functions and classes."""
PROGRAM = "rollout:"
"""Prefix of what `rollout_func` names."""
TRL_CLASS = "trl:"
"""Prefix of a class or function that `environment_factory` names: its public methods are the tools."""
PYTHON, SEARCH = frozenset({"python", "code"}), frozenset({"search", "serper_search", "s2_search"})
"""Names of the tools that an endpoint can stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool or environment as it was asked for."""

    entry: str
    """Its name, `module:attribute` or `path/file.py:attribute`; a TRL environment has the prefix `trl:`."""
    call_name: str = ""
    """What the model calls it; empty: its own name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    tools: Annotated[tuple[str, ...], OPEN_INSTRUCT, TRL] = ()
    """What the model may call, or plays against: names from docs/environments.md, or functions and environments of your own,
    package.module:name or file.py:name."""
    tool_call_names: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ()
    """What the model calls each of them; empty: their own names."""
    tool_configs: Annotated[tuple[JSONObject, ...], OPEN_INSTRUCT] = ()
    """Settings of each of them, or of rollout_func, as JSON objects, {} for none; empty: none for all."""
    environment_factory: Annotated[tuple[str, ...], TRL] = ()
    """Environments in TRL's form, classes whose public methods are the tools: package.module:Class or file.py:Class; of
    several, NAME=file.py:Class each."""
    rollout_func: Annotated[str | None, TRL] = None
    """A program that drives the model in place of tools: verifiers, or a function of your own, package.module:function or
    file.py:function."""
    tool_parser_type: Annotated[str, OPEN_INSTRUCT] = "auto"
    """How calls are written in a turn, a name from docs/environments.md; auto: as the chat template writes them."""
    pass_tools_to_chat_template: Annotated[bool, OPEN_INSTRUCT] = True
    """Describe the tools in every prompt, in the chat template's way."""
    max_tool_calls: Annotated[int | None, ONE_OR_MORE] = 5
    """Calls that a completion may make, and turns against an environment; then it has one more turn to answer. A row's env_config
    may give another number as max_steps. none: no limit."""
    max_tool_calling_iterations: Annotated[int | None, NOT_NEGATIVE, TRL] = None
    """Turns of a completion that may call tools, whatever the number of calls in each; none or 0: no limit."""
    per_turn_max_tokens: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT] = None
    """Maximum tokens of one turn; none: what is left of response_length."""
    max_observation_tokens: Annotated[int | None, ONE_OR_MORE] = None
    """Maximum tokens of what a tool answers, which is cut in the middle; none: a quarter of response_length."""
    thinking_history: Literal["keep", "strip"] = "keep"
    """Whether earlier turns keep their thinking when the user speaks again. strip: they are seen without it, where the chat
    template writes them so, and each part of such a completion is trained on by itself."""
    mask_tool_use: Annotated[bool, OPEN_INSTRUCT] = True
    """Do not train on what tools answered; false: train on it as if the model had written it."""
    scored_text: Literal["final", "assistant", "all"] = "final"
    """What verifiers are given: the last turn without its calls and thinking, nothing if it was still calling; every turn of
    the model; or also what tools answered."""
    reward_aggregator: Annotated[Literal["last", "sum"], OPEN_INSTRUCT] = "last"
    """A completion's reward from those of its turns; what verifiers or reward functions give is added to the last."""
    only_reward_good_outputs: Annotated[bool, OPEN_INSTRUCT] = False
    """What verifiers or reward functions give counts only for completions that have called a tool, and whose calls all
    succeeded in time."""
    turn_credit: Literal["trajectory", "return"] = "trajectory"
    """trajectory: every token has the advantage of the whole completion; return: that of the rewards from its turn on."""
    turn_discount: Annotated[float, Range(low=0, high=1)] = 1.0
    """With turn_credit=return: the weight of the next turn's reward; that of the one after it is its square."""
    turn_scheduling: Literal["auto", "rounds", "free"] = "auto"
    """rounds: all completions finish a turn before any begins its next, and a run repeats to the bit; free: each goes on as
    soon as its tools have answered; auto: rounds for environments that repeat, with async_steps=0."""
    tool_timeout: Annotated[float, POSITIVE] = 30.0
    """Seconds that a call may take; a later one has failed, which the model is told."""
    env_reset_timeout: Annotated[float, POSITIVE] = 60.0
    """Seconds that an environment may take to begin; a completion whose environment fails twice has no score."""
    env_acquire_timeout: Annotated[float, POSITIVE] = 60.0
    """Seconds for which completions may wait without any of them getting an environment; then they have no score. Time in which
    no environment has work, as while the model is trained, counts a tenth."""
    trajectory_timeout: Annotated[float | None, POSITIVE] = None
    """Seconds that a completion may take with all its turns; then it ends without a score. none: no limit."""
    pool_size: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT] = None
    """Environments that exist at once; none: one for each completion."""
    env_workers: Annotated[int | None, ONE_OR_MORE] = None
    """Processes that tools and environments run in; none: one for each core but one, at most 8."""
    env_python: str | None = None
    """Interpreter of these processes, with the packages that environments need; it needs none of the trainer's. none: the
    trainer's own."""
    code_tool_api_endpoint: str | None = None
    """URL of a code service that the tool python sends its code to; none: a sandbox on this machine."""
    search_api_endpoint: str | None = None
    """URL of a search service that the tool search asks in place of an index."""

    @property
    def is_on(self) -> bool:
        """Whether a completion may have several turns."""
        return bool(self.tools or self.environment_factory or self.rollout_func)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What `tools` and then `environment_factory` ask for; ValueError for settings that are not JSON objects."""
        names = self.tool_call_names or ("",) * len(self.tools)
        configs = self.tool_configs or (NO_ENTRIES,) * len(self.tools)
        own = [
            ToolSpec(entry=reference(entry), call_name=name, settings=self._endpoint(entry) | settings_of(entry, text))
            for entry, name, text in zip(self.tools, names, configs, strict=self.rollout_func is None)
        ]
        program = [] if self.rollout_func is None else [self._program(self.rollout_func)]
        return (*own, *map(_factory, self.environment_factory), *program)

    def endpoint(self, entry: str) -> str | None:
        """URL of the service that this tool asks."""
        if entry in PYTHON:
            return self.code_tool_api_endpoint
        return self.search_api_endpoint if entry in SEARCH else None

    def _program(self, word: str) -> ToolSpec:
        settings = settings_of(word, self.tool_configs[0]) if self.tool_configs else {}
        return ToolSpec(entry=PROGRAM + reference(word), settings=settings)

    def _endpoint(self, entry: str) -> dict[str, Any]:
        url = self.endpoint(entry)
        return {} if url is None else {"endpoint": url}


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
