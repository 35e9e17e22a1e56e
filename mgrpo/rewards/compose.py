"""Rewards from scores: verifier, format and stop rules of a whole step, or the user's own functions.

A reward of NaN means that no score could be given; advantages leave such a sample out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mgrpo.config.schema import Reward
from mgrpo.rewards.pool import Item
from mgrpo.types import Completion, RolloutGroup, Score, ScoredGroup

RewardFunction = Callable[..., Sequence[float | None]]

_R1_OPENING = re.compile(r"</think>\s*<answer>")


class Verifies(Protocol):
    """What composition needs of a `VerifierPool`."""

    def verify_many(self, items: Sequence[Item]) -> list[float]: ...


def score_groups(groups: Sequence[RolloutGroup], pool: Verifies, config: Reward) -> list[ScoredGroup]:
    """Score every completion by the verifiers of its row and the rules of `config`; all in one call of the pool.

    With v = verification_reward x (sum of the row's verifiers) and f = r1_style_format_reward if the format is there:

        verifiable off        f
        format off            v
        additive format       v + f
        gate (format, not additive)   v if the format is there, else 0

    then `non_stop_penalty_value` in place of all that if the completion did not stop by itself. One verifier without a
    score leaves the whole completion without (NaN), unless the stop rule decides.

    `Score.parts` holds each verifier's own score by name, "format" (1 or 0) when the format is asked for, and "correct"
    (1 if every verifier gave its full score); a missing score is NaN there too.
    """
    verified = iter(pool.verify_many(_items(groups)) if config.apply_verifiable_reward else [])
    scored = []
    for group in groups:
        scores = []
        for completion in group.completions:
            names = group.prompt.verifiers if config.apply_verifiable_reward else ()
            scores.append(_score(completion, [(name.lower(), next(verified)) for name in names], config))
        scored.append(ScoredGroup(group=group, scores=tuple(scores)))
    return scored


def score_with_functions(
    groups: Sequence[RolloutGroup], functions: Sequence[RewardFunction], weights: Sequence[float] = ()
) -> list[ScoredGroup]:
    """Score with the user's functions: the reward is the sum of what they return, each times its weight if there are any.

    Each is called once with keyword lists, one entry a completion, groups one after the other: `prompts`, `completions`
    (texts), `completion_ids` (lists of int), `ground_truth` (the row's value, a list if it has several); and it returns
    as many numbers. None (or NaN) means that the function does not apply: the others count, and a completion that no
    function scores has no reward (NaN).
    """
    if not functions:
        raise ValueError("no reward functions; give at least one")
    flat = [(group.prompt, completion) for group in groups for completion in group.completions]
    columns = {
        "prompts": [prompt.text for prompt, _ in flat],
        "completions": [completion.text for _, completion in flat],
        "completion_ids": [completion.tokens.tolist() for _, completion in flat],
        "ground_truth": [
            prompt.ground_truths[0] if len(prompt.ground_truths) == 1 else list(prompt.ground_truths)
            for prompt, _ in flat
        ],
    }
    parts: list[dict[str, float]] = [{} for _ in flat]
    for name, function in _named(functions):
        values = function(**columns) if flat else []
        if values is None or len(values) != len(flat):
            found = "None" if values is None else f"{len(values)} values"
            raise ValueError(
                f"reward function {name} returned {found} for {len(flat)} completions; "
                "return a list with one number (or None) for each"
            )
        for part, value in zip(parts, values, strict=True):
            part[name] = math.nan if value is None else float(value)
    weights = weights or [1.0] * len(functions)
    scores = iter(
        Score(reward=_sum_of_present(w * value for w, value in zip(weights, part.values(), strict=True)), parts=part)
        for part in parts
    )
    return [ScoredGroup(group=group, scores=tuple(next(scores) for _ in group.completions)) for group in groups]


def add_to_rewards(group: ScoredGroup, name: str, values: Sequence[float]) -> ScoredGroup:
    """The group with one value added to each reward, and noted as part `name`; no score stays no score."""
    scores = tuple(
        Score(reward=score.reward + float(value), parts=score.parts | {name: float(value)})
        for score, value in zip(group.scores, values, strict=True)
    )
    return ScoredGroup(group=group.group, scores=scores)


def has_r1_format(text: str) -> bool:
    """Whether `text` holds `</think>`, then `<answer>` after white space only, and later `</answer>`.

    The same language as matching `.*?</think>\\s*<answer>.*?</answer>` from the start, dot meaning any character; the
    first opening is enough to look at, which keeps this linear for a text made of openings.
    """
    opening = _R1_OPENING.search(text)
    return opening is not None and text.find("</answer>", opening.end()) >= 0


def _items(groups: Sequence[RolloutGroup]) -> list[Item]:
    return [
        Item(verifier, completion.text, ground_truth)
        for group in groups
        for completion in group.completions
        for verifier, ground_truth in zip(group.prompt.verifiers, group.prompt.ground_truths, strict=True)
    ]


def _score(completion: Completion, verified: list[tuple[str, float]], config: Reward) -> Score:
    parts: dict[str, float] = {}
    for name, score in verified:
        parts[name] = parts.get(name, 0.0) + score
    verifier_sum = sum(score for _, score in verified)
    if config.apply_verifiable_reward:
        parts["correct"] = math.nan if math.isnan(verifier_sum) else float(verifier_sum >= len(verified) - 1e-8)
    has_format = config.apply_r1_style_format_reward and has_r1_format(completion.text)
    if config.apply_r1_style_format_reward:
        parts["format"] = float(has_format)
    if config.non_stop_penalty and completion.finish_reason != "stop":
        reward = config.non_stop_penalty_value
    else:
        reward = _reward(verifier_sum, has_format, config)
    return Score(reward=float(reward), parts=parts)


def _reward(verifier_sum: float, has_format: bool, config: Reward) -> float:
    format_reward = config.r1_style_format_reward if has_format else 0.0
    if not config.apply_verifiable_reward:
        return format_reward
    if math.isnan(verifier_sum):
        return math.nan
    verified = config.verification_reward * verifier_sum
    if not config.apply_r1_style_format_reward:
        return verified
    if config.additive_format_reward:
        return verified + format_reward
    # The gate asks for the format, not for a reward of 1: r1_style_format_reward may have any value.
    return verified if has_format else 0.0


def function_names(functions: Sequence[RewardFunction]) -> list[str]:
    """The names under which the functions' values stand in `Score.parts`, in their order."""
    return [name for name, _ in _named(functions)]


def _named(functions: Sequence[RewardFunction]) -> list[tuple[str, RewardFunction]]:
    named: dict[str, RewardFunction] = {}
    for function in functions:
        name = base = getattr(function, "__name__", type(function).__name__)
        number = 1
        while name in named:
            number += 1
            name = f"{base}_{number}"
        named[name] = function
    return list(named.items())


def _sum_of_present(values: Iterable[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return sum(present) if present else math.nan
