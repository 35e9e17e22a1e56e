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
    """Four steps of a small model on some samples."""

    model: str
    samples: list[Any]

    def __call__(self, saved: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
        from tests.ranks import cases

        return cases.train_steps(self.model, {}, self.samples, settings=settings, dtype="bfloat16", **saved or {})


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
    """An update on the host that misses a step or a parameter trains another model."""
    plain = train()
    offloaded = train(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    assert offloaded["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert offloaded["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-2)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="no Transformer Engine")
def test_precision_aware_states_learn_nearly_the_same(train: Training) -> None:
    """Moments in bf16 round; a run that diverges has lost more than that."""
    plain = train()
    rounded = train(use_precision_aware_optimizer=True, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
    assert rounded["losses"] == pytest.approx(plain["losses"], rel=2e-2)


def test_a_state_saved_from_the_device_continues(train: Training, tmp_path: Path) -> None:
    """Masters and moments travel through host memory; a run that continues must not notice."""
    plain = train()
    train({"save_to": str(tmp_path), "save_after": 2})
    continued = train({"resume_from": str(tmp_path / "step_2")})
    assert continued["losses"] == pytest.approx(plain["losses"][2:], rel=1e-3)
    assert continued["grad_norms"] == pytest.approx(plain["grad_norms"][2:], rel=1e-2)


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
