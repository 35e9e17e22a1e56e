"""Training samples from scored groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mgrpo.algo.advantage import advantages
from mgrpo.algo.credit.own_advantages import AdvantageFunction, own_advantages
from mgrpo.algo.credit.turn_credit import TurnCredit, token_advantages
from mgrpo.types import Branch, Completion, KeptTokens, Lesson, Prompt, Routes, ScoredGroup, TrainSample, unrouted

OLDEST = 127
"""Tokens that are older count as that old."""
NO_LESSON = Lesson(prompt=None)


def train_samples(
    groups: Sequence[ScoredGroup],
    *,
    dropped: Sequence[ScoredGroup] = (),
    normalization: str,
    ddof: int,
    eps: float,
    reward_weights: Mapping[str, float] | None = None,
    mask_truncated: bool = False,
    mask_tool_use: bool = True,
    turn_credit: TurnCredit | None = None,
    function: AdvantageFunction | None = None,
    policy_version: int | None = None,
    distillation_only: bool = False,
) -> list[TrainSample]:
    """One sample per completion, or one per branch of it, in order, with the advantage within its group.

    A completion without a score (NaN) stays in the list with advantage 0 and, unless it has a teacher, no trained token, so
    that every completion is counted. Under `mask_truncated` no token is trained of a completion that did not stop by itself,
    but its reward still counts in its group's mean and deviation. A completion without tokens has one in its sample, which is
    not trained. Where the sampling was cut, a token whose set is not known is not trained either, nor is a sampled one that its
    teacher has not judged.

    Args:
        dropped: groups of the same batch that are not trained on; statistics over the batch include them.
        normalization, ddof, eps: as in `advantages`.
        mask_tool_use: False also trains on tokens that were not sampled, with NaN as rollout log-probability.
        reward_weights: for "gdpo", the weight of each reward function by its name in `Score.parts`, all of them.
        turn_credit: rule for advantages per turn; None: all tokens of a completion have the same.
        function: a user's estimator in place of the named one and of `turn_credit`.
        policy_version: of the policy that trains, which ages are counted from; None where all tokens are its own.
        distillation_only: rewards are not trained on: all advantages are 0, and only tokens with teacher scores are trained.
    """
    if not groups:
        return []
    batch = [*groups, *dropped]
    masks = [[_trainable(completion, mask_tool_use) for completion in own.group.completions] for own in batch]
    by_token: list[np.ndarray] | None = None
    if distillation_only:
        by_group = [[0.0] * len(scored.scores) for scored in groups]
    elif function is not None:
        by_group, by_token = _users_advantages(function, groups, dropped)
    else:
        by_group = _named_advantages(
            batch, masks, normalization=normalization, ddof=ddof, eps=eps, reward_weights=reward_weights
        )
        if turn_credit is not None:
            by_turn = turn_credit.advantages(batch, masks, normalization=normalization, ddof=ddof, eps=eps)
            by_token = [
                token_advantages(completion, turns)
                for scored, completions in zip(groups, by_turn, strict=False)
                for completion, turns in zip(scored.group.completions, completions, strict=True)
            ]
    is_cut = any(c.kept is not None for scored in groups for c in scored.group.completions)
    routed = next((own for scored in groups for c in scored.group.completions for own in c.routes), None)
    samples = [
        _sample(
            scored.group.prompt,
            completion,
            advantage=advantage,
            group=number,
            is_trained=completion.finish_reason == "stop" or not mask_truncated,
            mask_tool_use=mask_tool_use,
            is_cut=is_cut,
            policy_version=policy_version,
        )
        for number, (scored, own) in enumerate(zip(groups, by_group, strict=False))
        for completion, advantage in zip(scored.group.completions, own, strict=True)
    ]
    if by_token is not None:
        samples = [_credited(*pair) for pair in zip(samples, by_token, strict=True)]
    return _taught(samples, groups, is_rewarded=not distillation_only, routed=routed)


def _named_advantages(
    batch: Sequence[ScoredGroup],
    masks: Sequence[Sequence[np.ndarray]],
    *,
    normalization: str,
    ddof: int,
    eps: float,
    reward_weights: Mapping[str, float] | None,
) -> list[list[float]]:
    if normalization == "gdpo":
        if not reward_weights:
            raise ValueError(
                "normalization='gdpo' needs reward functions of your own, but there are none; choose 'standard'"
            )
        by_function = [[[score.parts[name] for name in reward_weights] for score in group.scores] for group in batch]
        return advantages(
            torch.tensor(by_function, dtype=torch.float64),
            normalization=normalization,
            ddof=ddof,
            eps=eps,
            weights=tuple(reward_weights.values()),
        ).tolist()
    return advantages(
        torch.from_numpy(np.stack([group.rewards for group in batch])),
        normalization=normalization,
        ddof=ddof,
        eps=eps,
        num_tokens=torch.tensor([[mask.sum() for mask in own] for own in masks]),
    ).tolist()


def _users_advantages(
    function: AdvantageFunction, groups: Sequence[ScoredGroup], dropped: Sequence[ScoredGroup]
) -> tuple[list[list[float]], list[np.ndarray] | None]:
    """The advantages of completions, and those of each completion's tokens `[length]` float32 where any group has them."""
    found = own_advantages(function, groups, dropped)
    if not any(values.ndim for own in found for values in own):
        return [[float(value) for value in own] for own in found], None
    by_token = [
        np.broadcast_to(values, len(completion.tokens)).astype(np.float32)
        for scored, own in zip(groups, found, strict=True)
        for completion, values in zip(scored.group.completions, own, strict=True)
    ]
    return [[0.0] * len(own) for own in found], by_token


