"""Where the optimizer's states lie on a GPU: it must not change what is learned."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    from mgrpo.parallel import backend

    backend.install()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    backend.init_process_group(rank=0, world_size=1, timeout_minutes=2)
    from tests.ranks import cases
    from tests.tiny_models import save_tiny

    folder = save_tiny(tmp_path_factory.mktemp("model"), "qwen2")
    samples = cases.random_samples(seed=0)

    def run(**settings):
        return cases.train_steps(str(folder), {}, samples, settings=settings, dtype="bfloat16")

    yield run
    backend.leave_process_groups()


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_offloaded_states_learn_the_same(train, fraction):
    """An update on the host that misses a step or a parameter trains another model."""
    plain = train()
    offloaded = train(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    assert offloaded["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert offloaded["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-2)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="no Transformer Engine")
def test_precision_aware_states_learn_nearly_the_same(train):
    """Moments in bf16 round; a run that diverges has lost more than that."""
    plain = train()
    rounded = train(use_precision_aware_optimizer=True, exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16")
    assert rounded["losses"] == pytest.approx(plain["losses"], rel=2e-2)
