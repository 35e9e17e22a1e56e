"""Notes on a run's prompts, printed at its start: missing bos tokens, unused end tokens, and opened thinking."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from mgrpo.config import Config
from mgrpo.data.tokenizer import token_ids

if TYPE_CHECKING:
    from mgrpo.data.prompt_set import PromptSet
    from mgrpo.run.inputs.prompts import Prompts

# Depth of the functions that a reward function calls.
_MOST_CALLS = 3


def prompt_notes(config: Config, prompts: Prompts, functions: Sequence[str | Callable]) -> Iterator[str]:
    """Notes on prompts without bos, an end token that ends nothing, and rewards that search for an opening think tag."""
    sets = [own for own in (prompts.train, prompts.held_out) if own is not None]
    yield from _about_bos(prompts.tokenizer, sets)
    yield from _about_eos(config, prompts)
    yield from _about_thoughts(sets, functions)


def _about_bos(tokenizer: Any, sets: Sequence[PromptSet]) -> Iterator[str]:
    bos = tokenizer.bos_token_id
    plain = token_ids(tokenizer, ["0"])[0]
    if bos is None or tokenizer("0")["input_ids"][:1] != [bos] or plain[:1] == [bos]:
        return
    if without := sum(own.num_without_first(bos) for own in sets):
        yield (
            f"the tokenizer puts its bos token {tokenizer.bos_token!r} ({bos}) in front of a text, and {without} prompts begin without "
            "it: texts and what a chat template writes are encoded as they are; add_bos=true puts it in front"
        )


def _about_eos(config: Config, prompts: Prompts) -> Iterator[str]:
    tokenizer = prompts.tokenizer
    eos = tokenizer.eos_token_id
    if eos is None or eos in prompts.stop_ids or tokenizer.eos_token in config.rollout.stop_strings:
        return
    ends = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in prompts.stop_ids)
    yield (
        f"the tokenizer's eos token {tokenizer.eos_token!r} ({eos}) does not end a completion, which goes on behind it: eos_token_id in "
        f"generation_config.json, or in config.json without one, names {ends} alone; add {eos} there if the model ends with it"
    )


def _about_thoughts(sets: Sequence[PromptSet], functions: Sequence[str | Callable]) -> Iterator[str]:
    from mgrpo.rewards.builtin_functions import THINK_BEGIN
    from mgrpo.rewards.function_calls import innermost
    from mgrpo.rewards.function_catalog import load_functions
    from mgrpo.rewards.reward_functions import own_name

    loaded = load_functions(functions, max_completion_length=1)
    names = [own_name(each) for each in loaded if _mentions(innermost(each), THINK_BEGIN)]
    if names and (opened := sum(own.num_ending_with(THINK_BEGIN) for own in sets)):
        yield (
            f"{opened} prompts end with {THINK_BEGIN}, so completions begin behind it, and {' and '.join(names)} looks for it in "
            "completions (think_format_reward gives 0 to all of these); score what closes the thought, </think>, or take a chat "
            "template that leaves its beginning to the model"
        )


def _mentions(function: Any, text: str, *, depth: int = 0) -> bool:
    """True if a function, or one of its module that it calls, has a string or a pattern with this text."""
    if not hasattr(function, "__code__"):
        function = function.__call__.__func__ if callable(function) and hasattr(function.__call__, "__func__") else None
    if not hasattr(function, "__code__") or depth > _MOST_CALLS:
        return False
    codes = list(_codes(function.__code__))
    names = [name for code in codes for name in code.co_names]
    used = [function.__globals__[name] for name in names if name in function.__globals__]
    constants = [constant for code in codes for constant in code.co_consts if constant != function.__doc__]
    texts = [value.pattern if isinstance(value, re.Pattern) else value for value in (*constants, *used)]
    if any(isinstance(value, str) and text in value for value in texts):
        return True
    own = [value for value in used if getattr(value, "__module__", None) == function.__module__]
    return any(_mentions(value, text, depth=depth + 1) for value in own)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and that of comprehensions and functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
