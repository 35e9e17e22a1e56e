"""Tokens per second and MFU, against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mgrpo.models.family import shape_of
from mgrpo.moving import from_values
from mgrpo.packing import pack_lengths
from mgrpo.planner.hardware import GPUS, gpu_of
from mgrpo.run.report.throughput import Throughput
from mgrpo.types import TrainSample

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}


@pytest.fixture
def packs():
    """Two documents of 6 prompt and 3 response tokens; a completion's last token predicts nothing, so 8 tokens each."""
    samples = [
        TrainSample(
            prompt_tokens=np.full(6, 3, np.int32),
            tokens=np.full(3, 4, np.int32),
            loss_mask=np.ones(3, bool),
            rollout_logprobs=np.zeros(3, np.float32),
            advantage=1.0,
            group=number,
        )
        for number in range(2)
    ]
    return pack_lengths(samples, [[[0], [1]]], multiple_of=1, document_multiple_of=1)


def make(device_name: str | None, **settings: object) -> Throughput:
    config = from_values({"num_epochs": 1, "num_mini_batches": 1, "beta": 0.0} | settings)
    return Throughput(config, shape_of(LLAMA), num_learners=4, device_name=device_name)


def test_mfu_is_what_a_person_counts(packs) -> None:
    """Per token and layer 2 operations a weight and 4 a dimension of each key it sees; three times that to train."""
    assert packs.tokens == 16
    qkvo = 64 * (4 + 2 + 2) * 16 + 64 * 64
    norms_excluded = qkvo + 3 * 64 * 128
    layers = 2 * (16 * 2 * norms_excluded + 4 * 64 * 2 * sum(range(1, 9)))
    head = 2 * 64 * 256 * 6
    found = make("NVIDIA H100 80GB HBM3").metrics(packs, 0.5)
    assert found["time/learner_tokens_per_second_per_gpu"] == 16 / 0.5 / 4
    assert found["learner_mfu"] == pytest.approx(3 * (layers + head) / (0.5 * 4 * 989e12), rel=1e-2)


def test_all_passes_of_a_step_count(packs) -> None:
    """Two epochs train twice and score once before; a reference scores once."""
    plain, more = (
        make("NVIDIA H200", **settings).metrics(packs, 1.0)["learner_mfu"]
        for settings in ({}, {"num_epochs": 2, "beta": 0.1})
    )
    assert more / plain == pytest.approx((2 * 3 + 1 + 1) / 3)


@pytest.mark.parametrize("device_name", [None, "NVIDIA H100 PCIe"])
def test_without_a_known_peak_there_is_no_mfu(device_name, packs) -> None:
    """On a CPU, and on a card whose peak is another than that of its namesake."""
    assert make(device_name).metrics(packs, 1.0).keys() == {"time/learner_tokens_per_second_per_gpu"}


def test_every_gpu_of_the_planner_is_recognised_once() -> None:
    """By the name that CUDA gives it."""
    from mgrpo.planner.hardware import _DEVICE_NAMES

    assert sorted(_DEVICE_NAMES.values()) == sorted(GPUS)
    assert gpu_of("NVIDIA A100-SXM4-80GB") is GPUS["A100-80"]
