"""A policy that gives up its GPU memory between steps: the driver must have it back, and the results must be the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from mgrpo.policy.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


Step = Callable[[], tuple[float, Any]]
"""Trains once; the gradient norm and what the loss says."""


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], tuple[Policy, Step]]]:
    """Makes a policy with a loss and packs for its steps; its weights take 40 MB in bfloat16."""
    from mgrpo.parallel import backend

    backend.install()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=2)
    from mgrpo.config.schema import Optimizer
    from tests.ranks import cases
    from tests.tiny_models import save_tiny

    folder = save_tiny(
        tmp_path_factory.mktemp("model"), "qwen2", hidden_size=512, intermediate_size=2048, vocab_size=8192
    )
    samples = cases.random_samples(seed=0)

    def make(zero_stage: int) -> tuple[Policy, Step]:
        policy = cases.make_policy(str(folder), {"zero_stage": zero_stage}, dtype=torch.bfloat16)
        policy.prepare_training(Optimizer(learning_rate=1e-3), num_optimizer_steps=4)
        packs, _ = cases.own_packs(policy, samples, share_prompts=False, pack_length=64)

        def step() -> tuple[float, Any]:
            result = policy.train_step(
                policy.microbatches(packs), lambda logprobs, entropy, batch: (-logprobs.mean(), float(logprobs.mean()))
            )
            return result.grad_norm, result.measured

        return policy, step

    # Sums in another order would differ in their last bits, whatever the memory holds.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield make
    torch.use_deterministic_algorithms(False)
    backend.leave_process_groups()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_memory_goes_back_to_the_device_and_the_steps_are_the_same(
    policies: Callable[[int], tuple[Policy, Step]], zero_stage: int
) -> None:
    """What torch's allocator keeps, no engine on this GPU can use; a value that is not restored trains another model.

    It needs the GPU for itself: the driver says how much is free, whoever takes it.
    """
    plain, step = policies(zero_stage)
    truth = [step() for _ in range(3)]
    weights = [values.cpu() for _, values in plain.boxes()]
    del plain, step
    torch.cuda.empty_cache()

    policy, step = policies(zero_stage)
    parameters = sum(parameter.numel() for parameter in policy.parameters.live.values())
    found = []
    for _ in range(3):
        policy.offload(keep_boxes=True)
        policy.offload()
        policy.restore()
        found.append(step())
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
        views = [values for _, values in policy.boxes()]
        before = [values.clone() for values in views]
        given_up = policy.offload(keep_boxes=True)
        # What a weight sync reads stays: bf16 parameters, or from ZeRO-2 on float32 masters.
        assert all(map(torch.equal, views, before))
        assert given_up >= parameters * (16 if zero_stage < 2 else 14)
        del before
        given_up += policy.offload()
        # Masters, two moments and gradients of 4 bytes each; parameters of 2.
        assert given_up >= parameters * 18
        # Segments of the allocator in which something else lies as well.
        slack = 64 << 20
        assert reserved - torch.cuda.memory_reserved() >= given_up - slack
        assert torch.cuda.mem_get_info()[0] - free >= given_up - slack
        policy.restore()
    assert found == truth
    for own, expected in zip((values.cpu() for _, values in policy.boxes()), weights, strict=True):
        assert torch.equal(own, expected)
