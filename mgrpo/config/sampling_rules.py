"""Rules between the settings that cut what is sampled from, see `Rollout.is_cut`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mgrpo.config.rules import Rule
from mgrpo.config.schema import MOST_KEPT, MOST_MASKED, Config


def _cuts(config: Config) -> Iterator[str]:
    rollout = config.rollout
    given = [
        text
        for text, is_on in (
            (f"top_p={rollout.top_p:g}", rollout.top_p < 1),
            (f"min_p={rollout.min_p:g}", rollout.min_p > 0),
            ("vllm_guided_decoding_regex", rollout.vllm_guided_decoding_regex is not None),
        )
        if is_on
    ]
    if given and not rollout.top_k:
        yield (
            f"{' and '.join(given)} leaves a part of the vocabulary to sample from, in which the trainer must compute as well, and "
            f"without top_k nothing bounds it; give top_k with it: at most {MOST_KEPT} with engines on a CPU; on GPUs for example "
            "512, which is more than other cuts mostly leave"
        )
    if rollout.top_k == 1:
        yield (
            "top_k=1 leaves one token to sample, whose probability is 1 whatever the model learns: nothing could be learned; use "
            f"2 to {MOST_KEPT}, or 0 to sample from all"
        )
    elif rollout.top_k > MOST_MASKED:
        yield (
            f"top_k={rollout.top_k} must be at most {MOST_MASKED}, and {MOST_KEPT} on a CPU: an engine returns no more tokens of "
            "what it samples from, in which the trainer must compute as well; lower it, or set it to 0 to sample from all"
        )
    if rollout.is_cut and config.tools.is_on and not config.tools.mask_tool_use:
        yield (
            f"mask_tool_use=false trains on tokens that were not sampled, which top_k={rollout.top_k} has left no set of tokens "
            "to compute in; set mask_tool_use to true, or top_k to 0"
        )


def _greedy(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.needs_masks and rollout.eval_temperature == 0:
        yield (
            "eval_temperature=0 is greedy, which an engine that returns sampling masks refuses, and "
            f"top_k={rollout.top_k} needs them; use an eval_temperature above 0, or top_k <= {MOST_KEPT}"
        )


def _regex(config: Config) -> Iterator[str]:
    text = config.rollout.vllm_guided_decoding_regex
    if text == "":
        yield "vllm_guided_decoding_regex is empty, and only an empty text would match; give an expression, or leave it out"
    elif text is not None:
        try:
            re.compile(text)
        except re.error as err:
            yield f"vllm_guided_decoding_regex={text} is not a regular expression: {err}; correct it"


SAMPLING_RULES: tuple[Rule, ...] = (
    (("top_k", "top_p", "min_p", "mask_tool_use"), _cuts),
    (("top_k", "eval_temperature"), _greedy),
    (("vllm_guided_decoding_regex",), _regex),
)
"""Each rule with the fields that must be sound before it is checked."""
