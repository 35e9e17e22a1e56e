"""Samples with the experts that an engine might have chosen, and transformers' models that are told which to choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from mgrpo.types import Routes, TrainSample, unrouted


def random_routes(num_tokens: int, layers: int, experts: int, top_k: int, rng: np.random.Generator) -> Routes:
    """Different experts for each token and layer; a tenth of the rows say nothing."""
    routes = rng.random((num_tokens, layers, experts)).argsort(axis=2)[:, :, :top_k].astype(np.uint8)
    routes[rng.random(num_tokens) < 0.1] = 255
    return routes


def routed(
    samples: Sequence[TrainSample], layers: int, experts: int, top_k: int, *, seed: int = 0
) -> list[TrainSample]:
    """These samples with random routes, the same for the same prompt of a group; the last one has none."""
    rng, of_prompt, found = np.random.default_rng(seed), {}, []
    for sample in samples:
        key = sample.group, sample.prompt_tokens.tobytes()
        if key not in of_prompt:
            of_prompt[key] = random_routes(len(sample.prompt_tokens), layers, experts, top_k, rng)
        own = random_routes(len(sample.tokens) - 1, layers, experts, top_k, rng)
        found.append(replace(sample, routes=np.concatenate([of_prompt[key], own])))
    last = found[-1].routes
    return [*found[:-1], replace(found[-1], routes=np.concatenate([of_prompt[key], unrouted(len(own), last)]))]


@contextmanager
def fixed_experts(model: torch.nn.Module, routes: Routes) -> Iterator[None]:
    """Have transformers' routers choose these experts; the tokens after the last row, and those without one, are theirs."""
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    assert len(routers) == routes.shape[1]
    with ExitStack() as stack:
        for place, router in enumerate(routers):
            wanted = torch.from_numpy(routes[:, place].astype(np.int64))
            wanted[(wanted == np.iinfo(routes.dtype).max).all(1)] = -1
            stack.enter_context(patch.object(router, "forward", _told(router, wanted)))
        yield


def _told(router, wanted):
    whole, topk = router.forward, torch.topk

    def chosen(scores, k, **how):
        values, own = topk(scores, k, **how)
        if k != router.top_k:
            return values, own
        fixed = own.clone()
        fixed[: len(wanted)] = torch.where(wanted < 0, own[: len(wanted)], wanted)
        return scores.gather(-1, fixed), fixed

    def forward(*args):
        with patch.object(torch, "topk", chosen):
            return whole(*args)

    return forward
