"""What every caller's end of an engine does: its methods become calls by name, which take effect in their order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from mgrpo.rollout.engine import Pause, PromptBatch


class Caller(ABC):
    """The ordered calls of an `Engine`; `EngineCalls` has the method of each name."""

    @abstractmethod
    def _call(self, method: str, *args: object) -> Future[Any]:
        """A call that takes effect after those before it."""

    def submit(self, batch: PromptBatch) -> Future[None]:
        """See `Engine`."""
        return self._call("submit", batch)

    def pause(self, how: Pause) -> Future[None]:
        """See `Engine`."""
        return self._call("pause", how)

    def resume(self) -> Future[None]:
        """See `Engine`."""
        return self._call("resume")

    def sleep(self) -> Future[None]:
        """See `Engine`."""
        return self._call("sleep")

    def abort(self) -> Future[None]:
        """See `Engine`."""
        return self._call("abort")

    def join(self, invitation: Mapping[str, Any]) -> Future[None]:
        """See `Engine`."""
        return self._call("join", invitation)

    def receive_weights(self, version: int, *, check: bool, seed: int) -> Future[None]:
        """See `Engine`."""
        return self._call("receive_weights", version, check, seed)

    def seed(self, seed: int) -> Future[None]:
        """See `Engine`."""
        return self._call("seed", seed)
