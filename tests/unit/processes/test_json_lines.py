"""A child process that misbehaves costs its own answers, never the parent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mgrpo.processes.json_lines import Child, ChildError

PROGRAM = """
import os, sys, time
from mgrpo.processes.json_lines import limit_memory, serve


def answer(question):
    match question["do"]:
        case "echo":
            return {"text": question["text"]}
        case "print":
            print("noise", flush=True)
            os.write(1, b"more noise")
            return {"text": sys.stdin.read()}
        case "hang":
            time.sleep(1000)
        case "exit":
            os._exit(3)
        case "raw":
            # What a library with a descriptor of its own could do: 4 is the pipe that `serve` writes to.
            os.write(4, eval(question["bytes"]))
            time.sleep(1000)
        case "close":
            os.close(4)
            time.sleep(1000)
        case "memory":
            limit_memory(question["mebibytes"])
            try:
                return {"text": str(len(bytearray(2**30)))}
            except MemoryError:
                return {"text": "MemoryError"}


serve(answer)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Starts programs that do as they are told, and ends them."""
    (tmp_path / "told_program.py").write_text(PROGRAM)
    started: list[Child] = []

    def start(**settings: int) -> Child:
        started.append(Child("told_program", folders=[str(tmp_path)], **settings))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_answers_come_in_the_order_of_the_questions(child: Callable[..., Child]) -> None:
    """Both pipes hold 64 KiB: long texts both ways must not block either side."""
    own = child()
    texts = [str(n) * 50_000 for n in range(8)]
    own.send({"do": "echo", "text": text} for text in texts)
    assert [own.receive(30)["text"] for _ in texts] == texts


def test_what_is_printed_is_not_an_answer(child: Callable[..., Child]) -> None:
    """Libraries print, and some read from standard input."""
    own = child()
    own.send([{"do": "print"}, {"do": "echo", "text": "x"}])
    assert [own.receive(30), own.receive(30)] == [{"text": ""}, {"text": "x"}]


def test_a_deadline_ends_the_wait_and_not_the_child(child: Callable[..., Child]) -> None:
    """The caller decides what a late answer costs."""
    own = child()
    own.send([{"do": "hang"}])
    with pytest.raises(TimeoutError, match=r"no answer after 0\.3 s"):
        own.receive(0.3)
    assert own.process.poll() is None


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"do": "exit"}, "ended with exit code 3"),
        ({"do": "raw", "bytes": "b'[1]\\n'"}, r"wrote b'\[1\]', which is not a JSON object"),
        ({"do": "raw", "bytes": "b'[' * 3000 + b'\\n'"}, r"wrote b'\[\[.*, which is not a JSON object"),
        ({"do": "raw", "bytes": "b'\\xff\\n'"}, "which is not a JSON object"),
        ({"do": "raw", "bytes": "b'{' * 20000"}, "wrote a line of more than 10000 bytes"),
    ],
)
def test_how_a_child_failed_is_named(child: Callable[..., Child], question: dict, message: str) -> None:
    """A line without an end would otherwise fill the parent's memory."""
    own = child(max_line_bytes=10_000)
    own.send([question])
    with pytest.raises(ChildError, match=message):
        own.receive(30)


def test_an_answer_too_many_is_not_taken_for_the_next_one(child: Callable[..., Child]) -> None:
    """It would be the score of another completion."""
    own = child()
    own.send([{"do": "raw", "bytes": """b'{"text": "a"}\\n{"text": "b"}\\n'"""}])
    assert own.receive(30) == {"text": "a"}
    with pytest.raises(ChildError, match="answered more than it was asked"):
        own.receive(30)


def test_a_child_that_closes_its_output_is_over(child: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """It still runs, so that waiting for its exit would take for ever."""
    monkeypatch.setattr("mgrpo.processes.json_lines._EXIT_LIMIT_S", 0.1)
    own = child()
    own.send([{"do": "close"}])
    with pytest.raises(ChildError, match="closed its output"):
        own.receive(30)


def test_killing_a_child_ends_the_wait_of_another_thread(child: Callable[..., Child]) -> None:
    """A run must be able to end while a model hangs."""
    own = child()
    own.send([{"do": "hang"}])
    threading.Timer(0.3, own.kill).start()
    with pytest.raises(ChildError, match="died of SIGKILL"):
        own.receive(30)


def test_memory_has_a_limit(child: Callable[..., Child]) -> None:
    """A child without one takes the machine with it."""
    own = child()
    own.send([{"do": "memory", "mebibytes": 500}])
    assert own.receive(30) == {"text": "MemoryError"}


def test_a_child_outlives_the_thread_that_started_it(child: Callable[..., Child]) -> None:
    """The kernel ends a child with the thread that forked it."""
    started: list[Child] = []
    thread = threading.Thread(target=lambda: started.append(child()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    started[0].send([{"do": "echo", "text": "x"}])
    assert started[0].receive(30) == {"text": "x"}


def test_a_forked_process_starts_children_of_its_own(child: Callable[..., Child]) -> None:
    """It has none of its parent's threads, so that waiting for the one that starts children would take for ever."""
    child()
    forked = os.fork()
    if forked == 0:
        own = child()
        own.send([{"do": "echo", "text": "x"}])
        is_good = own.receive(20) == {"text": "x"}
        own.end()
        os._exit(0 if is_good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
