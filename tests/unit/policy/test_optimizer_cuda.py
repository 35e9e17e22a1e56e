"""The optimizer's states on a GPU, where they lie and how they are saved: it must not change what is learned."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@dataclass
class Training:
    """Five steps of a small model on some samples."""

    model: str
    samples: list[Any]

    def __call__(self, saved: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
        from tests.ranks import cases

        return cases.train_steps(self.model, {}, self.samples, settings=settings, dtype="bfloat16", **saved or {})

    def followed(self, **settings: Any) -> tuple[dict[str, Any], list[float]]:
        """The same, and by how much each update is wrong."""
        from tests.ranks.update_cases import followed_updates

        with followed_updates() as errors:
            return self(**settings), errors


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    from mgrpo.parallel import backend

    backend.install()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=2)
    from tests.ranks import cases
    from tests.tiny_models import save_tiny

    folder = save_tiny(tmp_path_factory.mktemp("model"), "qwen2")
    # Two trainings then differ by what is compared, not by the order of sums.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield Training(str(folder), cases.random_samples(seed=0))
    torch.use_deterministic_algorithms(False)
    backend.leave_process_groups()


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_offloaded_states_learn_the_same(train: Training, fraction: float) -> None:
    """An update on the host that misses a step or a parameter trains another model.

    Losses in bfloat16 are not compared: see `update_cases`. Five updates round a master below 2 by at most 3e-7.
    """
    plain, device_errors = train.followed()
    offloaded, errors = train.followed(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    assert offloaded["grad_norms"][0] == pytest.approx(plain["grad_norms"][0], rel=1e-6)
    assert len(device_errors) == len(errors) == 5 and max(device_errors + errors) < 6e-7, (device_errors, errors)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="no Transformer Engine")
def test_precision_aware_states_learn_nearly_the_same(train: Training) -> None:
    """Moments in bf16 round; a run that diverges has lost more than that.

    Each of five updates rounds both moments by at most 2^-8: the first moment is off by 2 percent at most, the root of the second
    by 1, an update by 3, and so is the fall of the loss, a sum of products of updates and gradients whose signs agree. Weights
    that round the other way do so in both directions; the limit leaves them as much again.
    """
    plain = train()
    rounded = train(use_precision_aware_optimizer=True, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
    fall = plain["losses"][0] - plain["losses"][-1]
    assert rounded["losses"] == pytest.approx(plain["losses"], rel=0, abs=0.06 * fall)


def test_a_state_saved_from_the_device_continues(train: Training, tmp_path: Path) -> None:
    """Masters and moments travel through host memory; a run that continues must not notice, to the bit."""
    plain = train()
    train({"save_to": str(tmp_path), "save_after": 2})
    continued = train({"resume_from": str(tmp_path / "step_2")})
    assert continued["losses"] == plain["losses"][2:]
    assert continued["grad_norms"] == plain["grad_norms"][2:]


def test_the_export_holds_the_trained_weights(train: Training, tmp_path: Path) -> None:
    """A copy that has not arrived from the device when the file is written exports what was there before."""
    from mgrpo.config.schema import Optimizer
    from mgrpo.model_io.hf_export import export_hf
    from mgrpo.policy.weights import hf_reader
    from tests.ranks import cases

    policy = cases.make_policy(train.model, {})
    policy.prepare_training(Optimizer(learning_rate=1e-2), num_optimizer_steps=2)
    packs, _ = cases.own_packs(policy, train.samples, share_prompts=False, pack_length=64)
    for _ in range(2):
        policy.train_step(policy.microbatches(packs), lambda logprobs, entropy, batch: (-logprobs.sum(), None))
    held = [(box, values.cpu()) for box, values in policy.boxes()]
    export_hf(policy, train.model, str(tmp_path / "hf"), group=torch.distributed.new_group(backend="gloo"))
    read = hf_reader(tmp_path / "hf", policy.shape)
    assert held and all(torch.equal(read(box), values) for box, values in held)
