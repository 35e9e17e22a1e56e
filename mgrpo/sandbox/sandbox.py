"""The sandbox: one slot per core, each owned by a thread; programs wait for a free slot."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from mgrpo.sandbox.cases import StdioTest
from mgrpo.sandbox.isolation import Isolation, probe
from mgrpo.sandbox.outputs import same_output
from mgrpo.sandbox.slot import Result, Slot
from mgrpo.sandbox.supervisor import Order
from mgrpo.sandbox.walled import ForbiddenError, LostError, SandboxError
from mgrpo.sandbox.zygote import Walls

_PROBE_LIMIT_S = 30.0
# An output longer than twice the expected one plus this, which allows for white space, cannot be right.
_SPARE_OUTPUT = 2**20
_ALL_WALLS: tuple[Walls, ...] = ("user", "root", "none")


class Verdicts(NamedTuple):
    """Verdicts on one program, in the order of its tests."""

    results: list[int]
    """1 where a test passed, else 0."""
    runtimes: list[float]
    """Seconds of each test; -1 where it did not end on its own, or raised."""
    in_process: list[int]
    """1 where the program's own process has decided, which a program can forge; else 0."""


class Sandbox:
    """Runs programs against tests. Thread-safe; `close` ends all processes."""

    def __init__(
        self,
        *,
        memory_mb: int = 1024,
        num_slots: int | None = None,
        accept_risk: bool = False,
        walls: Sequence[Walls] | None = None,
    ) -> None:
        """Starts no process. `walls`: kinds to try, in order (default: all); `num_slots`: default one per core."""
        self.num_slots = num_slots or len(os.sched_getaffinity(0))
        self._memory_bytes = memory_mb * 2**20
        self._accept_risk = accept_risk
        self._walls = tuple(walls or _ALL_WALLS)
        self._isolation: Isolation | None = None
        self._start_lock = threading.Lock()
        # The kernel ends a slot together with the thread that started it, so each thread has its own slot.
        self._threads = ThreadPoolExecutor(max_workers=self.num_slots, thread_name_prefix="sandbox")
        self._thread_local = threading.local()
        self._slots: set[Slot] = set()
        self._numbers = itertools.count()
        self._is_closed = False

    def start(self) -> Isolation:
        """Choose the walls and measure them. ValueError where a layer is missing and the risk is not accepted."""
        with self._start_lock:
            if self._isolation is None:
                isolation = self._threads.submit(self._try_walls).result()
                isolation.refuse_if_missing(accept_risk=self._accept_risk)
                self._isolation = isolation
            return self._isolation

    def run_asserts(self, program: str, tests: Sequence[str], limit_s: float) -> Future[Verdicts]:
        """Execute each test after the program, in a fresh process. `limit_s` bounds both together."""
        self.start()
        order = self._order(limit_s, num_tests=len(tests), is_stdio=False, output_bytes=0)
        return self._threads.submit(self._assert_verdicts, order, program, tests)

    def run_stdio(self, program: str, tests: Sequence[StdioTest], limit_s: float) -> Future[Verdicts]:
        """Run the program as a script for each test. `limit_s` is rounded up to whole seconds."""
        self.start()
        output_bytes = (
            2 * max((len(test.output.encode("utf-8", "replace")) for test in tests), default=0) + _SPARE_OUTPUT
        )
        order = self._order(math.ceil(limit_s), num_tests=len(tests), is_stdio=True, output_bytes=output_bytes)
        return self._threads.submit(self._stdio_verdicts, order, program, tests)

    def close(self) -> None:
        """End every process. Running programs get no verdict."""
        self._is_closed = True
        for slot in list(self._slots):
            slot.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for slot in list(self._slots):
            slot.close()
        self._slots.clear()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, limit_s: float, *, num_tests: int, is_stdio: bool, output_bytes: int) -> Order:
        return Order(
            is_stdio=is_stdio,
            num_tests=num_tests,
            test_limit_s=limit_s,
            run_limit_s=run_limit_s(limit_s),
            output_bytes=output_bytes,
            memory_bytes=self._memory_bytes,
        )

    def _assert_verdicts(self, order: Order, program: str, tests: Sequence[str]) -> Verdicts:
        results = self._run(order, program, tests)
        return _verdicts(order, results, [int(result.passed) for result in results])

    def _stdio_verdicts(self, order: Order, program: str, tests: Sequence[StdioTest]) -> Verdicts:
        results = self._run(order, program, [test.input for test in tests])
        passed = [
            int(result.passed and same_output(_text(result.output), test.output))
            for result, test in zip(results, tests, strict=True)
        ]
        return _verdicts(order, results, passed)

    def _run(self, order: Order, program: str, tests: Sequence[str]) -> list[Result]:
        """Runs in a slot's thread. A program whose slot is lost is run once more: it has no verdict, and leaves nothing."""
        for may_repeat in (True, False):
            slot: Slot | None = getattr(self._thread_local, "slot", None)
            if slot is None:
                assert self._isolation is not None
                slot = self._open_slot(self._isolation.walls)
            try:
                return slot.run(order, program, tests)
            except BaseException as err:
                self._close_slot(slot)
                if self._is_closed or not may_repeat or not isinstance(err, LostError):
                    raise
        raise AssertionError("the last try returns or raises")

    def _open_slot(self, walls: Walls) -> Slot:
        slot = self._thread_local.slot = Slot(next(self._numbers), walls)
        self._slots.add(slot)
        if self._is_closed:
            slot.kill()
        return slot

    def _close_slot(self, slot: Slot) -> None:
        self._thread_local.slot = None
        self._slots.discard(slot)
        slot.close()

    def _try_walls(self) -> Isolation:
        """The first kind of walls without a missing layer, otherwise the last kind. Runs in a slot's thread."""
        reasons: list[str] = []
        are_forbidden = True
        for walls in self._walls:
            try:
                slot = self._open_slot(walls)
            except SandboxError as err:
                reasons.append(f"{walls}: {err}")
                are_forbidden = are_forbidden and isinstance(err, ForbiddenError)
                continue

            def run(program: str, stdin: str, slot: Slot = slot) -> str:
                order = self._order(_PROBE_LIMIT_S, num_tests=1, is_stdio=True, output_bytes=_SPARE_OUTPUT)
                return _text(slot.run(order, program, [stdin])[0].output)

            try:
                isolation = probe(walls, run, reasons=tuple(reasons), are_forbidden=are_forbidden)
            except BaseException:
                self._close_slot(slot)
                raise
            if not isolation.missing or walls == self._walls[-1]:
                return isolation
            reasons.append(f"{walls}: does not isolate {', '.join(isolation.missing)}")
            are_forbidden = False
            self._close_slot(slot)
        raise SandboxError(f"no sandbox process can be started: {'; '.join(reasons)}")


def _verdicts(order: Order, results: Sequence[Result], passed: list[int]) -> Verdicts:
    # A test that ended in time may be seen to have ended later.
    runtimes = [min(result.seconds, order.test_limit_s) for result in results]
    return Verdicts(passed, runtimes, [int(result.is_inside) for result in results])


def run_limit_s(limit_s: float) -> float:
    """Seconds for all tests of a program: less than the caller's time-out (`client_limit_s`)."""
    return 0.8 * client_limit_s(limit_s)


def client_limit_s(limit_s: float) -> float:
    """Time-out of a caller in seconds, by Open Instruct's rule."""
    return max(30.0, min(300.0, 10 * limit_s))


def _text(output: bytes) -> str:
    try:
        return output.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return output.decode("utf-8", "replace")
