"""Group `kept` of bench_ops.py: logprobs over kept sets, compared with a masked softmax and with the whole vocabulary."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from bench_ops_methods import (
    LOGITS_CHUNK,
    Case,
    Group,
    Method,
    Scores,
    Shape,
    cotangents,
    expected,
    given,
    head_case,
)
from torch import Tensor

from mgrpo.ops import KeptSets, linear_logprobs, token_logprobs

SIZE = 8
"""Tokens of a set: the mean of top_p=0.97 in long reasoning."""


def masked(logits: Tensor, targets: Tensor, kept: KeptSets, with_entropy: bool) -> Scores:
    """Logits outside the sets are -inf in a softmax over all; in float64 the oracle."""
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    is_kept[kept.entry_targets(), kept.ids.long()] = True
    logp = torch.log_softmax(logits.masked_fill(~is_kept, -torch.inf), dim=-1)
    entropy = -(logp.exp() * logp.masked_fill(~is_kept, 0)).sum(-1) if with_entropy else None
    return logp.gather(1, targets[:, None])[:, 0], entropy


def cases(shape: Shape, device: torch.device, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Cases of the group `head`, with a set of `SIZE` for each token."""
    for dtype, with_entropy in itertools.product(dtypes, (False, True)):
        torch.manual_seed(0)
        hidden = torch.empty(shape.tokens, shape.hidden, dtype=dtype, device=device).normal_()
        weight = torch.empty(shape.vocab, shape.hidden, dtype=dtype, device=device).normal_(std=3 / shape.hidden**0.5)
        # Tokens that are some steps apart, from a random one on: no token twice.
        first = torch.randint(0, shape.vocab, (shape.tokens, 1), device=device)
        ids = (first + shape.vocab // SIZE * torch.arange(SIZE, device=device)) % shape.vocab
        offsets = torch.arange(0, SIZE * shape.tokens + 1, SIZE, device=device)
        kept, targets = KeptSets(ids.flatten().int(), offsets.int()), first[:, 0].contiguous()
        weights = cotangents(shape.tokens, with_entropy, device)
        exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
        oracle = expected(masked(exact[0] @ exact[1].T, targets, kept, with_entropy), weights, exact)

        yield head_case(hidden, weight, targets, kept, with_entropy, cotangents=weights, oracle=oracle)


def by_masked_softmax(hidden: Tensor, weight: Tensor, targets: Tensor, kept: KeptSets, with_entropy: bool) -> Scores:
    return masked((hidden @ weight.T).float(), targets, kept, with_entropy)


def ours(
    hidden: Tensor, weight: Tensor, targets: Tensor, kept: KeptSets, with_entropy: bool, *, is_cut: bool
) -> Scores:
    sets = kept if is_cut else None
    return token_logprobs(hidden @ weight.T, targets, kept=sets, with_entropy=with_entropy, inplace=True)


def our_fused_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, kept: KeptSets, with_entropy: bool, *, is_cut: bool
) -> Scores:
    sets, chunk = kept if is_cut else None, LOGITS_CHUNK[hidden.device.type]
    return linear_logprobs(hidden, weight, targets, kept=sets, with_entropy=with_entropy, logits_chunk=chunk)


WHOLE = "over the whole vocabulary, which is another result: for its time"
KEPT = Group(
    name="kept",
    title=f"over kept sets of {SIZE}, from hidden states and the LM head's weight",
    methods=[
        Method(name="matmul, masked log_softmax", load=given(by_masked_softmax)),
        Method(
            name="mgrpo, whole rows, in place",
            load=given(functools.partial(ours, is_cut=False)),
            has_accuracy=False,
            note=WHOLE,
        ),
        Method(
            name="mgrpo, whole, linear_logprobs",
            load=given(functools.partial(our_fused_head, is_cut=False)),
            has_accuracy=False,
            note=WHOLE,
        ),
        Method(name="mgrpo, matmul + in place", load=given(functools.partial(ours, is_cut=True))),
        Method(name="mgrpo linear_logprobs", load=given(functools.partial(our_fused_head, is_cut=True))),
    ],
    cases=cases,
    shapes={
        "cpu": Shape(tokens=512, vocab=32000, hidden=1024, rounds=2),
        "cuda": Shape(tokens=4096, vocab=151936, hidden=4096, rounds=5),
    },
    is_bandwidth_bound=False,
)
