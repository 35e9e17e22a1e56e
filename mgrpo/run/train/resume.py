"""A run's training states on storage: written by all learner ranks together, and opened only when all of them agree."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mgrpo.checkpoint.folder import LocalFolder, latest, open_folder, split_path, step_path
from mgrpo.checkpoint.manifest import DamagedCheckpoint
from mgrpo.checkpoint.reader import StoredCheckpoint, open_checkpoint
from mgrpo.checkpoint.saver import SaveError, Saver
from mgrpo.checkpoint.shard import Part
from mgrpo.checkpoint.space import OutputError, no_room
from mgrpo.checkpoint.train_state import KINDS
from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import state_root
from mgrpo.models.memory import FP32_BYTES
from mgrpo.models.placement.boxes import Box, Shape
from mgrpo.models.shape import ModelShape
from mgrpo.parallel.gather import gather_json
from mgrpo.run.ranks.lead import Lead
from mgrpo.run.train.learner import Learner

ROLLOUTS = "rollouts"
"""Kind of the arrays of what was sampled and not trained on."""


def saved_rollouts(checkpoint: StoredCheckpoint) -> dict[str, np.ndarray]:
    """The arrays of rollouts that `States.save` was given."""
    names = checkpoint.names(ROLLOUTS)
    boxes = [Box(name, (0,), checkpoint.shape(ROLLOUTS, name)) for name in names]
    return {box.name: checkpoint.read(ROLLOUTS, box).numpy() for box in boxes}


class States:
    """Every rank makes one; `save` and `open` are collective."""

    def __init__(self, config: Config, lead: Lead, host_group: ProcessGroup) -> None:
        self.config, self.lead, self.host_group = config, lead, host_group
        self.root = state_root(config)
        self.saver = Saver(
            self.root,
            dist.get_rank(),
            dist.get_world_size(),
            keep_last_n=config.checkpoint.keep_last_n_checkpoints,
            asynchronous=config.checkpoint.checkpoint_async,
            timeout_s=60 * config.experiment.backend_timeout,
        )

    def open(self, path: str | None, shape: ModelShape) -> StoredCheckpoint | None:
        """The checkpoint that the run continues, once its files have been compared with their checksums.

        With resume=intact a damaged one is passed over for the one before it.

        Args:
            path: rank 0's counts; None: a new run.
        Raises:
            ConfigError: on all ranks, when it is damaged or of another model than `shape`.
        """
        found = self.lead.share(lambda: path)
        while found:
            checkpoint, problem, previous = self._try(found, shape)
            outcomes = gather_json([problem, previous], self.host_group)
            problems = [outcome for outcome in outcomes if outcome[0]]
            if not problems:
                return checkpoint
            if checkpoint is not None:
                checkpoint.close()
            if self.config.checkpoint.resume != "intact" or not all(previous for _, previous in problems):
                raise ConfigError([problems[0][0]])
            self.lead.call(partial(print, f"mgrpo: {problems[0][0]}", file=sys.stderr))
            found = problems[0][1]
        return None

    def _try(self, path: str, shape: ModelShape) -> tuple[StoredCheckpoint | None, str, str | None]:
        """The checkpoint, or what this rank finds wrong with it; of a damaged one, which one is before it."""
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify(dist.get_rank(), dist.get_world_size())
            if ModelShape.from_dict(checkpoint.state["model"]) == shape:
                return checkpoint, "", None
        except DamagedCheckpoint as err:
            return None, str(err), err.previous
        except (ValueError, OSError) as err:
            return None, str(err), None
        model = self.config.model.model_name_or_path
        return None, f"{path} is of another model than {model}; resume with its own", None

    def save(
        self, step: int, learner: Learner, state: dict[str, Any], rollouts: Mapping[str, np.ndarray] | None = None
    ) -> str:
        """Write the state of the whole run after `step`, from which a run continues exactly, also in another layout.

        Args:
            state: everything except tensors, in JSON; rank 0's counts.
            rollouts: flat arrays that rank 0 adds.
        Returns:
            Where it is, or will be when it has been written in the background.
        Raises:
            OutputError: on all ranks, when this state, or the one before it in the background, could not be written.
        """
        self.wait()  # the channel's time-out is short: none may still write when the others wait there
        arrays = {name: torch.from_numpy(array) for name, array in (rollouts or {}).items() if array.size}
        shapes = learner.state.full_shapes() | {ROLLOUTS: {name: tuple(own.shape) for name, own in arrays.items()}}
        added = [Part(ROLLOUTS, Box(name, (0,), tuple(own.shape)), own) for name, own in arrays.items()]
        place = step_path(self.root, step)
        if problem := self.lead.share(lambda: self._no_room(shapes)):
            raise OutputError(f"the state of step {step} could not be saved in {place}: {problem}{self._newest()}")
        attempt = self.lead.share(lambda: secrets.token_hex(8))
        self._agree(partial(self.saver.save, step, [*learner.state.parts(), *added], state, shapes, attempt))
        return place

    def wait(self) -> None:
        """Wait until everything is written. Collective; raises OutputError as `save` does."""
        self._agree(self.saver.wait)

    def _no_room(self, shapes: Mapping[str, Mapping[str, Shape]]) -> str:
        folder = open_folder(self.root)
        if not isinstance(folder, LocalFolder):
            return ""
        num_elements = sum(math.prod(shape) for kind in KINDS for shape in shapes.get(kind, {}).values())
        return no_room(folder.path, FP32_BYTES * num_elements) or ""

    def _newest(self) -> str:
        newest = latest(self.root)
        return f"; the newest complete checkpoint is {newest}" if newest else ""

    def _agree(self, action: Callable[[], object]) -> None:
        """Do it on every rank, and fail on all of them if one fails."""
        problem, cause = "", None
        try:
            action()
        except SaveError as err:
            problem, cause = str(err), err
        problems = list(filter(None, gather_json(problem, self.host_group)))
        if problems:
            raise OutputError(problems[-1]) from cause  # rank 0 quotes the others

    def last_good(self) -> str:
        """A clause that says from which state a failed run can be continued."""
        newest = latest(self.root)
        if newest:
            return f"the last good checkpoint is {newest}, continue from it with --resume {newest}"
        folder = Path(self.config.experiment.output_dir) / "hf"
        exports = f"exports are in {folder}; " if folder.is_dir() else ""
        return f"{exports}there is no checkpoint, set checkpoint_state_freq"

    def how_to_go_on(self, saved: int) -> str:
        """A clause that says how a stopped run is continued.

        Args:
            saved: the step of its newest state; 0: there is none.
        """
        if not saved:
            return "no state was saved, so the same command begins again"
        newest = step_path(self.root, saved)
        own = self.config.checkpoint.resume in ("auto", "intact")
        return f"the same command{'' if own else f' with --resume {newest}'} continues from {newest}"

    def how_to_go_on_from_newest(self) -> str:
        """The same for a run that was cut off. Remote folders are not asked, since that may take longer than a user waits."""
        newest = latest(self.root) if isinstance(open_folder(self.root), LocalFolder) else None
        return self.how_to_go_on(split_path(newest)[1] if newest else 0)

    def stop(self) -> None:
        """Stop writing."""
        self.saver.stop()