def _taught(
    samples: Sequence[TrainSample], groups: Sequence[ScoredGroup], *, is_rewarded: bool, routed: Routes | None
) -> list[TrainSample]:
    """Each divided into its branches, with its teacher and, where any is `routed`, its routes.

    A token is trained where it was sampled, and is context in later branches.
    """
    found: list[TrainSample] = []
    each = iter(samples)
    for scored in groups:
        lessons = scored.lessons or [()] * len(scored.scores)
        for completion, score, own in zip(scored.group.completions, scored.scores, lessons, strict=True):
            parts = _branches(next(each), completion)
            if routed is not None:
                parts = _routed(parts, completion.routes, routed)
            for (part, span), lesson in zip(parts, own or [NO_LESSON] * len(parts), strict=True):
                teacher = -1 if lesson.prompt is None else scored.group.prompt.teacher
                has_score = is_rewarded and not np.isnan(score.reward)
                found.append(_with_teacher(part, completion, span, lesson, teacher=teacher, has_score=has_score))
    return found


def _with_teacher(
    sample: TrainSample, completion: Completion, span: slice, lesson: Lesson, *, teacher: int, has_score: bool
) -> TrainSample:
    """Sample with its teacher; untrained without score and teacher, as are tokens with neither a score nor a teacher score."""
    if teacher < 0 or not len(completion.tokens):
        return sample if has_score else replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    is_sampled = completion.loss_mask[span]
    taught = completion.taught and completion.taught.part(span)
    is_judged = is_sampled if taught is None else is_sampled & ~np.isnan(taught.logprobs)
    has_own = taught is None and lesson.prompt is not sample.prompt_tokens
    return replace(
        sample,
        loss_mask=sample.loss_mask & (is_judged | (has_score & ~is_sampled)),
        teacher=teacher,
        taught=taught,
        teacher_prompt=lesson.prompt if has_own else None,
    )


