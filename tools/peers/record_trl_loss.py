"""Losses and gradients that TRL's `GRPOTrainer._compute_loss` gives, for tests.

    PYTHONPATH=. python -m tools.peers.record_trl_loss > tests/unit/algo/losses_of_trl.json

TRL is an installed release. Its method computes; only the forward pass is replaced, by log-probabilities of a batch. Run it again when
TRL changes.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from tools.peers.losses import LONGEST, Batch, record

COMMON: dict[str, Any] = {"use_vllm": True, "max_completion_length": LONGEST}
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
CLIPPED = LOSS_TYPES[:5]
LEVELS = ("token", "sequence")
CORRECTIONS: dict[str, dict[str, Any]] = {
    "token_truncate": {"vllm_importance_sampling_clip_max": 1.5},
    "token_mask": {"vllm_importance_sampling_clip_min": 0.6},
    "sequence_truncate": {"vllm_importance_sampling_clip_min": 0.7},
    "sequence_mask": {},
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"epsilon_high": 1.28},
    {"beta": 0.05},
    {"beta": 0.05, "use_bias_correction_kl": False},
    {"beta": 0.05, "use_bias_correction_kl": True, "epsilon_high": 1.28},
    {"epsilon": 0.1, "epsilon_high": 0.5, "delta": 1.8},
    {"off_policy_mask_threshold": 0.2, "beta": 0.05},
)
UNCORRECTED: dict[str, Any] = {"vllm_importance_sampling_correction": False}
REFUSED_THERE = (("vespo", "sequence_truncate"), ("vespo", "sequence_mask"))


def values() -> Iterator[dict[str, Any]]:
    """The arguments of each case, beside `COMMON`; what is not among them has TRL's default."""
    for kind, level in itertools.product(LOSS_TYPES, LEVELS):
        named_loss = {"loss_type": kind} | ({"importance_sampling_level": level} if level != "token" else {})
        # Without it TRL's CISPO caps ratios at epsilon, 0.2.
        loss = named_loss | ({"epsilon_high": 5.0} if kind == "cispo" else {})
        for mode, bounds in CORRECTIONS.items():
            if (kind, mode) not in REFUSED_THERE:
                named = {} if mode == "sequence_mask" else {"vllm_importance_sampling_mode": mode}
                for option in OPTIONS:
                    if "delta" not in option or kind in CLIPPED:
                        yield loss | named | bounds | option
        yield loss | UNCORRECTED | {"beta": 0.05}
        yield named_loss | UNCORRECTED | {"epsilon": 0.3}


def loss_of(given: dict[str, Any], batch: Batch, logprobs: Tensor) -> Tensor:
    """The loss of one batch, which is the micro-batch, the optimizer's step and the generation batch."""
    arguments = GRPOConfig(**given, output_dir="unused", report_to="none", bf16=False, use_cpu=True)
    arguments.steps_per_generation = 1
    trainer = object.__new__(GRPOTrainer)
    vars(trainer).update(
        {name: getattr(arguments, name) for name in names_in(GRPOTrainer._compute_loss) if hasattr(arguments, name)}
    )
    vars(trainer).update(
        args=arguments,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
        ),
        current_gradient_accumulation_steps=1,
        epsilon_low=arguments.epsilon,
        epsilon_high=arguments.epsilon if arguments.epsilon_high is None else arguments.epsilon_high,
        max_completion_length=arguments.max_completion_length,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )
    tokens, mask = torch.zeros(batch.mask.shape, dtype=torch.int64), batch.mask.double()
    inputs = {
        "prompt_ids": tokens[:, :1],
        "prompt_mask": tokens[:, :1],
        "completion_ids": tokens,
        "completion_mask": mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logprobs,
        "ref_per_token_logps": batch.ref_logprobs,
        "sampling_per_token_logps": batch.rollout_logprobs,
        "num_items_in_batch": mask.sum(),
    }
    if arguments.vllm_importance_sampling_correction:
        inputs["importance_sampling_ratio"] = correction_of(trainer, arguments, inputs)
    return trainer._compute_loss(None, inputs)


def names_in(function: Any) -> set[str]:
    """The attributes of `self` that a method reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "self"}


def correction_of(trainer: Any, arguments: Any, inputs: dict[str, Any]) -> Tensor:
    """The ratio of trainer to engine, by the statement of TRL's method that prepares a batch which computes it."""
    method = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions)))
    (statement,) = (
        node
        for node in ast.walk(method)
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_ratio = torch.exp(" in ast.unparse(node.body)
        and "vllm_importance_sampling_correction" in ast.unparse(node.test)
    )
    vars(trainer).update(
        {name: value for name, value in vars(arguments).items() if name.startswith("vllm_importance_")}
    )
    local: dict[str, Any] = {"self": trainer, "torch": torch, "math": math, "tool_mask": None} | inputs
    exec(compile(ast.Module([statement], []), "<TRL>", "exec"), local)
    return local["vllm_importance_sampling_ratio"]


if __name__ == "__main__":
    record(f"trl {version('trl')}", (COMMON | given for given in values()), loss_of, has_idle_row=True)
