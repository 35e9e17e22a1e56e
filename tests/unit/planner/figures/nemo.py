"""What a step of NeMo RL contains that one of mgrpo does not: by its code (v0.3 to v0.6), and by what its authors measured.

Log-probabilities are computed by single operations over float32 logits of every token (nemo_rl/distributed/model_utils.py). To score
the batch with the reference, a rank copies its weights to the host, takes the reference's, and gets its own back
(`use_reference_model`). Where learners and engines share GPUs, the optimizer's states go to the host and return. None of that
memory is pinned. A refit is as long as they report it, in the row (`theirs`); it includes the states' way to the host.

With pipeline stages every pack is padded to the longest one (nemo_rl/models/megatron/data.py). Gradients are added to the buffer
beside the products (`gradient_accumulation_fusion: false`). Packs that are only scored are longer (`logprob_batch_size` of the
recipe, `scored_packs` of a row), and the whole batch is scored at once.
"""

from __future__ import annotations

from typing import Any

from mgrpo.models.memory import padded_vocab, stage_elements
from mgrpo.planner.learners.touched import fused_in_stage
from mgrpo.planner.plan import RunPlan
from mgrpo.planner.work import passes_of

FORWARD_LOGIT_BYTES, BACKWARD_LOGIT_BYTES = 46 - 4, 22 - 8
"""Read and written for each logit beyond what a plan counts. Forward: to float32 (2 + 4), maximum (4), difference (8), exponential
(8), sum (4), difference (8), exponential (8); backward: negation (8), product (8), to bfloat16 (6)."""
HOST_BYTES_S = 4.3e9
"""A GPU's copies from and to memory that is not pinned, all GPUs of a node at once: the states of 30B on 16 GPUs went both ways in
12 s, those of 235B on 128 in 9 s (github.com/NVIDIA-NeMo/RL/pull/1404)."""
STATE_BYTES = 12


def beside(row: dict[str, Any], plan: RunPlan, longer: RunPlan) -> dict[str, float]:
    """Seconds that a row's step has beside the plan, by phase.

    Args:
        longer: the plan with packs as long as those that they score.
    """
    layout, last = plan.layout, plan.layout.pipeline - 1
    tokens = plan.work.trained_tokens / layout.data / layout.context
    logit_s = tokens * padded_vocab(plan.shape) / layout.tensor / plan.hardware.hbm_bytes_s
    held = max(stage_elements(plan.shape, layout, stage=stage).total for stage in range(last + 1))
    learners, scored = plan.learners, longer.learners
    updates = plan.config.algorithm.num_mini_batches
    passes = passes_of(plan.config)
    unfused = fused_in_stage(plan.shape, layout, stage=last) * learners.num_micro_batches * updates
    training = (
        _padded(learners.training, plan, updates)
        + unfused * plan.hardware.assumed.gradient_bytes / plan.hardware.hbm_bytes_s
    )
    seconds = {
        "logprobs": _padded(scored.logprobs, longer, 1)
        - sum(learners.logprobs.values())
        + (passes.reference + passes.old) * FORWARD_LOGIT_BYTES * logit_s
        + 3 * held * plan.dtype_bytes / HOST_BYTES_S,
        "train": training - sum(learners.training.values()) + (FORWARD_LOGIT_BYTES + BACKWARD_LOGIT_BYTES) * logit_s,
    }
    theirs = row["theirs"]
    if not plan.ahead:
        weights = plan.model_bytes / plan.dtype_bytes
        seconds["turns"] = STATE_BYTES * weights / plan.split.learners / HOST_BYTES_S
    if "sync_s" in theirs:
        seconds["sync"] = theirs["sync_s"] - plan.sync_s
    return seconds


def _padded(causes: dict[str, float], plan: RunPlan, updates: int) -> float:
    """Seconds of these causes where, between pipeline stages, every pack is as long as the longest."""
    outside = sum(causes.get(cause, 0.0) for cause in ("host", "bubble", "data", "optimizer"))
    busy = sum(causes.values()) - outside
    packs, pack_length = plan.learners.num_micro_batches * updates, plan.config.parallel.pack_length
    padded = busy
    if plan.layout.pipeline > 1:
        padded *= packs * pack_length / (plan.work.trained_tokens / plan.layout.data)
    # The host needs as long as before.
    with_host = max(padded, busy + causes["host"]) if "host" in causes else padded
    bubble = causes.get("bubble", 0.0) / (busy + causes.get("host", 0.0))
    return with_host * (1 + bubble) + causes.get("data", 0.0) + causes.get("optimizer", 0.0)
