"""What the engine's actor makes of vLLM's answers."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from mgrpo.rollout.vllm.actor import EngineActor, _flatten


def completion(tokens: list[int], logprobs: list[float], reason: str = "stop") -> SimpleNamespace:
    """As vLLM's `CompletionOutput` is, with `FlatLogprobs`."""
    flat = SimpleNamespace(token_ids=tokens[: len(logprobs)], logprobs=logprobs)
    return SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=reason, weight_versions=None)


def test_logprobs_lie_beside_their_tokens():
    """A shift by one position would be trained on as an off-policy sample."""
    answer = _flatten([completion([7, 8], [-0.5, -1.5]), completion([], []), completion([9], [-2.0], "length")])
    assert answer["tokens"].tolist() == [7, 8, 9] and answer["cu_seqlens"].tolist() == [0, 2, 2, 3]
    assert answer["logprobs"].tolist() == [-0.5, -1.5, -2.0] and answer["logprobs"].dtype == np.float32
    assert answer["finish_reasons"].tolist() == [0, 0, 1]


def test_a_token_without_a_logprob_is_an_error():
    """Those of all later completions would move to other tokens."""
    with pytest.raises(AssertionError, match="one per position"):
        _flatten([completion([7, 8], [-0.5]), completion([9], [-2.0])])


@pytest.mark.parametrize("missing", ["model", "tokenizer"])
def test_a_node_without_the_model_is_named(tmp_path, missing):
    """vLLM says that the path is no valid name on the Hub, and not on which of the nodes."""
    args = {"model": str(tmp_path), "tokenizer": str(tmp_path), missing: str(tmp_path / "elsewhere")}
    with pytest.raises(FileNotFoundError, match=f"elsewhere is not a folder on {socket.gethostname()}, where"):
        asyncio.run(EngineActor().start(args))