def _routed(
    parts: Sequence[tuple[TrainSample, slice]], routes: Sequence[Routes], like: Routes
) -> list[tuple[TrainSample, slice]]:
    found = []
    lengths = [len(sample.prompt_tokens) + len(sample.tokens) - 1 for sample, _ in parts]
    routes = routes or [unrouted(length, like) for length in lengths]
    for (sample, span), own, num_tokens in zip(parts, routes, lengths, strict=True):
        assert len(own) == num_tokens, f"routes of {len(own)} tokens, the sample reads {num_tokens}"
        assert own.shape[1:] == like.shape[1:] and own.dtype == like.dtype, "all routes are of one model"
        found.append((replace(sample, routes=own), span))
    return found


def _branches(sample: TrainSample, completion: Completion) -> list[tuple[TrainSample, slice]]:
    """Each with its tokens' places in the completion."""
    branches = completion.trajectory.branches if completion.trajectory else ()
    return [
        (_branch(sample, branch, continues=number > 0), slice(branch.start, branch.end))
        for number, branch in enumerate(branches)
    ] or [(sample, slice(None))]


def _branch(sample: TrainSample, branch: Branch, *, continues: bool) -> TrainSample:
    own = slice(branch.start, branch.end)

    def part(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[own]

    is_sampled = part(sample.is_sampled)
    return replace(
        sample,
        prompt_tokens=branch.prompt_tokens,
        tokens=sample.tokens[own],
        loss_mask=sample.loss_mask[own],
        rollout_logprobs=sample.rollout_logprobs[own],
        ages=part(sample.ages),
        is_sampled=None if is_sampled is None or is_sampled.all() else is_sampled,
        token_advantages=part(sample.token_advantages),
        kept=sample.kept and sample.kept.part(branch.start, branch.end),
        continues=continues,
    )


def _credited(sample: TrainSample, values: np.ndarray) -> TrainSample:
    if not len(values):
        values = np.zeros(len(sample.tokens), np.float32)
    return replace(sample, token_advantages=values, advantage=float(values[sample.is_predicted].mean()))


def _sample(
    prompt: Prompt,
    completion: Completion,
    *,
    advantage: float,
    group: int,
    is_trained: bool,
    mask_tool_use: bool,
    is_cut: bool,
    policy_version: int | None,
) -> TrainSample:
    if not len(completion.tokens):
        completion, is_trained = _stand_in(prompt, completion), False
    is_sampled, logprobs = _trainable(completion, mask_tool_use), completion.logprobs
    kept = completion.kept
    if is_cut and kept is None:
        # Nothing of it was sampled.
        kept = KeptTokens.none(len(completion.tokens))
    has_set = True if kept is None else kept.sizes > 0
    if not mask_tool_use:
        logprobs = np.where(completion.loss_mask, logprobs, np.float32(np.nan))
    return TrainSample(
        prompt_tokens=prompt.tokens,
        tokens=completion.tokens,
        loss_mask=is_sampled & is_trained & has_set,
        rollout_logprobs=logprobs,
        advantage=advantage,
        group=group,
        ages=None if policy_version is None else _ages(completion, policy_version),
        is_sampled=None if is_sampled.all() else is_sampled,
        kept=kept,
    )


def _stand_in(prompt: Prompt, completion: Completion) -> Completion:
    """The stand-in for a completion that never began: a token, because every sample has one."""
    versions = np.full(1, -1, np.int32)
    return replace(
        completion,
        tokens=prompt.tokens[-1:],
        logprobs=np.zeros(1, np.float32),
        policy_versions=versions,
        trajectory=None,
        kept=completion.kept and KeptTokens.none(1),
    )


def _ages(completion: Completion, policy_version: int) -> np.ndarray:
    ages = np.where(completion.loss_mask, policy_version - completion.policy_versions, 0)
    return np.minimum(ages, OLDEST).astype(np.uint8)


def _trainable(completion: Completion, mask_tool_use: bool) -> np.ndarray:
    """`[len]` bool: sampled tokens, or all tokens without `mask_tool_use`; those over which a batch is normalised."""
    return completion.loss_mask if mask_tool_use else np.ones_like(completion.loss_mask)
