"""The sandboxes of this process, behind the app of the service; callers with the same limits share one."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mgrpo.sandbox.sandbox import Sandbox

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(slots=True)
class _Loan:
    app: FastAPI
    sandbox: Sandbox
    borrowers: int = 0


_loans: dict[tuple[int, int, bool], _Loan] = {}
"""The key includes the process: a forked child must not use its parent's sandbox."""
_lock = threading.Lock()


def borrow_app(memory_mb: int, *, accept_risk: bool) -> FastAPI:
    """The app of a started sandbox, until `give_back_app`. ValueError where this machine cannot isolate programs."""
    from mgrpo.sandbox.app import create_app

    key = (os.getpid(), memory_mb, accept_risk)
    with _lock:
        loan = _loans.get(key)
        if loan is None:
            sandbox = Sandbox(memory_mb=memory_mb, accept_risk=accept_risk)
            try:
                sandbox.start()
            except BaseException:
                sandbox.close()
                raise
            loan = _loans[key] = _Loan(create_app(sandbox), sandbox)
        loan.borrowers += 1
        return loan.app


def give_back_app(memory_mb: int, *, accept_risk: bool) -> None:
    """Release the app; the last release closes the sandbox."""
    key = (os.getpid(), memory_mb, accept_risk)
    with _lock:
        loan = _loans[key]
        loan.borrowers -= 1
        if loan.borrowers:
            return
        del _loans[key]
    loan.sandbox.close()
