"""The tracking section of the configuration: where a run can be watched, and what it prints of its completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mgrpo.config.annotations import ONE_OR_MORE, OPEN_INSTRUCT, TRL

TRACKERS = ("tensorboard", "wandb", "trackio")
EVERY, NO = "all", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    report_to: Annotated[tuple[str, ...], OPEN_INSTRUCT, TRL] = ("tensorboard",)
    """Where metrics, settings and samples go beside metrics.jsonl: tensorboard, wandb (Weights & Biases; WANDB_MODE=offline needs no
    account) and trackio, or several of them; all: those that are installed and set up; none: nowhere."""
    run_name: Annotated[str | None, OPEN_INSTRUCT, TRL] = None
    """Name of the run in wandb and trackio; none: exp_name__seed."""
    wandb_project: Annotated[str | None, OPEN_INSTRUCT] = None
    """Project of the run in wandb and trackio; none: WANDB_PROJECT of the environment, or mgrpo."""
    wandb_entity: Annotated[str | None, OPEN_INSTRUCT] = None
    """Account or team that owns the project in wandb; none: WANDB_ENTITY, or the default of who is logged in."""
    wandb_group_name: Annotated[str | None, OPEN_INSTRUCT] = None
    """Group of runs that it belongs to in wandb and trackio; none: WANDB_RUN_GROUP, or no group."""
    log_completions: Annotated[bool, TRL] = False
    """Print the completions of every step with their prompts, rewards and advantages, and send them to the trackers."""
    num_completions_to_print: Annotated[int | None, ONE_OR_MORE, TRL] = None
    """With log_completions: how many are printed, spread over the step; none: all."""
    log_unique_prompts: Annotated[bool, TRL] = False
    """With log_completions: only one completion of each prompt."""

    def asks_for(self, *names: str) -> bool:
        """Whether any of these trackers may be used."""
        return any(name in self.report_to for name in (*names, EVERY))
