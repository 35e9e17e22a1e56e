"""Rules between the settings of tools and environments, and what of them is without effect."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator

from mgrpo.config.rules import Rule
from mgrpo.config.schema import Config
from mgrpo.config.tools import PYTHON, SEARCH, SOURCES, TRL_CLASS, reference, settings_of
from mgrpo.processes.user_code import missing_file

CALL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
VERIFIERS = "verifiers"
"""A program of ours."""
OWN_TEXT = ("legacy", "dr_tulu")
"""Formats that write what a tool answers by themselves, without the chat template."""
TIMEOUTS = ("tool_timeout", "env_reset_timeout", "env_acquire_timeout", "trajectory_timeout")


def _entries(config: Config) -> Iterator[str]:
    own = config.tools
    for name, words in (
        ("tools", own.tools),
        ("environment_factory", tuple(word.rpartition("=")[2] for word in own.environment_factory)),
        ("rollout_func", () if own.rollout_func is None else (own.rollout_func,)),
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
    elif word == VERIFIERS and name == "rollout_func":
        return
    elif (module or name != "tools") and not (module and attribute.isidentifier()):
        yield f"{name}: {word} must be package.module:NAME or file.py:NAME"


def _lists(config: Config) -> Iterator[str]:
    """One call name and one object of settings for each tool, and names that tell them apart."""
    own = config.tools
    for name in ("tool_call_names", "tool_configs"):
        count = len(getattr(own, name))
        takers = own.tools if name == "tool_call_names" or own.rollout_func is None else (own.rollout_func,)
        if count not in (0, len(takers)):
            entries = "1 entry" if count == 1 else f"{count} entries"
            whose = "the program" if takers is not own.tools else f"{len(takers)} tools"
            yield f"{name} has {entries} for {whose}; give one for each, or none"
    for entry, text in zip(takers, own.tool_configs, strict=False):
        try:
            found = settings_of(entry, text)
        except ValueError as err:
            yield str(err)
            continue
        url = own.endpoint(entry)
        if url is not None and found.get("endpoint", url) != url:
            yield (
                f"tool_configs gives {entry} the endpoint {found['endpoint']}, but {_endpoint_of(entry)}={url}; "
                "keep one of them"
            )
    for name in own.tool_call_names:
        if not CALL_NAME.fullmatch(name):
            yield f"tool_call_names: {name!r} must be a name of letters, digits and _ . -, at most 64, as models write it"
    for name, count in Counter(own.tool_call_names).items():
        if count > 1:
            yield f"tool_call_names has {name} {count} times; give each tool a name of its own"
    # One environment may be there twice with other settings, such as servers of other tools.
    alike = Counter(itertools.zip_longest(own.tools, own.tool_configs[: len(own.tools)]))
    for (name, _), count in alike.items():
        if count > 1 and not own.tool_call_names:
            yield f"tools has {name} {count} times; leave one out, or name them: --tool_call_names {name}_1 {name}_2"


def source_problems(config: Config) -> Iterator[str]:
    """About words that name no tools, and lists that do not fit them."""
    yield from _entries(config)
    yield from _lists(config)


def _endpoints(config: Config) -> Iterator[str]:
    for name in ("code_tool_api_endpoint", "search_api_endpoint"):
        url = getattr(config.tools, name)
        if url is not None and not url.startswith(("http://", "https://")):
            yield f"{name}={url} must be a URL, http://HOST:PORT/PATH"


def _interpreter(config: Config) -> Iterator[str]:
    path = config.tools.env_python
    if path is not None and not (os.path.isfile(path) and os.access(path, os.X_OK)):
        yield f"env_python={path} must be the path of a Python interpreter, such as .venv-environments/bin/python"


def _endpoint_of(entry: str) -> str:
    return "code_tool_api_endpoint" if entry in PYTHON else "search_api_endpoint"


def _program(config: Config) -> Iterator[str]:
    own = config.tools
    others = [name for name in ("tools", "environment_factory") if getattr(own, name)]
    if own.rollout_func is not None and others:
        yield (
            f"rollout_func={own.rollout_func} drives the model by itself, so {' and '.join(others)} would answer nothing; "
            "leave one of them out"
        )


def _masks(config: Config) -> Iterator[str]:
    own, loss = config.tools, config.loss
    corrections = (
        ("use_vllm_logprobs=true", config.algorithm.use_vllm_logprobs),
        ("use_rho_correction=true", loss.use_rho_correction),
        ("off_policy_mask_threshold", loss.off_policy_mask_threshold is not None),
    )
    used = [name for name, is_on in corrections if is_on]
    if own.is_on and not own.mask_tool_use and used:
        yield (
            f"mask_tool_use=false trains on tokens that no engine has sampled, which have no logprob of one, but "
            f"{' and '.join(used)} compares with it; set mask_tool_use to true, or turn that off"
        )


def _stripping(config: Config) -> Iterator[str]:
    own = config.tools
    if own.is_on and own.thinking_history == "strip" and not own.mask_tool_use:
        yield (
            "thinking_history=strip samples a turn after a context of its own, which is not trained on, but mask_tool_use=false "
            "trains on what environments answered; set mask_tool_use to true, or thinking_history to keep"
        )


def _lengths(config: Config) -> Iterator[str]:
    own, longest = config.tools, config.rollout.response_length
    if own.per_turn_max_tokens is not None and own.per_turn_max_tokens > longest:
        yield (
            f"per_turn_max_tokens={own.per_turn_max_tokens} is more than response_length={longest}, which all turns share; "
            "lower it, or leave it out"
        )
    if own.max_observation_tokens is not None and own.max_observation_tokens >= longest:
        yield (
            f"max_observation_tokens={own.max_observation_tokens} must be below response_length={longest}, which also "
            "counts what tools answer; lower it, or leave it out"
        )


def _timeouts(config: Config) -> Iterator[str]:
    limit = config.rollout.rollout_timeout
    for name in TIMEOUTS:
        seconds = getattr(config.tools, name)
        if config.tools.is_on and seconds is not None and seconds >= limit:
            yield (
                f"{name}={seconds:g} must be below rollout_timeout={limit}, after which the whole run ends; lower it, or "
                "raise rollout_timeout"
            )


def _good_outputs(config: Config) -> Iterator[str]:
    if config.tools.only_reward_good_outputs and not config.tools.is_on:
        yield (
            "only_reward_good_outputs=true rewards only completions that have called a tool, and there are none; name "
            "tools, or set it to false"
        )


def _credit(config: Config) -> Iterator[str]:
    kind = config.algorithm.advantage_normalization_type
    if config.tools.turn_credit == "return" and config.tools.is_on and kind == "gdpo":
        yield (
            "turn_credit=return compares the rewards of turns, but advantage_normalization_type=gdpo those of whole "
            "completions, function by function; choose standard or centered, or turn_credit=trajectory"
        )


def _rounds(config: Config) -> Iterator[str]:
    own = config.tools
    if own.turn_scheduling != "rounds" or not own.is_on:
        return
    if config.max_age:
        yield (
            "turn_scheduling=rounds waits for all completions of a step before each turn, but async_steps or "
            "active_sampling_oversample sample several steps at once; choose free or auto, or sample one step at a time"
        )
    if own.pool_size is not None:
        yield (
            f"turn_scheduling=rounds needs an environment for every completion, but there are pool_size={own.pool_size}; leave "
            "pool_size out, or choose turn_scheduling=free"
        )


def _pool(config: Config) -> Iterator[str]:
    own, rollout = config.tools, config.rollout
    for name in ("num_samples_per_prompt_rollout", "eval_pass_at_k"):
        size = getattr(rollout, name)
        if own.is_on and own.pool_size is not None and own.pool_size < size:
            yield (
                f"pool_size={own.pool_size} must be at least {name}={size}: the completions of a prompt begin together; raise "
                "it, or leave it out"
            )


def _template(config: Config) -> Iterator[str]:
    own, kind = config.tools, config.tools.tool_parser_type
    if own.rollout_func is not None and config.data.chat_template_name == "none":
        yield (
            f"rollout_func={own.rollout_func} talks to the model in chats, but chat_template_name=none; choose a template"
        )
        return
    if own.is_on and config.data.chat_template_name == "none" and kind not in OWN_TEXT:
        yield (
            f"tool_parser_type={kind} writes what a tool answers by the chat template, but chat_template_name=none; "
            f"choose a template, or one of {', '.join(OWN_TEXT)}"
        )


TOOL_RULES: tuple[Rule, ...] = (
    (SOURCES, _entries),
    (
        ("tools", "rollout_func", "tool_call_names", "tool_configs", "code_tool_api_endpoint", "search_api_endpoint"),
        _lists,
    ),
    (("code_tool_api_endpoint", "search_api_endpoint"), _endpoints),
    (("env_python",), _interpreter),
    (SOURCES, _program),
    (
        (*SOURCES, "mask_tool_use", "use_vllm_logprobs", "use_rho_correction", "off_policy_mask_threshold"),
        _masks,
    ),
    ((*SOURCES, "thinking_history", "mask_tool_use"), _stripping),
    (("per_turn_max_tokens", "max_observation_tokens", "response_length"), _lengths),
    ((*SOURCES, *TIMEOUTS, "rollout_timeout"), _timeouts),
    ((*SOURCES, "only_reward_good_outputs"), _good_outputs),
    ((*SOURCES, "turn_credit", "advantage_normalization_type"), _credit),
    ((*SOURCES, "tool_parser_type", "chat_template_name"), _template),
    ((*SOURCES, "turn_scheduling", "pool_size", "async_steps"), _rounds),
    ((*SOURCES, "pool_size", "num_samples_per_prompt_rollout", "eval_pass_at_k"), _pool),
)
"""Each rule with the fields that must be sound before it is checked."""

TOOL_NEEDS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    (
        "tool_parser_type pass_tools_to_chat_template max_tool_calls max_tool_calling_iterations per_turn_max_tokens "
        "max_observation_tokens thinking_history mask_tool_use scored_text reward_aggregator turn_credit turn_discount "
        "turn_scheduling tool_timeout env_reset_timeout env_acquire_timeout trajectory_timeout pool_size env_workers env_python",
        "tools",
        lambda c: c.tools.is_on,
    ),
    (
        "max_tool_calls max_tool_calling_iterations",
        "tools or environment_factory",
        lambda c: c.tools.rollout_func is None,
    ),
    ("code_tool_api_endpoint", "the tool python", lambda c: not PYTHON.isdisjoint(c.tools.tools)),
    ("search_api_endpoint", "the tool search", lambda c: not SEARCH.isdisjoint(c.tools.tools)),
    ("turn_discount", "turn_credit=return", lambda c: not c.tools.is_on or c.tools.turn_credit == "return"),
)
"""Settings that have an effect only under a condition."""


def tool_warnings(config: Config) -> Iterator[str]:
    """What is probably not intended."""
    own = config.tools
    if not own.is_on:
        return
    if own.pool_size is not None and own.pool_size < config.batch_size:
        yield (
            f"pool_size={own.pool_size} is less than the {config.batch_size} completions of a step, so some wait for others' "
            f"environments; after env_acquire_timeout={own.env_acquire_timeout:g} s they have no score"
        )
    if not config.engine.vllm_enable_prefix_caching:
        yield "vllm_enable_prefix_caching=false makes engines read all earlier turns of a completion again for each turn"
