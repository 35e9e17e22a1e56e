"""The optimizer section: AdamW, and its learning rate over the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mgrpo.config.annotations import BELOW_ONE, MEGATRON, NOT_NEGATIVE, OPEN_INSTRUCT, POSITIVE, TRL, Needs, Rule
from mgrpo.models.cuts import size_of
from mgrpo.models.hf_config import HfConfig

LARGE = 2048
"""Hidden size from which a model counts as large, as for the warnings about its learning rate."""
WARMING = Needs(
    "another lr_scheduler_type, for example constant_with_warmup",
    lambda lr_scheduler_type: lr_scheduler_type != "constant",
)
FALLING = Needs(
    "an lr_scheduler_type that falls, for example cosine",
    lambda lr_scheduler_type: not lr_scheduler_type.startswith("constant"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    learning_rate: Annotated[float, POSITIVE, OPEN_INSTRUCT, TRL] = 2e-5
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Annotated[
        Literal[
            "linear",
            "cosine",
            "cosine_with_restarts",
            "cosine_with_min_lr",
            "polynomial",
            "constant",
            "constant_with_warmup",
        ],
        OPEN_INSTRUCT,
        TRL,
    ] = "linear"
    """How the rate changes after the warm-up, over all optimizer steps; linear and cosine end at min_lr."""
    min_lr: Annotated[float, NOT_NEGATIVE, MEGATRON, FALLING] = 0.0
    """Learning rate at the end of a schedule that falls; with polynomial 0 means 1e-7."""
    warm_up_steps: Annotated[int, NOT_NEGATIVE, OPEN_INSTRUCT, WARMING] = 0
    """Optimizer steps of linear warm-up; used when warmup_ratio is 0."""
    warmup_ratio: Annotated[float, BELOW_ONE, OPEN_INSTRUCT, TRL, WARMING] = 0.0
    """Share of all optimizer steps used for warm-up, rounded down to whole steps as in Open Instruct; transformers rounds up."""
    weight_decay: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, TRL] = 0.0
    """AdamW's weight decay."""
    set_weight_decay_on_bias_and_norm: bool = False
    """Also decay biases and norms. (Open Instruct's flag of this name does the opposite.)"""
    max_grad_norm: Annotated[float, NOT_NEGATIVE, OPEN_INSTRUCT, TRL] = 1.0
    """Global norm to which gradients are clipped; 0: no clipping."""
    adam_beta1: Annotated[float, BELOW_ONE, TRL] = 0.9
    """AdamW's first decay rate."""
    adam_beta2: Annotated[float, BELOW_ONE, TRL] = 0.999
    """AdamW's second decay rate."""
    adam_epsilon: Annotated[float, POSITIVE, TRL] = 1e-8
    """AdamW's epsilon."""


def _length(
    total_episodes: int,
    num_train_epochs: float | None,
    num_unique_prompts_rollout: int,
    num_samples_per_prompt_rollout: int,
    num_epochs: int,
    num_mini_batches: int,
    warm_up_steps: int,
    warmup_ratio: float,
) -> Iterator[str]:
    """A step to train, and a warm-up that ends before the run."""
    if num_train_epochs is not None:
        return
    batch_size = num_unique_prompts_rollout * num_samples_per_prompt_rollout
    steps = total_episodes // batch_size * num_epochs * num_mini_batches
    if total_episodes < batch_size:
        yield (
            f"total_episodes={total_episodes} is less than one step of "
            f"{num_unique_prompts_rollout} prompts x {num_samples_per_prompt_rollout} "
            f"samples; use at least {batch_size}"
        )
    elif warmup_ratio == 0 and warm_up_steps > steps:
        yield (
            f"warm_up_steps={warm_up_steps} is more than the run's {steps} "
            "optimizer steps; shorten it or raise total_episodes"
        )


def _rates(learning_rate: float, min_lr: float, lr_scheduler_type: str) -> Iterator[str]:
    if min_lr > learning_rate:
        yield f"min_lr={min_lr:g} is above learning_rate={learning_rate:g}, from which the rate falls; lower it"
    if lr_scheduler_type == "cosine_with_min_lr" and min_lr == 0:
        yield "lr_scheduler_type=cosine_with_min_lr needs min_lr above 0; give it, or use cosine, which ends at 0"


RULES: tuple[Rule, ...] = (_length, _rates)


def _high_rate(learning_rate: float, use_peft: bool, hf_config: HfConfig | None) -> Iterator[str]:
    highest, usual = (5e-5, "5e-6 to 2e-5") if use_peft else (5e-6, "5e-7 to 2e-6")
    if (size_of(hf_config, "hidden_size") or 0) >= LARGE and learning_rate > highest:
        yield f"learning_rate={learning_rate} is high for a model of this size; {usual} is usual"


def _two_warm_ups(warm_up_steps: int, warmup_ratio: float) -> Iterator[str]:
    if warmup_ratio > 0 and warm_up_steps > 0:
        yield f"warm_up_steps={warm_up_steps} is ignored, because warmup_ratio={warmup_ratio} overrides it"


RATE_WARNINGS: tuple[Rule, ...] = (_high_rate,)
WARM_UP_WARNINGS: tuple[Rule, ...] = (_two_warm_ups,)
