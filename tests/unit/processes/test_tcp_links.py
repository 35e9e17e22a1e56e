"""Connections between the processes of a run: who is let in, and how little a stranger can do."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mgrpo.processes import tcp_links as module
from mgrpo.processes.tcp_links import MAX_LINE_BYTES, MAX_PROOF_BYTES, MAX_STRANGERS, TcpLink, TcpLinks, reach

SECRET = "known"


class End:
    """One end, which keeps what it hears."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue = queue.SimpleQueue()
        self.links = TcpLinks(
            "test",
            on_message=lambda link, message: self.heard.put((link.number, message)),
            on_lost=lambda link: self.heard.put((link.number, None)),
            round_s=0.05,
        )

    def next(self) -> tuple:
        return self.heard.get(timeout=20)


class Door(End):
    def __init__(self, refusal=lambda number, is_known: {} if is_known else {"refused": True}) -> None:
        super().__init__()
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = listener.getsockname()
        self.links.listen(listener, secret=SECRET, refusal=refusal)
        self.links.start()

    def stranger(self) -> socket.socket:
        """Somebody who has read the welcome."""
        connection = socket.create_connection(self.address, timeout=20)
        assert "nonce" in json.loads(connection.recv(1 << 10))
        return connection

    def comes(self, number: int = 1, *, secret: str = SECRET) -> tuple[End, TcpLink]:
        """One who proves that it knows the secret, and says a word."""
        link, nonce, is_secret = reach(self.address, timeout_s=20)
        assert is_secret
        end = End()
        end.links.join(link)
        end.links.start()
        link.prove(secret, nonce, number)
        link.send({"word": number})
        return end, link


@pytest.fixture
def door() -> Iterator[Door]:
    own = Door()
    yield own
    own.links.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed it, sooner than it would close any stranger's."""
    connection.settimeout(5)
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


def test_messages_go_both_ways_and_an_end_is_noticed(door) -> None:
    guest, link = door.comes(3)
    assert door.next() == (3, {"word": 3})
    for other in list(door.links._links):
        other.send({"answer": [1, "é"]})
    assert guest.next() == (0, {"answer": [1, "é"]})
    link.send({"long": "x" * 500_000})
    assert door.next() == (3, {"long": "x" * 500_000})
    guest.links.close()
    assert door.next() == (3, None)


def test_a_wrong_secret_is_refused_with_the_answer_and_says_nothing(door) -> None:
    guest, link = door.comes(secret="guess")
    assert guest.next() == (0, {"refused": True})
    link.send({"word": 2})
    guest.links.close()
    door.comes(2)
    assert door.next() == (2, {"word": 2})


def test_a_proof_counts_for_one_connection(door) -> None:
    """One that was overheard is worth nothing: the next welcome has another nonce."""
    first, nonce, _ = reach(door.address, timeout_s=20)
    second, other, _ = reach(door.address, timeout_s=20)
    assert nonce != other
    second.prove(SECRET, nonce, 1)
    second.send({"word": 1})
    assert b"refused" in second.connection.recv(1 << 10)
    first.shut()


@pytest.mark.parametrize(
    "words",
    [
        b"[" * 200_000 + b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"hello": "guess"}\n',
        b"\xff\n",
        b"1 " + b"0" * 63 + b"\n",
        b"1 " + "é".encode() * 32 + b"\n",
        b"9" * 5_000 + b" " + b"0" * 64 + b"\n",
    ],
    ids=lambda words: repr(words[:16]),
)
def test_what_is_no_proof_ends_its_connection_only(door, words) -> None:
    """A line of brackets once ended the thread that watches the ranks, and with it the run."""
    stranger = door.stranger()
    with contextlib.suppress(ConnectionError):
        stranger.sendall(words)
    assert is_closed(stranger)
    door.comes(2)
    assert door.next() == (2, {"word": 2})


def test_no_more_is_read_of_a_stranger_than_a_proof_can_be(door) -> None:
    """Bytes without a newline would be kept until the memory is full."""
    stranger = door.stranger()
    stranger.sendall(b"x" * MAX_PROOF_BYTES)
    time.sleep(0.3)
    (link,) = door.links._links
    assert len(link.buffer) == MAX_PROOF_BYTES
    stranger.sendall(b"x")
    assert is_closed(stranger)


