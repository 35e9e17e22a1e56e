"""Every verifier behind one call: those that compute, in worker processes (`worker_pool`), and those that call
servers (`remote_endpoint`)."""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mgrpo.config.schema import Reward
from mgrpo.rewards.registry import add_modules, find
from mgrpo.rewards.remote_endpoint import RemoteScorer
from mgrpo.rewards.verifier import Item, RemoteVerifier
from mgrpo.rewards.worker_pool import VerifierPool


class Scorer:
    """Scores items by their verifiers, wherever these run. Always `close` it."""

    def __init__(self, settings: Reward, verifiers: Sequence[str] = ()) -> None:
        """Starts nothing; `verifiers` are those that will be called."""
        add_modules(settings.verifier_modules)
        self.settings = settings
        self.pool = VerifierPool(
            settings.verifier_workers,
            settings.verifier_timeout,
            verifiers=[name for name in verifiers if not is_remote(name)],
            settings=settings,
        )
        self.remote = RemoteScorer(settings)

    def start(self) -> None:
        """Start the worker processes, without waiting for their imports."""
        self.pool.start()

    def verify_many(self, items: Sequence[Item]) -> list[float]:
        """The score of every item, in order; NaN where none could be given."""
        remote = {name for name in {item.verifier for item in items} if is_remote(name)}
        asking = [item.verifier in remote for item in items]
        if not remote:
            return self.pool.verify_many(items)
        if all(asking):
            return self.remote.verify_many(items)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="remote-scores") as thread:
            asked = thread.submit(self.remote.verify_many, [item for item in items if item.verifier in remote])
            computed = iter(self.pool.verify_many([item for item in items if item.verifier not in remote]))
            answered = iter(asked.result())
        return [next(answered) if is_asked else next(computed) for is_asked in asking]

    @property
    def errors(self) -> Counter[str]:
        """Items without a score since the start, by verifier."""
        return self.pool.errors + self.remote.errors

    def metrics(self) -> dict[str, float]:
        """Sums of the verifiers that call servers."""
        return self.remote.metrics()

    def close(self) -> None:
        """End workers and connections."""
        self.pool.close()
        self.remote.close()


def is_remote(name: str) -> bool:
    """True if the verifier called `name` calls a server."""
    return issubclass(find(name), RemoteVerifier)


_shared: list[Scorer] = []
_shared_lock = threading.Lock()


def shared_scorer(settings: Reward) -> Scorer:
    """The scorer behind `mgrpo.rewards.verify`: one per process, replaced when the settings change."""
    with _shared_lock:
        if _shared and _shared[0].settings != settings:
            _shared.pop().close()
        if not _shared:
            _shared.append(Scorer(settings))
        return _shared[0]


os.register_at_fork(
    before=_shared_lock.acquire, after_in_parent=_shared_lock.release, after_in_child=_shared_lock.release
)


@atexit.register
def _close_shared() -> None:
    while _shared:
        _shared.pop().close()
