"""Distillation on the policy's own samples: advantages of sampled tokens, or a divergence over likely ones.

With t and s the log-probabilities under teacher and policy, P = exp(t), Q = exp(s), y the sampled token and c `distillation_coef`:

    sampled       A + c (t_y - s_y) in place of A, s that of the policy the ratio refers to. The expected
                  on-policy gradient is that of A and of c KL(policy, teacher) at each token (MiniLLM, arXiv 2306.08543), without
                  the token's effect on later ones
    forward_kl    c sum P (t - s), added to the token's loss, as the two below
    reverse_kl    c sum Q (s - t)
    jsd           c (sum P (t - log M) + sum Q (s - log M)) / 2, M = (P + Q) / 2 (GKD, arXiv 2306.13649)

The sums are over the teacher's likeliest tokens, the sampled one, and one token that stands for all others, with the rest of P and
of Q. Teacher values have no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mgrpo.algo.loss_inputs import LossInputs, PolicyLoss
from mgrpo.config.distillation import Distillation


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSignal:
    """Teacher log-probabilities of a micro-batch and their use in the loss."""

    settings: Distillation
    teachers: Tensor
    """`[tokens]` int8, index of each token's teacher; -1: none."""
    logprobs: Tensor
    """`[tokens]`, of the tokens under their teachers; NaN where it is not known."""
    targets: Tensor
    """`[tokens]`, their ids."""
    ids: Tensor | None = None
    """`[tokens, k]`, the likeliest tokens of the teachers; -1: none."""
    likeliest: Tensor | None = None
    """`[tokens, k]`, their log-probabilities."""

    @property
    def is_taught(self) -> Tensor:
        """`[tokens]` bool."""
        return (self.teachers >= 0) & self.logprobs.isfinite()

    def trained(self, loss_mask: Tensor, rollout_logprobs: Tensor) -> Tensor:
        """`loss_mask` without sampled tokens whose teacher scores are missing; under `distillation_only` only tokens with scores.

        A token without a rollout logprob was not sampled, and has no teacher score.
        """
        if self.settings.distillation_only:
            return loss_mask & self.is_taught
        return loss_mask & ~self._is_missing(rollout_logprobs)

    def advantages(self, advantages: Tensor, old_logprobs: Tensor) -> Tensor:
        """Advantages of the policy term, `[tokens]`, from the rewards' and the logprobs that the ratio refers to."""
        settings = self.settings
        if settings.distillation_only:
            advantages = torch.zeros_like(advantages)
        if settings.num_likeliest:
            return advantages
        gap = self.logprobs.to(old_logprobs.dtype) - old_logprobs
        return advantages + torch.where(self.is_taught, settings.distillation_coef * gap, 0.0)

    def added(self, result: PolicyLoss, inputs: LossInputs, candidates: Tensor | None) -> PolicyLoss:
        """The loss of the policy term with the divergence, if there is one, and the metrics of both.

        Args:
            candidates: `[tokens, 1 + k]`, the policy's log-probabilities of the targets and of `ids`, with a graph.
        """
        counted = inputs.loss_mask & self.is_taught
        asked = self._is_asked(inputs.rollout_logprobs)
        metrics = {"distillation/missing": _share(self._is_missing(inputs.rollout_logprobs), asked)}
        if candidates is None or self.ids is None or self.likeliest is None:
            loss, values = result.loss, inputs.old_logprobs - self.logprobs
        else:
            is_other = (self.ids >= 0) & (self.ids != self.targets[:, None])
            teacher = torch.cat((self.logprobs[:, None], self.likeliest.where(is_other, torch.nan)), 1).to(candidates)
            is_token = counted[:, None] & teacher.isfinite() & (candidates != -torch.inf)
            values = divergence(candidates, teacher, is_token, self.settings)
            loss = result.loss + self.settings.distillation_coef * inputs.total(values)
            agrees = _agrees(candidates.detach(), teacher, is_token)
            metrics["distillation/top1_agreement"] = _share(agrees, counted)
        return replace(result, loss=loss, metrics=result.metrics | metrics | self._distances(values.detach(), counted))

    def _distances(self, values: Tensor, counted: Tensor) -> dict[str, Tensor]:
        """The mean of values `[tokens]`, of all tokens and of each teacher's."""
        metrics, names = {"distillation/kl": _share(values, counted)}, self.settings.teacher_names
        for place, name in enumerate(names if len(names) > 1 else ()):
            metrics[f"distillation/{name}/kl"] = _share(values, counted & (self.teachers == place))
        return metrics

    def _is_asked(self, rollout_logprobs: Tensor | None) -> Tensor:
        has_teacher = self.teachers >= 0
        return has_teacher if rollout_logprobs is None else has_teacher & ~rollout_logprobs.isnan()

    def _is_missing(self, rollout_logprobs: Tensor | None) -> Tensor:
        return self._is_asked(rollout_logprobs) & ~self.logprobs.isfinite()


def divergence(student: Tensor, teacher: Tensor, is_token: Tensor, settings: Distillation) -> Tensor:
    """The divergence of `distillation_loss` at each row, `[n]`, before `distillation_coef`; gradients flow to student.

    Args:
        student, teacher: log-probabilities of the same tokens `[n, tokens]`, distinct in a row; its remaining probability is one more token.
        is_token: `[n, tokens]` bool, where there is one; a row without any has the divergence 0.
    """
    s, t = (_with_rest(x.where(is_token, 0.0), is_token) for x in (student, teacher.detach()))
    is_token = torch.cat((is_token, is_token.any(1, keepdim=True)), 1)
    p, q = t.exp(), s.exp()
    if settings.distillation_loss == "forward_kl":
        terms = p * (t - s)
    elif settings.distillation_loss == "reverse_kl":
        terms = q * (s - t)
    else:
        mixture = torch.logaddexp(t, s) - math.log(2)
        terms = (p * (t - mixture) + q * (s - mixture)) / 2
    return terms.where(is_token, 0.0).sum(1)


def _with_rest(logprobs: Tensor, is_token: Tensor) -> Tensor:
    """Append the log-probability of all other tokens, `[n, tokens + 1]`, at least the rounding error of a sum of 1; no gradient below that."""
    # In float32 the sum would lose the digits of a sharp teacher's rest, which reverse_kl takes the logarithm of.
    rest = 1 - logprobs.double().exp().where(is_token, 0.0).sum(1, keepdim=True)
    least = 8 * torch.finfo(logprobs.dtype).eps
    return torch.cat((logprobs, rest.clamp(min=least).log().to(logprobs.dtype)), 1)


def _agrees(student: Tensor, teacher: Tensor, is_token: Tensor) -> Tensor:
    """True where the teacher's likeliest token is also the student's, `[n]` bool."""
    student, teacher = (x.where(is_token, -torch.inf) for x in (student, teacher))
    return student.gather(1, teacher.argmax(1, keepdim=True))[:, 0] >= student.amax(1)


def _share(values: Tensor, counted: Tensor) -> Tensor:
    """The metric that is the mean of values over the counted tokens: their sum and their number."""
    return torch.stack((values.where(counted, 0).sum(), counted.sum())).float()
