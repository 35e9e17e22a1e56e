"""Training steps whose activations wait in host memory, against the same steps without; on a GPU over real streams.

tests/ranks/test_activation_offload.py has layouts and families on CPU ranks, where each copy is complete when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mgrpo.parallel import backend

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
)
Steps = Callable[[dict[str, Any]], tuple[list[float], dict[str, torch.Tensor]]]


@pytest.fixture(params=["cpu", CUDA])
def train(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    """Train a model of five layers; losses and gradient norms of three steps, and the weights after them."""
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU, on which the policy trains")
    backend.install()
    from mgrpo.config.schema import Optimizer
    from tests.ranks import cases
    from tests.tiny_models import save_tiny

    # On a GPU a layer saves tens of MB, whose copy takes longer than the layer.
    on_cuda = request.param == "cuda"
    size: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048} if on_cuda else {}
    folder = save_tiny(tmp_path_factory.mktemp("model"), "qwen2", layers=5, **size)
    samples = cases.random_samples(seed=0, groups=100 if on_cuda else 5)
    pack_length = 2048 if on_cuda else 64

    def run(settings: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
        policy = cases.make_policy(str(folder), {}, dtype=torch.bfloat16, settings=settings)
        policy.prepare_training(Optimizer(learning_rate=1e-3), num_optimizer_steps=3)
        packs, _ = cases.own_packs(policy, samples, share_prompts=False, pack_length=pack_length)
        found = []
        for _ in range(3):
            result = policy.train_step(
                policy.microbatches(packs), lambda logprobs, entropy, batch: (-logprobs.mean(), logprobs.mean().item())
            )
            found += [result.grad_norm, *result.measured]
        return found, {box.name: values.cpu().clone() for box, values in policy.boxes()}

    # Sums in another order would differ in their last bits, wherever the activations were.
    torch.use_deterministic_algorithms(True, warn_only=True)
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=2)
    yield run
    backend.leave_process_groups()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_steps_are_the_same(train: Steps, recompute: str) -> None:
    """A copy that is read before it is complete, or memory that is used again too early, trains another model."""
    from mgrpo.policy.layers.activation_offload import ActivationOffload

    settings = {"recompute_granularity": recompute}
    expected, weights = train(settings)
    with patch.object(ActivationOffload, "_send", autospec=True, side_effect=ActivationOffload._send) as send:
        found, offloaded = train(settings | {"activation_offloading": True})
    assert send.called
    assert found == expected
    for name, values in weights.items():
        assert torch.equal(offloaded[name], values), name
