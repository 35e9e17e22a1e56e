"""A run's training states on storage: written by all learner ranks together, and opened only when all of them agree."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mgrpo.checkpoint.folder import latest, step_path
from mgrpo.checkpoint.reader import Checkpoint, open_checkpoint
from mgrpo.checkpoint.saver import Saver
from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import state_root
from mgrpo.models.family import ModelShape
from mgrpo.parallel.gather import gather_values
from mgrpo.run.lead import Lead
from mgrpo.run.learner import Learner


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

    def open(self, path: str | None, shape: ModelShape) -> Checkpoint | None:
        """The checkpoint that the run continues, once its files have been compared with their checksums.

        Args:
            path: rank 0's counts; None: a new run.
        Raises:
            ConfigError: on all ranks, when it is damaged or of another model than `shape`.
        """
        shared = self.lead.share(lambda: {"path": np.frombuffer((path or "").encode(), np.uint8)})
        path = shared["path"].tobytes().decode()
        if not path:
            return None
        checkpoint, problem = None, ""
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify(dist.get_rank(), dist.get_world_size())
            if ModelShape.from_dict(checkpoint.state["model"]) != shape:
                problem = f"{path} is of another model than {self.config.model.model_name_or_path}; resume with its own"
        except (ValueError, OSError) as err:
            problem = str(err)
        problems = gather_values(
            torch.frombuffer(bytearray(problem.encode() + b"\n"), dtype=torch.uint8), self.host_group
        )
        found = problems.numpy().tobytes().decode().split("\n")
        if any(found):
            raise ConfigError([next(filter(None, found))])
        return checkpoint

    def save(self, step: int, learner: Learner, state: dict[str, Any]) -> str:
        """Write the state of the whole run after `step`, from which a run continues exactly, also in another layout.

        Args:
            state: everything except tensors, in JSON; rank 0's counts.
        Returns:
            Where it is, or will be when it has been written in the background.
        """
        if self.config.checkpoint.checkpoint_async:
            # The channel's time-out is short: all ranks must have written the state before when they wait there.
            self.saver.wait()
            dist.barrier(group=self.host_group)
        token = self.lead.share(lambda: {"token": np.frombuffer(secrets.token_bytes(8), np.uint8)})
        self.saver.save(step, learner.state.parts(), state, learner.state.full_shapes(), token["token"].tobytes().hex())
        if not self.config.checkpoint.checkpoint_async:
            dist.barrier(group=self.host_group)
        return step_path(self.root, step)

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
        own = self.config.checkpoint.resume == "auto"
        return f"the same command{'' if own else f' with --resume {newest}'} continues from {newest}"

    def stop(self) -> None:
        """Stop writing."""
        self.saver.stop()

    def close(self) -> None:
        """Wait until everything is written."""
        self.saver.close()
