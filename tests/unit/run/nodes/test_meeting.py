"""How the nodes meet: who has not come, who may not come, and what must be equal on all."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mgrpo.config import ConfigError
from mgrpo.run.nodes import meeting as module
from mgrpo.run.nodes.meeting import Guest, Meeting, MeetingError, differences
from mgrpo.run.nodes.place import Place
from tests.ports import free_port


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def door(port) -> Iterator[Meeting]:
    """Node 0 of three."""
    opened = Meeting(place(0, port), told("zero"), secret=None)
    yield opened
    opened.close()


def place(rank: int, port: int) -> Place:
    return Place(rank=rank, nodes=3, head="127.0.0.1", port=port)


def told(host: str, **same: object) -> dict:
    return {"host": host, "address": "", "same": same}


def come(rank: int, port: int, *, secret: str | None = None, timeout_s: float = 20) -> Guest:
    return Guest(place(rank, port), lambda address: told(f"host{rank}"), secret=secret, timeout_s=timeout_s)


def test_nodes_may_come_before_node_0(port):
    """A scheduler starts them in any order."""
    guests = []
    threads = [threading.Thread(target=lambda rank=rank: guests.append(come(rank, port))) for rank in (2, 1)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    door = Meeting(place(0, port), told("zero"), secret=None)
    door.wait(20)
    for thread in threads:
        thread.join()
    assert {rank: about["host"] for rank, about in door.about.items()} == {0: "zero", 1: "host1", 2: "host2"}
    door.say({"word": 1})
    assert [guest.events.get(timeout=20) for guest in guests] == [(0, {"word": 1})] * 2
    guests[0].say({"answer": 2})
    assert door.events.get(timeout=20)[1] == {"answer": 2}
    for guest in guests:
        guest.close()
    door.close()


def test_those_that_have_not_come_are_named(door, port):
    guest = come(1, port)
    with pytest.raises(MeetingError, match=r"node 2 of 3 has not come to 127.0.0.1:\d+ within --timeout 0.5 s"):
        door.wait(0.5)
    guest.close()


def test_a_node_that_leaves_before_all_have_come_is_named(door, port):
    """Otherwise the others wait for the rest of the time."""
    come(2, port).close()
    with pytest.raises(MeetingError, match=r"node 2 \(host2\) has gone"):
        door.wait(20)


def test_a_node_0_that_does_not_answer_is_named(port):
    with pytest.raises(MeetingError, match=rf"node 0 has not answered at --head 127.0.0.1:{port}"):
        come(1, port, timeout_s=0.1)


def test_two_with_one_number_are_refused(door, port):
    """As when a script starts two programs on a node; one of them would train with nobody."""
    first, second = come(1, port), come(1, port)
    assert "has come twice" in second.events.get(timeout=20)[1]["problems"][0]
    with pytest.raises(MeetingError, match=r"node 1 has come twice, from node 1 \(host1\) and from host1"):
        door.wait(20)
    first.close()


def test_a_number_that_no_node_has_is_refused(door, port):
    assert "node 3 is refused: there are 3 nodes" in come(3, port).events.get(timeout=20)[1]["problems"][0]


def test_both_ends_notice_when_the_other_has_gone(door, port):
    """The end of a launcher closes its connection, however it ended."""
    one, two = come(1, port), come(2, port)
    door.wait(20)
    one.close()
    assert door.events.get(timeout=20) == (1, None)
    door.close()
    assert two.events.get(timeout=20) == (0, None)


def test_with_a_token_only_those_who_know_it_take_part(port):
    """The token itself is not sent."""
    door = Meeting(place(0, port), told("zero"), secret="known")
    assert "RAY_AUTH_TOKEN differs" in come(1, port, secret="other").events.get(timeout=20)[1]["problems"][0]
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN is set on node 0 and missing here"):
        come(1, port)
    guests = [come(rank, port, secret="known") for rank in (1, 2)]
    door.wait(20)
    for guest in guests:
        guest.close()
    door.close()


def test_a_thread_that_fails_is_told_by_its_own_node(door, port):
    """Else the others would be named, as nodes that have gone or not come."""
    guest = come(1, port)
    assert door.events.get(timeout=20)[0] == 1
    guest._links.on_round = lambda: 1 / 0
    assert (
        "this node's connection with node 0 has failed: ZeroDivision" in guest.events.get(timeout=20)[1]["problems"][0]
    )
    door._links.on_round = lambda: 1 / 0
    with pytest.raises(
        MeetingError, match=r"node 0 .*: its connections with the other nodes have failed: ZeroDivision"
    ):
        door.wait(20)
    guest.close()


def test_something_else_that_knocks_disturbs_nobody(door, port):
    """Scanners do, and web browsers."""
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"rank": 1}\n', b"\xff\n", b"[" * 200_000):
        with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(words)  # what is too long ends the connection before all of it is sent
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
    guests = [come(1, port), come(2, port)]
    door.wait(20)
    for guest in guests:
        guest.close()


def test_an_address_of_another_machine_and_a_taken_port_are_refused(monkeypatch, door, port):
    with pytest.raises(ConfigError, match="expected the name or an address of node 0's own machine"):
        Meeting(Place(rank=0, nodes=2, head="192.0.2.1", port=port), told("zero"), secret=None)
    with pytest.raises(ConfigError, match="the port is taken: choose another"):
        Meeting(place(0, port), told("zero"), secret=None)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    with pytest.raises(ConfigError, match=r"--head=no-such-node\.invalid"):
        Meeting(Place(rank=0, nodes=2, head="no-such-node.invalid"), told("zero"), secret=None)


def test_what_differs_is_named_with_its_node():
    """Ray refuses other versions with a traceback, and other packages compute something else."""
    about = {0: told("a", ray="2.60", torch="2.9"), 1: told("b", ray="2.60", torch="2.9"), 2: told("c", ray="2.59", torch="2.9")}  # fmt: skip
    assert differences(about) == ["ray differs: 2.60 on node 0, 2.59 on node 2 (c); expected the same on all nodes"]
