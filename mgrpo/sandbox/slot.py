"""A slot: it runs one program at a time, in a process inside walls that waits for the next program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from mgrpo.sandbox import wire
from mgrpo.sandbox.supervisor import Order
from mgrpo.sandbox.walled import MARGIN_S, PROGRAM_IDS, LostError, SandboxError, Walled
from mgrpo.sandbox.zygote import Walls


class Result(NamedTuple):
    """Result of one test."""

    passed: bool
    seconds: float
    """-1 for a test that did not pass."""
    output: bytes = b""
    """The text that a stdio test has printed; for one that did not pass, the reason, as the end of a sentence about the program."""
    is_inside: bool = False
    """True if the program's own process has decided: such a verdict can be forged."""


FAILURE = Result(passed=False, seconds=-1.0)


class Slot(Walled):
    """A process inside walls that runs programs against tests."""

    def __init__(self, number: int, walls: Walls) -> None:
        program_id = PROGRAM_IDS[number % len(PROGRAM_IDS)]
        super().__init__(walls, program_ids=range(program_id, program_id + 1), serves_kernels=False)

    def run(self, order: Order, program: str, tests: Sequence[str]) -> list[Result]:
        """One result per test. SandboxError when the slot's process is lost; the slot must then be closed."""
        try:
            return self._run(order, program, tests)
        except (EOFError, ConnectionError) as err:
            raise LostError(f"a sandbox process was lost: {err!r}") from err
        except OSError as err:
            raise SandboxError(f"a sandbox process does not answer: {err!r}") from err

    def _run(self, order: Order, program: str, tests: Sequence[str]) -> list[Result]:
        self._wire.socket.settimeout(order.test_limit_s + MARGIN_S)
        self._wire.send(wire.ORDER, json.dumps(asdict(order)).encode())
        self._wire.send(wire.SOURCE, program.encode("utf-8", "surrogatepass"))
        results: list[Result] = []
        is_inside = False
        while True:
            kind, payload = self._wire.receive()
            if kind == wire.WANT:
                self._wire.send(wire.TEST, tests[len(results)].encode("utf-8", "surrogatepass"))
            elif kind == wire.INSIDE:
                is_inside = True
            elif kind in (wire.PASSED, wire.FAILED):
                results.append(Result(kind == wire.PASSED, *wire.untimed(payload), is_inside))
                is_inside = False
            elif kind == wire.BROKEN:
                raise SandboxError("a supervisor failed; see its message on stderr")
            elif kind == wire.OVER:
                break
        # Missing results: tests that were abandoned, or the program has killed its supervisor.
        return results + [FAILURE] * (order.num_tests - len(results))
