"""The answers of an actor as futures, with a stand-in for Ray's handles."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from mgrpo.rollout.engine import EngineError
from mgrpo.rollout.vllm.ray_engine import RayEngine


class Call:
    """A reference, and how it will be answered."""

    def __init__(self) -> None:
        self.answer: Future = Future()

    def future(self) -> Future:
        return self.answer


@pytest.fixture
def calls():
    """Of `start` and `poll`."""
    return Call(), Call()


@pytest.fixture
def engine(calls):
    start, poll = calls
    return RayEngine(SimpleNamespace(poll=SimpleNamespace(remote=lambda *args: poll)), start)


def test_an_actors_error_is_the_line_that_says_what_happened(engine, calls) -> None:
    """Ray prints the traceback of three processes; the user needs its last line."""
    polled = engine.poll()
    calls[1].answer.set_exception(RuntimeError("Traceback:\n  File engine.py\nValueError: no memory\n\n"))
    with pytest.raises(EngineError, match=r"^RuntimeError: ValueError: no memory$"):
        polled.result(0)


def test_closing_ends_every_wait(engine, calls, monkeypatch) -> None:
    """Ray forgets its callbacks when it shuts down; a thread that waits for one would keep the process for an hour."""
    killed = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(kill=killed.append))
    polled = engine.poll()
    calls[0].answer.set_result(None)
    engine.close()
    assert killed == [engine.actor] and engine.ready.result(0) is None
    with pytest.raises(EngineError, match="closed"):
        polled.result(0)
    calls[1].answer.set_result({})  # too late, and without harm
    assert isinstance(polled.exception(0), EngineError)


def test_a_closed_engine_is_not_called_again(engine, monkeypatch) -> None:
    """Ray would start a new cluster for the call, which nothing ends."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(kill=lambda actor: None))
    engine.close()
    engine.actor.poll.remote = None
    assert isinstance(engine.poll().exception(0), EngineError)


def test_when_ray_itself_has_failed_the_engine_is_not_blamed(calls) -> None:
    """The engine's end follows from Ray's, and some calls would wait for an hour."""
    start, poll = calls
    reasons = ["Ray's raylet died of SIGKILL"]
    engine = RayEngine(
        SimpleNamespace(poll=SimpleNamespace(remote=lambda *args: poll)), start, cluster_failure=lambda: reasons[0]
    )
    polled = engine.poll()
    start.answer.set_exception(RuntimeError("ActorDiedError"))
    assert str(engine.ready.exception(0)) == reasons[0]
    engine.fail(reasons[0])
    assert str(polled.exception(0)) == str(engine.poll().exception(0)) == reasons[0]


def test_calls_are_numbered_in_their_order(calls) -> None:
    """By the numbers the actor restores the order; a poll waits for answers and has none."""
    made = []
    start, poll = calls

    def remote(*args: object) -> Call:
        made.append(args)
        return Call()

    actor = SimpleNamespace(call=SimpleNamespace(remote=remote), poll=SimpleNamespace(remote=lambda *args: poll))
    engine = RayEngine(actor, start)
    engine.pause("drain"), engine.poll(), engine.seed(5), engine.resume()
    assert made == [(0, "pause", "drain"), (1, "seed", 5), (2, "resume")]
