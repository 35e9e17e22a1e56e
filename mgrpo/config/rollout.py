"""The rollout section: how many completions are sampled, from which tokens, how far ahead of training, and for how long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mgrpo.config.annotations import (
    NOT_NEGATIVE,
    ONE_OR_MORE,
    OPEN_INSTRUCT,
    SHARE,
    TRL,
    UP_TO_ONE,
    Needs,
    Range,
    Reason,
    Rule,
)

MOST_TEMPERATURE = 2.0
"""The highest that vLLM samples at."""
MOST_KEPT = 64
"""Tokens that may be left to sample from, where the sampling is cut: each travels to the trainer with its token."""
MOST_MASKED = 2048
"""The same with engines that return masks, see `Rollout.needs_masks`; vLLM itself makes no longer lists on the GPU."""

AHEAD = Needs(
    "async_steps above 0 (or active_sampling_oversample, or replay_buffer_size)",
    lambda async_steps, active_sampling_oversample, replay_buffer_size: (
        async_steps + active_sampling_oversample + replay_buffer_size > 0
    ),
)
INFLIGHT = Needs("inflight_updates=true", lambda inflight_updates: inflight_updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    num_unique_prompts_rollout: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 16
    """Prompts per training step."""
    num_samples_per_prompt_rollout: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 4
    """Completions sampled for each prompt, which form its group."""
    response_length: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 256
    """Maximum tokens of a completion."""
    temperature: Annotated[
        float,
        Range(low=0.01, high=MOST_TEMPERATURE),
        Reason("the training logits are divided by it, and vLLM samples at 0.01 where less is asked for, at most at 2"),
        OPEN_INSTRUCT,
        TRL,
    ] = 1.0
    """Sampling temperature, also the divisor of the training logits."""
    top_k: Annotated[int, NOT_NEGATIVE, TRL] = 0
    """Sample from this many of the likeliest tokens; 0: from all. The trainer then computes with the same tokens that the
    engine had left (docs/algorithms.md). At most 64; with engines on GPUs 2048, where more than 64 bound evaluations as well. All
    other cuts need it; where they are given without it, engines on GPUs take 2048."""
    top_p: Annotated[float, SHARE, TRL] = 1.0
    """Sample from the likeliest tokens whose probabilities add up to this; below 1 with top_k."""
    min_p: Annotated[float, UP_TO_ONE, TRL] = 0.0
    """Sample from tokens that are at least this share as likely as the likeliest; above 0 with top_k."""
    vllm_guided_decoding_regex: Annotated[str | None, TRL] = None
    """Sample only what can become a text that this regular expression matches, turn by turn; with top_k."""
    async_steps: Annotated[int, NOT_NEGATIVE, OPEN_INSTRUCT] = 0
    """Steps that generation may run ahead of training; 0: they take turns, and a run repeats to the bit."""
    max_staleness: Annotated[int | None, NOT_NEGATIVE, TRL, AHEAD] = None
    """A group is trained on at most this many steps after its sampling has begun; what would become older is waited for,
    never dropped. None: the least that is possible, async_steps, with which steps take groups in the order of their prompts; then
    replay_buffer_size has no limit of age.
    More: a step takes what has finished, so that the longest answers do not hold it up. Given alone, it makes async_steps half
    of it."""
    inflight_updates: Annotated[bool, OPEN_INSTRUCT] = False
    """With async_steps: engines take over new weights in the middle of completions; false: they finish them first."""
    inflight_kv: Annotated[Literal["recompute", "keep"], INFLIGHT] = "recompute"
    """With inflight_updates, after an update: recompute what engines have cached of a completion, so that each token comes
    exactly from the weights that it is marked with; or keep keys and values of older weights, which saves that time."""
    stop_strings: Annotated[tuple[str, ...], OPEN_INSTRUCT] = ()
    """Texts that end a completion and stay in it, in addition to the model's own stop tokens."""
    eval_pass_at_k: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 1
    """Completions sampled for each held-out prompt."""
    eval_temperature: Annotated[float | None, Range(low=0, high=MOST_TEMPERATURE)] = None
    """Sampling temperature of evaluations; none: temperature; 0: greedy."""
    eval_top_p: Annotated[float, SHARE, OPEN_INSTRUCT] = 1.0
    """Evaluations sample from the likeliest tokens whose probabilities add up to this."""
    eval_response_length: Annotated[int | None, ONE_OR_MORE, OPEN_INSTRUCT] = None
    """Maximum tokens of a completion during evaluations; none: response_length."""
    save_traces: Annotated[bool, OPEN_INSTRUCT] = False
    """Write every completion that the run trains on to rollouts_save_path."""
    rollouts_save_path: Annotated[str | None, OPEN_INSTRUCT] = None
    """Folder for completions; none: output_dir/rollouts."""
    rollout_timeout: Annotated[int, ONE_OR_MORE] = 3600
    """Seconds that a step, an evaluation or a pause of the engines may wait for completions before the run ends with an error."""

    @property
    def is_cut(self) -> bool:
        """Whether training samples from a part of the vocabulary; `top_k` bounds it then."""
        return self.top_k > 0

    @property
    def needs_masks(self) -> bool:
        """Whether the part may be so large that it takes vLLM's sampling masks, which engines on GPUs have."""
        return self.top_k > MOST_KEPT


