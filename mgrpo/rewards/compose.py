"""Rewards from scores: verifier, format and stop rules of a whole step.

A reward of NaN means that no score could be given; advantages leave out such a sample.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mgrpo.config.schema import Reward
from mgrpo.rewards.trajectory_rewards import TurnRewards, held, is_lost
from mgrpo.rewards.verifier import Answer, Item
from mgrpo.types import Completion, RolloutGroup, Score, ScoredGroup

_R1_OPENING = re.compile(r"</think>\s*<answer>")


class Verifies(Protocol):
    """The part of a `VerifierPool` that composition needs."""

    def verify_many(self, items: Sequence[Item]) -> list[float]: ...


def score_groups(
    groups: Sequence[RolloutGroup], pool: Verifies, config: Reward, turns: TurnRewards | None = None
) -> list[ScoredGroup]:
    """Score every completion by the verifiers of its row and the rules of `config`, in one call of the pool.

    With v = verification_reward x (sum of weight x score over the row's verifiers), to which `turns` adds the environment's
    rewards, and f = r1_style_format_reward if the format is there:

        verifiable off        v + f, and v is the environment's rewards
        format off            v
        additive format       v + f
        gate (format, not additive)   v if the format is there, else 0

    A completion that did not stop by itself gets `non_stop_penalty_value` instead under `non_stop_penalty`. If one of its
    verifiers gives no score, the completion has none (NaN), unless the stop rule decides. One whose environment was lost is
    not verified and has no score under any rule.

    `Score.parts` holds each verifier's own score by name, "format" (1 or 0) with `apply_r1_style_format_reward`, and "correct"
    (1 if every verifier gave its full score); a missing score is NaN there as well.
    """
    verified = iter(pool.verify_many(_items(groups)) if config.apply_verifiable_reward else [])
    weights, turns = config.weight_by_verifier, turns or TurnRewards()
    scored = []
    for group in groups:
        scores = []
        for completion in group.completions:
            if is_lost(completion):
                parts = {"correct": math.nan} if config.apply_verifiable_reward else {}
                scores.append(Score(reward=math.nan, parts=parts))
                continue
            names = group.prompt.verifiers if config.apply_verifiable_reward else ()
            own = [(name.lower(), next(verified)) for name in names]
            scores.append(_score(completion, own, weights, config, turns))
        scored.append(ScoredGroup(group=group, scores=tuple(scores)))
    return scored


def add_to_rewards(group: ScoredGroup, name: str, values: Sequence[float]) -> ScoredGroup:
    """The group with one value added to each reward and recorded as part `name`; a reward of NaN stays NaN."""
    scores = tuple(
        replace(score, reward=score.reward + float(value), parts=score.parts | {name: float(value)})
        for score, value in zip(group.scores, values, strict=True)
    )
    return replace(group, scores=scores)


def has_r1_format(text: str) -> bool:
    """True if `text` holds `</think>`, then `<answer>` after white space only, and later `</answer>`.

    The same language as matching `.*?</think>\\s*<answer>.*?</answer>` from the start, dot meaning any character; the
    first opening is enough to look at, which keeps this linear for a text made of openings.
    """
    opening = _R1_OPENING.search(text)
    return opening is not None and text.find("</answer>", opening.end()) >= 0


def _items(groups: Sequence[RolloutGroup]) -> list[Item]:
    return [
        Item(
            verifier,
            Answer(
                completion=completion.scored_text,
                ground_truth=ground_truth,
                prompt=group.prompt.query,
                num_tokens=completion.num_sampled,
            ),
        )
        for group in groups
        for completion in group.completions
        if not is_lost(completion)
        for verifier, ground_truth in zip(group.prompt.verifiers, group.prompt.ground_truths, strict=True)
    ]


def _score(
    completion: Completion,
    verified: list[tuple[str, float]],
    weights: Mapping[str, float],
    config: Reward,
    turns: TurnRewards,
) -> Score:
    parts: dict[str, float] = {}
    for name, score in verified:
        parts[name] = parts.get(name, 0.0) + score
    verifier_sum = sum(weights.get(name, 1.0) * score for name, score in verified)
    if config.apply_verifiable_reward:
        is_correct = all(score >= 1 - 1e-8 for _, score in verified)
        parts["correct"] = math.nan if any(math.isnan(score) for _, score in verified) else float(is_correct)
    has_format = config.apply_r1_style_format_reward and has_r1_format(completion.sampled_text)
    if config.apply_r1_style_format_reward:
        parts["format"] = float(has_format)
    if config.non_stop_penalty and completion.finish_reason != "stop":
        reward = config.non_stop_penalty_value
    else:
        given = config.verification_reward * verifier_sum if config.apply_verifiable_reward else 0.0
        reward = _reward(turns.total(completion, given), has_format, config)
    return Score(reward=held(float(reward), f"the scores {parts} and the settings of section reward"), parts=parts)


def _reward(verified: float, has_format: bool, config: Reward) -> float:
    if math.isnan(verified):
        return math.nan
    if not config.apply_verifiable_reward or config.additive_format_reward:
        return verified + (config.r1_style_format_reward if has_format else 0.0)
    # The gate requires the format, not a reward of 1: r1_style_format_reward may have any value.
    return verified if has_format or not config.apply_r1_style_format_reward else 0.0
