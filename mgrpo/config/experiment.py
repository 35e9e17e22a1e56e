"""The experiment section: what a run is called, where it writes, how long it is, and how long its parts may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from mgrpo.config.annotations import FINITE, ONE_OR_MORE, OPEN_INSTRUCT, POSITIVE, TRL, Range, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    exp_name: Annotated[str, OPEN_INSTRUCT] = "grpo"
    """Name of the experiment in logs."""
    seed: Annotated[int, Range(low=0, high=2**32 - 1), OPEN_INSTRUCT, TRL] = 1
    """Seed of the data order, of sampling and of every other random state."""
    output_dir: Annotated[str, OPEN_INSTRUCT, TRL] = "output"
    """Folder for everything that the run writes; used as given."""
    total_episodes: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 100_000
    """Completions to train on; the number of steps is total_episodes / (prompts x samples per step), rounded down."""
    num_train_epochs: Annotated[float | None, POSITIVE, TRL] = None
    """Passes over the training prompts, instead of total_episodes, which is worked out when the data have been read:
    passes x prompts x samples. Steps go on from one pass into the next; a part of a step at the end is left out."""
    local_eval_every: Annotated[int, FINITE, OPEN_INSTRUCT] = 100
    """Steps between evaluations on the held-out prompts; 0 or less evaluates only before and after training."""
    backend_timeout: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 120
    """Minutes that a collective between learners may take; one of the training itself at most 15."""
    learner_timeout: Annotated[int, ONE_OR_MORE] = 1800
    """Seconds that a learner may stay in one part of a step, such as an optimizer step, an export or a saved state, before
    the run ends with its rank, process and place; one whose process has stopped is named after 50 s, or this if less."""
    profile_steps: tuple[int, ...] = ()
    """Training steps (from 1) whose training and weight sync are profiled on rank 0: traces in output_dir/profile, or nsys ranges."""
    cache_dataset_only: Annotated[bool, OPEN_INSTRUCT] = False
    """Prepare the data, print a summary and exit."""

    @property
    def run_name(self) -> str:
        """exp_name__seed."""
        return f"{self.exp_name}__{self.seed}"


def _output_dir(output_dir: str) -> Iterator[str]:
    if not output_dir:
        yield "output_dir is empty; name a folder"
    elif os.path.isfile(output_dir):
        yield f"output_dir={output_dir} is a file; name a folder"


def _profiled_steps(
    profile_steps: tuple[int, ...], total_episodes: int, num_train_epochs: float | None, batch_size: int
) -> Iterator[str]:
    last = total_episodes // batch_size
    outside = [step for step in profile_steps if not 1 <= step <= last]
    if num_train_epochs is None and outside and last >= 1:
        yield f"profile_steps: {outside[0]} is no step of this run, which has steps 1 to {last}"


RULES: tuple[Rule, ...] = (_output_dir,)
PROFILED_STEPS: tuple[Rule, ...] = (_profiled_steps,)
