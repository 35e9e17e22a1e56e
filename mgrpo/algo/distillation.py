"""What is learned from teachers about the policy's own samples: advantages of sampled tokens, or a divergence over likely ones.

With t and s the log-probabilities under teacher and policy, P = exp(t), Q = exp(s), y the sampled token and c `distillation_coef`:

    sampled       A + c clip(t_y - s_y, +-distillation_clip) in place of A, s that of the policy the ratio refers to. The expected
                  on-policy gradient is that of A and of c KL(policy, teacher) at each token (MiniLLM, arXiv 2306.08543), without
                  what the token does to later ones
    forward_kl    c sum P (t - s), added to the token's loss, as the two below
    reverse_kl    c sum Q (s - t)
    jsd           c (beta sum P (t - log M) + (1 - beta) sum Q (s - log M)), M = beta P + (1 - beta) Q (GKD, arXiv 2306.13649)

The sums are over the teacher's likeliest tokens, the sampled one, and one token that stands for all others, with what is left of P and
of Q. Nothing of the teacher's has a gradient.
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
    """What teachers say of the tokens of a micro-batch, and how it is learned."""

    settings: Distillation
    teachers: Tensor
    """`[tokens]` int8, the place of each token's teacher; -1: it has none."""
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
        """`loss_mask` without sampled tokens of which a teacher should have said something; `distillation_only`: all it did not.

        A token without a rollout logprob was not sampled, and is not taught.
        """
        if self.settings.distillation_only:
            return loss_mask & self.is_taught
        return loss_mask & ~self._is_missing(rollout_logprobs)

    def advantages(self, advantages: Tensor, old_logprobs: Tensor) -> Tensor:
        """Those of the policy term, `[tokens]`, from the rewards' and the logprobs that the ratio refers to."""
        settings = self.settings
        if settings.distillation_only:
            advantages = torch.zeros_like(advantages)
        if settings.num_likeliest:
            return advantages
        gap, limit = self.logprobs.to(old_logprobs.dtype) - old_logprobs, settings.distillation_clip
        gap = gap if limit is None else gap.clamp(-limit, limit)
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
            loss, values, limit = result.loss, inputs.old_logprobs - self.logprobs, self.settings.distillation_clip
            if limit is not None:
                metrics["distillation/clipped"] = _share(values.abs() > limit, counted)
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
        student, teacher: log-probabilities of the same tokens `[n, tokens]`, none twice; what is left of a row is one token more.
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
        beta = settings.distillation_jsd_beta
        mixture = torch.logaddexp(t + math.log(beta), s + math.log1p(-beta))
        terms = beta * p * (t - mixture) + (1 - beta) * q * (s - mixture)
    return terms.where(is_token, 0.0).sum(1)


def _with_rest(logprobs: Tensor, is_token: Tensor) -> Tensor:
    """And that of all other tokens `[n, tokens + 1]`, at least what rounding leaves of a sum of 1; without a gradient there."""
    # In float32 the sum would lose the digits of a sharp teacher's rest, which reverse_kl takes the logarithm of.
    rest = 1 - logprobs.double().exp().where(is_token, 0.0).sum(1, keepdim=True)
    least = 8 * torch.finfo(logprobs.dtype).eps
    return torch.cat((logprobs, rest.clamp(min=least).log().to(logprobs.dtype)), 1)


def _agrees(student: Tensor, teacher: Tensor, is_token: Tensor) -> Tensor:
    """Whether the teacher's likeliest token is the student's as well, `[n]` bool."""
    student, teacher = (x.where(is_token, -torch.inf) for x in (student, teacher))
    return student.gather(1, teacher.argmax(1, keepdim=True))[:, 0] >= student.amax(1)


def _share(values: Tensor, counted: Tensor) -> Tensor:
    """The metric that is the mean of values over the counted tokens: their sum and their number."""
    return torch.stack((values.where(counted, 0).sum(), counted.sum())).float()
