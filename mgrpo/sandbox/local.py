"""Runners of programs in this process: sandboxes and kernels. Callers with the same limits share one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mgrpo.sandbox.interpreters import Kernels
from mgrpo.sandbox.sandbox import Sandbox


class _Closable(Protocol):
    def start(self) -> object: ...
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


@dataclass(slots=True)
class _Loan(Generic[T]):
    thing: T
    borrowers: int = 0


class _Loans(Generic[T]):
    """Things that are started for their first borrower and closed after the last."""

    def __init__(self, create: Callable[[int, bool], T]) -> None:
        self._create = create
        self._loans: dict[tuple[int, int, bool], _Loan[T]] = {}
        """The key includes the process: a forked child must not use its parent's."""
        self._lock = threading.Lock()

    def borrow(self, memory_mb: int, accept_risk: bool) -> T:
        key = (os.getpid(), memory_mb, accept_risk)
        with self._lock:
            loan = self._loans.get(key)
            if loan is None:
                thing = self._create(memory_mb, accept_risk)
                try:
                    thing.start()
                except BaseException:
                    thing.close()
                    raise
                loan = self._loans[key] = _Loan(thing)
            loan.borrowers += 1
            return loan.thing

    def give_back(self, memory_mb: int, accept_risk: bool) -> None:
        key = (os.getpid(), memory_mb, accept_risk)
        with self._lock:
            loan = self._loans[key]
            loan.borrowers -= 1
            if loan.borrowers:
                return
            del self._loans[key]
        loan.thing.close()


_sandboxes = _Loans(lambda memory_mb, accept_risk: Sandbox(memory_mb=memory_mb, accept_risk=accept_risk))
_kernels = _Loans(lambda memory_mb, accept_risk: Kernels(memory_mb=memory_mb, accept_risk=accept_risk))


def borrow_sandbox(memory_mb: int, *, accept_risk: bool) -> Sandbox:
    """A started sandbox, until `give_back_sandbox`. ValueError where this machine cannot isolate programs."""
    return _sandboxes.borrow(memory_mb, accept_risk)


def give_back_sandbox(memory_mb: int, *, accept_risk: bool) -> None:
    """Release the sandbox; the last release closes it."""
    _sandboxes.give_back(memory_mb, accept_risk)


def borrow_kernels(memory_mb: int, *, accept_risk: bool) -> Kernels:
    """Started kernels, until `give_back_kernels`. ValueError where this machine cannot isolate programs."""
    return _kernels.borrow(memory_mb, accept_risk)


def give_back_kernels(memory_mb: int, *, accept_risk: bool) -> None:
    """Release the kernels; the last release ends them."""
    _kernels.give_back(memory_mb, accept_risk)