def test_a_stranger_has_a_limited_time_in_all_also_when_it_goes_on_sending(door, monkeypatch) -> None:
    """A time for each byte would last for ever."""
    monkeypatch.setattr(module, "GREETING_S", 0.5)
    silent, slow = door.stranger(), door.stranger()
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < began + 20:
            slow.sendall(b"1")
            time.sleep(0.05)
    assert time.monotonic() < began + 5
    assert is_closed(silent)


def test_a_right_proof_without_a_message_has_the_same_limit(door, monkeypatch) -> None:
    """Where there is no secret anybody can give one."""
    monkeypatch.setattr(module, "GREETING_S", 0.3)
    link, nonce, _ = reach(door.address, timeout_s=20)
    link.prove(SECRET, nonce, 1)
    link.connection.settimeout(20)
    assert is_closed(link.connection)


def test_a_crowd_of_strangers_keeps_nobody_out(door) -> None:
    """The oldest goes for each that comes; those that belong to the run stay."""
    guest, _ = door.comes(1)
    assert door.next() == (1, {"word": 1})
    crowd = [door.stranger() for _ in range(MAX_STRANGERS + 20)]
    assert all(is_closed(stranger) for stranger in crowd[:20])
    assert len(door.links._links) == MAX_STRANGERS + 1
    door.comes(2)
    assert door.next() == (2, {"word": 2})
    for stranger in crowd:
        stranger.close()
    guest.links.close()


@pytest.mark.parametrize("words", [b"[" * 200_000 + b"\n", b"x" * (MAX_LINE_BYTES + 1), b"[1]\n", b"\xff\n"])
def test_a_right_proof_with_garbage_behind_it_is_a_stranger_still(door, words) -> None:
    """It has said nothing, so there is nobody whose end could be told."""
    link, nonce, _ = reach(door.address, timeout_s=20)
    link.prove(SECRET, nonce, 1)
    with contextlib.suppress(ConnectionError):
        link.connection.sendall(words)
    assert is_closed(link.connection)
    door.comes(2)
    assert door.next() == (2, {"word": 2})


@pytest.mark.parametrize(
    "line", [b"[" * 200_000, b"{" + b"x" * MAX_LINE_BYTES, b"[1]", b"no JSON"], ids=lambda x: repr(x[:8])
)
def test_a_line_that_is_no_message_ends_the_connection_of_whoever_sent_it(door, line) -> None:
    """Also that of one who belongs to the run; the thread goes on."""
    _, link = door.comes(1)
    assert door.next() == (1, {"word": 1})
    link._write(line)
    assert door.next() == (1, None)
    door.comes(2)
    assert door.next() == (2, {"word": 2})


def test_an_error_about_a_message_ends_its_connection_and_an_error_of_the_thread_is_told() -> None:
    """A watch that has died in silence makes other ranks look as if they hang."""
    told: queue.SimpleQueue = queue.SimpleQueue()
    lost = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    is_broken = threading.Event()

    def on_round() -> None:
        if is_broken.is_set():
            raise RuntimeError("broken")

    links = TcpLinks(
        "test",
        on_message=lambda link, message: message["missing"],
        on_lost=lambda link: lost.set(),
        on_round=on_round,
        on_error=told.put,
        round_s=0.05,
    )
    links.listen(listener, secret=None, refusal=lambda number, is_known: {})
    links.start()
    link, nonce, is_secret = reach(listener.getsockname(), timeout_s=20)
    assert not is_secret
    link.prove(None, nonce, 1)
    link.send({"word": 1})
    assert is_closed(link.connection) and not lost.is_set()
    is_broken.set()
    assert str(told.get(timeout=20)) == "broken"
    links.close()


def test_a_welcome_is_waited_for_and_read_within_limits() -> None:
    """What answers at an address may be anything."""
    for answer in (b"x" * 1_000, b"[1]\n", b'{"nonce": 1}\n'):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=lambda a=answer, own=listener: own.accept()[0].sendall(a), daemon=True).start()
            with pytest.raises((ValueError, OSError)):
                reach(listener.getsockname(), timeout_s=5)
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError):
        reach(listener.getsockname(), timeout_s=0.2)
