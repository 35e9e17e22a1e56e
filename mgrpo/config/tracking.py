"""The tracking section: where a run can be watched, and what it prints of its completions."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from mgrpo.config.annotations import ONE_OR_MORE, OPEN_INSTRUCT, TRL, Needs, Rule, shown

TRACKERS = ("tensorboard", "wandb", "trackio")
EVERY, NO = "all", "none"

PROJECTS = Needs(
    "wandb or trackio in report_to", lambda report_to: not {"wandb", "trackio", EVERY}.isdisjoint(report_to)
)
WANDB = Needs("wandb in report_to", lambda report_to: not {"wandb", EVERY}.isdisjoint(report_to))
PRINTING = Needs("log_completions=true", lambda log_completions: log_completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracking:
    report_to: Annotated[tuple[str, ...], OPEN_INSTRUCT, TRL] = ("tensorboard",)
    """Where metrics, settings and samples go beside metrics.jsonl: tensorboard, wandb (Weights & Biases; WANDB_MODE=offline needs no
    account) and trackio, or several of them; all: those that are installed and set up; none: nowhere."""
    run_name: Annotated[str | None, OPEN_INSTRUCT, TRL, PROJECTS] = None
    """Name of the run in wandb and trackio; none: exp_name__seed."""
    wandb_project: Annotated[str | None, OPEN_INSTRUCT, PROJECTS] = None
    """Project of the run in wandb and trackio; none: WANDB_PROJECT of the environment, or mgrpo."""
    wandb_entity: Annotated[str | None, OPEN_INSTRUCT, WANDB] = None
    """Account or team that owns the project in wandb; none: WANDB_ENTITY, or the default of the account that is logged in."""
    wandb_group_name: Annotated[str | None, OPEN_INSTRUCT, PROJECTS] = None
    """Group of runs that it belongs to in wandb and trackio; none: WANDB_RUN_GROUP, or no group."""
    log_completions: Annotated[bool, TRL] = False
    """Print the completions of every step with their prompts, rewards and advantages, and send them to the trackers."""
    num_completions_to_print: Annotated[int | None, ONE_OR_MORE, TRL, PRINTING] = None
    """With log_completions: how many are printed, spread over the step; none: all."""
    log_unique_prompts: Annotated[bool, TRL, PRINTING] = False
    """With log_completions: only one completion of each prompt."""

    def asks_for(self, *names: str) -> bool:
        """Whether any of these trackers may be used."""
        return any(name in self.report_to for name in (*names, EVERY))


def _trackers(report_to: tuple[str, ...]) -> Iterator[str]:
    known = (*TRACKERS, EVERY, NO)
    for name in report_to:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"report_to={name} is not a tracker; {hint}choose from {', '.join(known)}"
    if len(report_to) > 1 and {EVERY, NO} & set(report_to):
        yield f"report_to={shown(report_to)}: {EVERY} and {NO} stand alone"


RULES: tuple[Rule, ...] = (_trackers,)
