"""A run's training states on storage: all learner ranks write them together, and all must agree to open one."""

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

from mgrpo.checkpoint.folder import (
    LocalFolder,
    is_near,
    latest,
    near_root,
    open_folder,
    resumable,
    step_path,
)
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
from mgrpo.processes.address import LOOPBACK
from mgrpo.run.ranks.lead import Lead
from mgrpo.run.train.learner import Learner
from mgrpo.run.train.near_states import NearStates

ROLLOUTS = "rollouts"
"""Kind of the arrays of rollouts that were not trained on."""


def saved_rollouts(checkpoint: StoredCheckpoint) -> dict[str, np.ndarray]:
    """The `rollouts` of `States.save`."""
    names = checkpoint.names(ROLLOUTS)
    boxes = [Box(name, (0,), checkpoint.shape(ROLLOUTS, name)) for name in names]
    return {box.name: checkpoint.read(ROLLOUTS, box).numpy() for box in boxes}


class States:
    """Training states of one run. Every rank makes one; `save` and `open` are collective."""

    def __init__(self, config: Config, lead: Lead, host_group: ProcessGroup, *, host: str = LOOPBACK) -> None:
        """
        Args:
            host: address of this node for the others.
        """
        self.config, self.lead, self.host_group = config, lead, host_group
        self.root = state_root(config)
        local_dir = config.checkpoint.checkpoint_local_dir
        self.near = NearStates(local_dir, self.root, lead=lead, host_group=host_group, host=host) if local_dir else None
        self.is_near = False
        """True if the run continues from the nodes' disks."""
        self.saver = Saver(
            self.root,
            dist.get_rank(),
            dist.get_world_size(),
            keep_last_n=config.checkpoint.keep_last_n_checkpoints,
            near=self.near.folder if self.near else None,
            asynchronous=config.checkpoint.checkpoint_async,
            timeout_s=60 * config.experiment.backend_timeout,
        )

    def open(self, path: str | None, shape: ModelShape) -> StoredCheckpoint | None:
        """The checkpoint that the run continues, with verified checksums.

        With resume=intact a damaged one is skipped for the one before it; with auto or intact also one on disks of nodes that are gone.

        Args:
            path: rank 0's value is used; None: a new run.
        Raises:
            ConfigError: on all ranks, if it is damaged or of another model than `shape`.
        """
        found = self.lead.share(lambda: path)
        while found:
            checkpoint, problem, previous = self._try(found, shape)
            outcomes = gather_json([problem, previous], self.host_group)
            problems = [outcome for outcome in outcomes if outcome[0]]
            if not problems:
                self.is_near = is_near(found)
                return checkpoint
            if checkpoint is not None:
                checkpoint.close()
            passes = ("auto", "intact") if is_near(found) else ("intact",)
            if self.config.checkpoint.resume not in passes or not all(previous for _, previous in problems):
                raise ConfigError([problems[0][0]])
            self.lead.call(partial(print, f"mgrpo: {problems[0][0]}", file=sys.stderr))
            found = problems[0][1]
        return None

    def _try(self, path: str, shape: ModelShape) -> tuple[StoredCheckpoint | None, str, str | None]:
        """The checkpoint, or None with this rank's problem; for a damaged checkpoint also the path of the one before it."""
        try:
            if is_near(path):
                checkpoint, problem, previous = self._open_near(path)
                if checkpoint is None:
                    return None, problem, previous
            else:
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

    def _open_near(self, path: str) -> tuple[StoredCheckpoint | None, str, str | None]:
        """See `_try`. Collective."""
        others = self.lead.share(
            lambda: [other for other in resumable(self.root) if other != path and not is_near(other)]
        )
        previous = others[0] if others else None
        if self.near is None:
            return None, f"{path} lies on disks of the nodes, and checkpoint_local_dir does not say where", previous
        checkpoint, problem = self.near.open(path)
        return (
            checkpoint,
            f"{problem}; {previous} is older and on storage" if problem and previous else problem,
            previous,
        )

    def save(
        self,
        step: int,
        learner: Learner,
        state: dict[str, Any],
        rollouts: Mapping[str, np.ndarray] | None = None,
        *,
        near_only: bool = False,
    ) -> str:
        """Write the state of the whole run after `step`, from which a run continues exactly, also in another layout.

        Args:
            state: everything except tensors, in JSON; rank 0's value is used.
            rollouts: flat arrays that rank 0 adds.
            near_only: write to the nodes' disks, not to storage.
        Returns:
            Path of the state, which may still be written in the background.
        Raises:
            OutputError: on all ranks, if this state, or the previous one in the background, could not be written.
        """
        self.wait()  # the channel's time-out is short: none may still write when the others wait there
        arrays = {name: torch.from_numpy(array) for name, array in (rollouts or {}).items() if array.size}
        shapes = learner.state.full_shapes() | {ROLLOUTS: {name: tuple(own.shape) for name, own in arrays.items()}}
        added = [Part(ROLLOUTS, Box(name, (0,), tuple(own.shape)), own) for name, own in arrays.items()]
        place = step_path(near_root(self.root) if near_only else self.root, step)
        if problem := self.lead.share(lambda: "" if near_only else self._no_room(shapes)):
            raise OutputError(f"the state of step {step} could not be saved in {place}: {problem}{self._newest()}")
        attempt = self.lead.share(lambda: secrets.token_hex(8))
        parts = [*learner.state.parts(), *added]
        self._agree(partial(self.saver.save, step, parts, state, shapes, attempt, near_only=near_only))
        return place

    def wait(self) -> None:
        """Wait until everything is written. Collective; raises OutputError as `save` does."""
        self._agree(self.saver.wait)

    def finish(self) -> None:
        """Delete the states on the nodes' disks at the end of the run, when nothing is being written. Collective."""
        if self.near:
            self.near.finish()

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
        """Run `action` on every rank; raise OutputError on all of them if one fails."""
        problem, cause = "", None
        try:
            action()
        except SaveError as err:
            problem, cause = str(err), err
        problems = list(filter(None, gather_json(problem, self.host_group)))
        if problems:
            raise OutputError(problems[-1]) from cause  # rank 0 quotes the others

    def last_good(self) -> str:
        """Clause for messages: the state from which a failed run can be continued."""
        newest = latest(self.root)
        if newest:
            return f"the last good checkpoint is {newest}, continue from it with --resume {newest}"
        folder = Path(self.config.experiment.output_dir) / "hf"
        exports = f"exports are in {folder}; " if folder.is_dir() else ""
        return f"{exports}there is no checkpoint, set checkpoint_state_freq or save_every_minutes"

    def how_to_go_on(self, saved: int) -> str:
        """Clause for messages: how to continue a stopped run.

        Args:
            saved: the step of its newest state; 0: none.
        """
        return self._continues_from(step_path(self.root, saved) if saved else None)

    def _continues_from(self, newest: str | None) -> str:
        if newest is None:
            return "no state was saved, so the same command begins again"
        own = self.config.checkpoint.resume in ("auto", "intact")
        return f"the same command{'' if own else f' with --resume {newest}'} continues from {newest}"

    def how_to_go_on_from_newest(self) -> str:
        """See `how_to_go_on`; for an interrupted run. Remote folders are not listed: that may take too long."""
        paths = resumable(self.root) if isinstance(open_folder(self.root), LocalFolder) else []
        return self._continues_from(paths[0] if paths else None)

    def stop(self) -> None:
        """Stop writing."""
        self.saver.stop()