def _ages(
    async_steps: int,
    max_staleness: int | None,
    least_age: int,
    weight_sync_steps: int,
    inflight_updates: bool,
    active_sampling: bool,
    active_sampling_oversample: float,
    replay_buffer_size: int,
) -> Iterator[str]:
    oversample = active_sampling_oversample
    if oversample and not active_sampling:
        yield f"active_sampling_oversample={oversample:g} replaces nothing without active_sampling; set active_sampling true"
        return
    if max_staleness is not None and max_staleness < least_age:
        filled = f" + active_sampling_oversample={oversample:g} rounded up" if oversample else ""
        older = f" + weight_sync_steps={weight_sync_steps} less 1" if weight_sync_steps > 1 else ""
        yield (
            f"max_staleness={max_staleness} must be at least async_steps={async_steps}{filled}{older}, because a "
            f"group may wait that long for its step{', and engines for new weights' * bool(older)}; use {least_age} or more"
        )
    if async_steps == 0 and inflight_updates:
        yield (
            "inflight_updates=true needs completions that are under way when the weights change, and async_steps=0 has none; "
            "set async_steps to 1 or more"
        )
    if replay_buffer_size and max_staleness == 0:
        yield (
            f"replay_buffer_size={replay_buffer_size} replays groups of earlier steps, which max_staleness=0 forbids; "
            "leave one of them out"
        )


def _cuts(
    top_k: int, top_p: float, min_p: float, vllm_guided_decoding_regex: str | None, has_turns: bool, mask_tool_use: bool
) -> Iterator[str]:
    given = [
        text
        for text, is_on in (
            (f"top_p={top_p:g}", top_p < 1),
            (f"min_p={min_p:g}", min_p > 0),
            ("vllm_guided_decoding_regex", vllm_guided_decoding_regex is not None),
        )
        if is_on
    ]
    if given and not top_k:
        yield (
            f"{' and '.join(given)} leaves a part of the vocabulary to sample from, in which the trainer must compute as well, and "
            f"without top_k nothing bounds it; give top_k with it, 2 to {MOST_KEPT} (engines on GPUs, which the run "
            f"starts itself, take up to {MOST_MASKED} without being asked)"
        )
    if top_k == 1:
        yield (
            "top_k=1 leaves one token to sample, whose probability is 1 whatever the model learns: nothing could be learned; use "
            f"2 to {MOST_KEPT}, or 0 to sample from all"
        )
    elif top_k > MOST_MASKED:
        yield (
            f"top_k={top_k} must be at most {MOST_MASKED}, and {MOST_KEPT} on a CPU: an engine returns no more tokens of "
            "what it samples from, in which the trainer must compute as well; lower it, or set it to 0 to sample from all"
        )
    if top_k and has_turns and not mask_tool_use:
        yield (
            f"mask_tool_use=false trains on tokens that were not sampled, which top_k={top_k} has left no set of tokens "
            "to compute in; set mask_tool_use to true, or top_k to 0"
        )


def _greedy_masks(top_k: int, needs_masks: bool, eval_temperature: float | None) -> Iterator[str]:
    if needs_masks and eval_temperature == 0:
        yield (
            "eval_temperature=0 is greedy, which an engine that returns sampling masks refuses, and "
            f"top_k={top_k} needs them; use an eval_temperature above 0, or top_k <= {MOST_KEPT}"
        )


def _regex(vllm_guided_decoding_regex: str | None) -> Iterator[str]:
    text = vllm_guided_decoding_regex
    if text == "":
        yield "vllm_guided_decoding_regex is empty, and only an empty text would match; give an expression, or leave it out"
    elif text is not None:
        try:
            re.compile(text)
        except re.error as err:
            yield f"vllm_guided_decoding_regex={text} is not a regular expression: {err}; correct it"


def _stop_strings(stop_strings: tuple[str, ...]) -> Iterator[str]:
    if any(not text for text in stop_strings):
        yield "stop_strings holds an empty text, which would end every completion at once; leave it out"


def _equal_samples(eval_temperature: float | None, eval_pass_at_k: int) -> Iterator[str]:
    if eval_temperature == 0 and eval_pass_at_k > 1:
        yield (
            f"eval_pass_at_k={eval_pass_at_k} samples of eval_temperature=0 are all the same; use eval_pass_at_k=1, "
            "or a temperature above 0"
        )


RULES: tuple[Rule, ...] = (_ages,)
SAMPLING: tuple[Rule, ...] = (_cuts, _greedy_masks, _regex)
COMPLETIONS: tuple[Rule, ...] = (_stop_strings, _equal_samples)


def _idle_engines(num_unique_prompts_rollout: int, vllm_num_engines: int) -> Iterator[str]:
    if num_unique_prompts_rollout < vllm_num_engines:
        yield (
            f"num_unique_prompts_rollout={num_unique_prompts_rollout} leaves some of "
            f"vllm_num_engines={vllm_num_engines} without work"
        )


WARNINGS: tuple[Rule, ...] = (_idle_engines,)
