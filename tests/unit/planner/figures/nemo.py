"""What a step of NeMo RL contains that one of mgrpo does not: by its code (v0.5 and v0.6), and by what its authors measured.

Log-probabilities are computed by single operations over float32 logits of every token (nemo_rl/distributed/model_utils.py). To score
the batch with the reference, a rank copies its weights to the host, takes the reference's, and gets its own back
(`use_reference_model`). Where learners and engines share GPUs, the optimizer's states go to the host and return. None of that
memory is pinned. A refit is as long as they report it, in the row (`theirs`); it includes the states' way to the host.
"""

from __future__ import annotations

from typing import Any

from mgrpo.models.memory import padded_vocab, stage_elements
from mgrpo.planner.plan import RunPlan

FORWARD_LOGIT_BYTES, BACKWARD_LOGIT_BYTES = 46 - 4, 22 - 8
"""Read and written for each logit beyond what a plan counts. Forward: to float32 (2 + 4), maximum (4), difference (8), exponential
(8), sum (4), difference (8), exponential (8); backward: negation (8), product (8), to bfloat16 (6)."""
HOST_BYTES_S = 4.3e9
"""A GPU's copies from and to memory that is not pinned, all GPUs of a node at once: the states of 30B on 16 GPUs went both ways in
12 s, those of 235B on 128 in 9 s (github.com/NVIDIA-NeMo/RL/pull/1404)."""
STATE_BYTES = 12


def beside(row: dict[str, Any], plan: RunPlan) -> dict[str, float]:
    """Seconds that a row's step has beside the plan, by phase."""
    layout, last = plan.layout, plan.layout.pipeline - 1
    tokens = plan.work.trained_tokens / layout.data / layout.context
    logit_s = tokens * padded_vocab(plan.shape) / layout.tensor / plan.hardware.hbm_bytes_s
    held = max(stage_elements(plan.shape, layout, stage=stage).total for stage in range(last + 1))
    seconds = {
        "logprobs": 2 * FORWARD_LOGIT_BYTES * logit_s + 3 * held * plan.dtype_bytes / HOST_BYTES_S,
        "train": (FORWARD_LOGIT_BYTES + BACKWARD_LOGIT_BYTES) * logit_s,
    }
    theirs = row["theirs"]
    if not plan.ahead:
        weights = plan.model_bytes / plan.dtype_bytes
        seconds["turns"] = STATE_BYTES * weights / plan.split.learners / HOST_BYTES_S
    if "sync_s" in theirs:
        seconds["sync"] = theirs["sync_s"] - plan.sync_s
    return seconds
