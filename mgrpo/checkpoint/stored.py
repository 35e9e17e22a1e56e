"""A checkpoint's manifest and the trainer's own state, which are checked before a run starts anything. No torch."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Any

from mgrpo.checkpoint.folder import MANIFEST, Folder, check_complete, complete, step_folder, step_path
from mgrpo.checkpoint.manifest import DamagedCheckpoint, Manifest, OtherVersion


class Stored:
    """A complete checkpoint as its manifest describes it.

    Raises:
        ValueError: there is no complete checkpoint of this step in `root`, or it may not be read.
        OtherVersion: this mgrpo cannot read its format.
        DamagedCheckpoint: it has changed since it was written.
    """

    def __init__(self, root: Folder, step: int) -> None:
        self.root, self.step = root, step
        self.path = step_path(root.location, step)
        self.folder = root.child(step_folder(step))
        check_complete(root, step)
        try:
            self.manifest = Manifest.from_json(self.folder.read(MANIFEST))
        except OtherVersion as err:
            raise OtherVersion(
                f"{self.path} was written by another version of mgrpo: {err}; continue it with the version that wrote "
                "it, or start afresh with --resume never"
            ) from err
        except PermissionError as err:
            raise ValueError(f"{self.path} cannot be read: {err}; ask its owner for permission") from err
        except OSError as err:
            raise self.damaged(f"{MANIFEST} cannot be read: {err}") from err
        except ValueError as err:
            raise self.damaged(str(err)) from err
        if self.manifest.step != step:
            raise self.damaged(f"{MANIFEST} is of step {self.manifest.step}")

    @cached_property
    def state(self) -> dict[str, Any]:
        """The trainer's own state."""
        name = self.manifest.state
        self.check_size(name)
        data = self.folder.read(name)
        if hashlib.sha256(data).hexdigest() != self.manifest.files[name].sha256:
            raise self.damaged(f"{name} has changed since it was written, its checksum differs")
        return json.loads(data)

    def check_sizes(self) -> None:
        """Raise DamagedCheckpoint unless every file is there and as long as it was written."""
        for name in self.manifest.files:
            self.check_size(name)

    def check_size(self, name: str) -> None:
        """The same of one file."""
        found, expected = self.folder.size(name), self.manifest.files[name].num_bytes
        if found is None:
            raise self.damaged(f"{name} is missing")
        if found != expected:
            how = "truncated" if found < expected else "too long"
            raise self.damaged(f"{name} is {how}, {found} bytes of {expected}")

    def damaged(self, what: str) -> DamagedCheckpoint:
        """The error for this checkpoint."""
        earlier = [step for step in complete(self.root.location) if step < self.step]
        previous = step_path(self.root.location, earlier[-1]) if earlier else None
        return DamagedCheckpoint(f"{self.path} is damaged: {what}", previous=previous)
