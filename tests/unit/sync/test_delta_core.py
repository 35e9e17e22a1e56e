"""Gated delta nets of an engine on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mgrpo.sync.vllm_plugin.delta_core import CHUNK, delta_chunks, delta_step, register_delta_core

HEADS, KEY, VALUE = 3, 16, 24


def sequence(length: int, decay: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(length, HEADS, size, generator=generator) for size in (KEY, KEY, VALUE))
    log_decay, strength = -decay * torch.rand(length, HEADS, generator=generator), torch.rand(length, HEADS)
    return [query, F.normalize(key, dim=-1), value, log_decay, strength]


def by_definition(parts: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, from the formula in the module's head."""
    outputs, state = [], state.double()
    for query, key, value, log_decay, strength in zip(*(part.double() for part in parts), strict=True):
        kept = log_decay.exp()[:, None, None] * state
        change = strength[:, None] * (value - torch.einsum("hvk,hk->hv", kept, key))
        state = kept + torch.einsum("hv,hk->hvk", change, key)
        outputs.append(torch.einsum("hvk,hk->hv", state, query))
    return torch.stack(outputs), state


@pytest.mark.parametrize("decay", [0.1, 5.0])
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_prompts_by_chunks_and_token_by_token_follow_the_definition(length, decay):
    """A prompt that is read in parts, and what is decoded after it, start from the state that the part before has left."""
    parts, state = sequence(length, decay), torch.randn(HEADS, VALUE, KEY)
    truth, last = by_definition(parts, state)
    chunked, after = delta_chunks(*parts, state)
    torch.testing.assert_close(chunked.double(), truth, rtol=0, atol=8e-6)
    torch.testing.assert_close(after.double(), last, rtol=0, atol=8e-6)
    running = state[None]
    for token in range(length):
        out, running = delta_step(*(part[token : token + 1] for part in parts), running)
        torch.testing.assert_close(out[0].double(), truth[token], rtol=0, atol=8e-6)
    torch.testing.assert_close(running[0].double(), last, rtol=0, atol=8e-6)


@pytest.mark.parametrize(("caches", "drafts"), [(True, None), (False, "ngram")])
def test_engines_that_need_earlier_states_are_refused(monkeypatch, caches, drafts):
    """They would go on from a state of other tokens."""
    import vllm.config

    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caches), speculative_config=drafts)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: config)
    with pytest.raises(ValueError, match="--no-enable-prefix-caching and without --speculative-config"):
        register_delta_core()
