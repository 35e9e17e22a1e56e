"""The end of a failed rank: with one cause, in bounded time, even if its main thread hangs.

The main thread may be inside a call that no exception reaches (a collective, Ray's start, a user's endless loop). Then another
thread ends the process with `os._exit`; Ray and the verifiers end with their parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NoReturn

from mgrpo.config import ConfigError
from mgrpo.processes.user_code import UserCodeError, own_frames
from mgrpo.run.ranks.process import rank
from mgrpo.telemetry.untrusted import printable

INTERRUPTED = 128 + signal.SIGINT
CLEAN_UP_S = 5.0
"""Seconds for the clean-up after Ctrl-C."""

_reported = threading.Lock()
_silenced = threading.Event()
_timers: list[threading.Timer] = []


def begin() -> None:
    """Reset the reports at the start of a run: those of an earlier run in this process must not silence it."""
    if _reported.locked():
        _reported.release()
    _silenced.clear()


def report(cause: str, *, details: str = "") -> None:
    """Print once why this rank ends: `cause`, one line, then the details; also to torchrun's error file."""
    if not _silenced.is_set():
        _say(cause, details)


def report_interrupt(after: str = "") -> None:
    """Report Ctrl-C on rank 0, with `after` (step and how to continue), even if other ranks have reported a cause."""
    if rank() == 0:
        _say(f"interrupted{after}", "")


def _say(cause: str, details: str) -> None:
    if not _reported.acquire(blocking=False):
        return
    sys.stdout.flush()
    # An exception may contain a model's text: untrusted input for the terminal.
    sys.stderr.write(printable(f"mgrpo: {cause}\n{details}"))
    sys.stderr.flush()
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The form in which torchrun reads it; it prints the message of the first rank that failed.
        extra = {"py_callstack": details, "timestamp": str(int(time.time()))}
        with open(file, "w") as stream:
            json.dump({"message": {"message": cause, "extraInfo": extra}}, stream)


def is_reported() -> bool:
    """True if the cause has been reported, here or by another rank."""
    return _reported.locked() or _silenced.is_set()


def silence() -> None:
    """Report nothing: another rank reports why the run ends."""
    _silenced.set()


def follow() -> None:
    """End this rank, even if it hangs, because another rank ends the run and reports why."""
    silence()
    leave_within("another rank has ended the run", 2 * CLEAN_UP_S)


def report_error(err: BaseException) -> None:
    """Report an error; with its place for one of the user's code, with a traceback for an unexpected one."""
    if isinstance(err, ConfigError):
        report(str(err))
        return
    where = f"rank {rank()}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    if isinstance(err, UserCodeError):
        report(f"{where}{err}", details="\n".join([*err.__notes__, ""]))
        return
    report(f"{where}{type(err).__name__}: {err}", details="".join(traceback.format_exception(err)))


def leave(cause: str) -> None:
    """End this process now, from any thread."""
    report(cause)
    os._exit(1)


def leave_within(cause: str, seconds: float) -> None:
    """End this process with `cause` if its run has not ended after that time."""
    timer = threading.Timer(seconds, leave, (cause,))
    timer.daemon = True
    _timers.append(timer)
    timer.start()


@contextmanager
def bounded(leave_others: Callable[[], None]) -> Iterator[None]:
    """Run the block so that Ctrl-C raises KeyboardInterrupt once and the process ends `CLEAN_UP_S` later at the latest.

    Args:
        leave_others: called at once, from any thread, so that other ranks do not report this one's end.
    """
    is_main = threading.current_thread() is threading.main_thread()
    try:
        with _exits_explained(leave_others), _bounded_interrupt(leave_others) if is_main else nullcontext():
            yield
    finally:
        for timer in _timers:
            timer.cancel()
        _timers.clear()


@contextmanager
def _exits_explained(leave_others: Callable[[], None]) -> Iterator[None]:
    """Report a call of `os._exit` by the user's code within the block before it ends this process."""
    exit_now, own = os._exit, os.getpid()

    def explained(status: int) -> NoReturn:
        if os.getpid() == own and not is_reported():
            report(
                f"a reward function or other code of yours ended the run by os._exit({status}); raise an error instead",
                details=own_frames(traceback.extract_stack(sys._getframe(1))) + "\n",
            )
            leave_others()
        exit_now(status)

    os._exit = explained
    try:
        yield
    finally:
        os._exit = exit_now


@contextmanager
def _bounded_interrupt(leave_others: Callable[[], None]) -> Iterator[None]:
    ended = threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    def wait() -> None:
        while (number := os.read(reading, 1)) not in (b"", bytes([signal.SIGINT])):
            pass
        os.close(reading)
        if number:
            leave_others()
            if rank() != 0:  # it has nothing to clean up
                silence()
                os._exit(INTERRUPTED)
            if not ended.wait(CLEAN_UP_S):
                report_interrupt()
                os._exit(INTERRUPTED)

    # Python's handlers wait for the main thread to return from C; the number is written by the signal itself.
    before = signal.signal(signal.SIGINT, interrupt)
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=wait, name="interrupt", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(wakeup)
        os.close(writing)
        signal.signal(signal.SIGINT, before)
