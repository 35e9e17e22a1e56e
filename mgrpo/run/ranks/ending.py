"""The end of a rank when something is wrong: with one cause, in bounded time, also where its main thread hangs.

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
"""How long the clean-up after Ctrl-C may take."""

_reported = threading.Lock()
_silenced = threading.Event()
_timers: list[threading.Timer] = []


def begin() -> None:
    """A run begins: the reports of an earlier one in this process do not silence it."""
    if _reported.locked():
        _reported.release()
    _silenced.clear()


def report(cause: str, *, details: str = "") -> None:
    """Say once why this rank ends: first `cause`, one line, then the details; also in torchrun's file for errors."""
    if not _silenced.is_set():
        _say(cause, details)


def report_interrupt(after: str = "") -> None:
    """Ctrl-C: rank 0 says so, and `after` which step and how to go on, whatever else the other ranks have said of it."""
    if rank() == 0:
        _say(f"interrupted{after}", "")


def _say(cause: str, details: str) -> None:
    if not _reported.acquire(blocking=False):
        return
    sys.stdout.flush()
    # The text of an exception may be a model's: a terminal must not obey it.
    sys.stderr.write(printable(f"mgrpo: {cause}\n{details}"))
    sys.stderr.flush()
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The form in which torchrun reads it; it prints the message of the first rank that failed.
        extra = {"py_callstack": details, "timestamp": str(int(time.time()))}
        with open(file, "w") as stream:
            json.dump({"message": {"message": cause, "extraInfo": extra}}, stream)


def is_reported() -> bool:
    """Whether the cause has been said, here or by another rank."""
    return _reported.locked() or _silenced.is_set()


def silence() -> None:
    """Another rank reports why the run ends."""
    _silenced.set()


def follow() -> None:
    """Another rank ends the run and says why: this one ends as well, also where it hangs."""
    silence()
    leave_within("another rank has ended the run", 2 * CLEAN_UP_S)


def report_error(err: BaseException) -> None:
    """Report an error; beneath one of the user's code where it lies, beneath an unexpected one its traceback."""
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
    """A run: within, Ctrl-C raises KeyboardInterrupt once; the process ends if the run does not within `CLEAN_UP_S`.

    Args:
        leave_others: called at once, from any thread: no rank is to report the end of another.
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
    """Within, code of the user's that calls `os._exit` in this process ends it no less, but not without a word."""
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
