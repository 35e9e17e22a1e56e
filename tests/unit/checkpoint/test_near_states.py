"""States on disks of two nodes: each may be lost, neither may be mixed up, and nothing that was half copied is used."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from mgrpo.checkpoint.folder import (
    LocalFolder,
    abandon,
    complete,
    is_near,
    latest,
    lies_in,
    near_root,
    open_folder,
    resumable,
    step_folder,
)
from mgrpo.checkpoint.reader import StoredCheckpoint
from mgrpo.checkpoint.saver import SaveError, Saver
from mgrpo.checkpoint.saving.copy_server import CopyServer, fetch, put
from mgrpo.checkpoint.saving.near_folder import TENSORS, NearFolder, node_name, partner, sound_files
from mgrpo.checkpoint.stored import Stored
from tests.unit.checkpoint.states import FULL_SHAPES, assert_holds, make_holdings, make_values, parts_of

SECRET = "of this run"


class Node:
    """One rank's node: its disk, its server and its saver."""

    def __init__(self, root: Path, rank: int) -> None:
        self.rank, self.root = rank, root
        self.disk = LocalFolder(root.parent / f"disk{rank}")
        self.server = CopyServer(self.disk.path, "127.0.0.1", SECRET)

    def join(self, other: Node) -> None:
        def send(folder: LocalFolder, name: str) -> None:
            put(other.server.address, SECRET, folder.path / name)

        self.folder = NearFolder(open_folder(near_root(self.root)), self.disk, send=send)
        self.saver = Saver(self.root, self.rank, 2, keep_last_n=3, near=self.folder, timeout_s=5, file_bytes=600)

    def sound(self, step: int) -> list[str]:
        files = Stored(self.folder.shared, step).manifest.files
        return sound_files(
            self.disk.child(step_folder(step)), {name: files[name] for name in files if name.endswith(TENSORS)}
        )


@contextmanager
def two_nodes(root: Path):
    nodes = [Node(root, rank) for rank in range(2)]
    for node, other in zip(nodes, nodes[::-1], strict=True):
        node.join(other)
    try:
        yield nodes
    finally:
        for node in nodes:
            node.server.close()


def save(nodes: list[Node], step: int, values, *, near_only: bool = True) -> None:
    parts = parts_of(values, make_holdings(step, 2))
    for node in nodes[::-1]:
        node.saver.save(step, parts[node.rank], {"step": step}, FULL_SHAPES, f"a{step}", near_only=near_only)


def read(node: Node, others: list[Node], step: int) -> StoredCheckpoint:
    """The state as `node` reads it, with what is left on its own disk and those of `others`."""
    held = {name: other.server.address for other in (*others, node) for name in other.sound(step)}
    files = Stored(node.folder.shared, step).manifest.files
    sizes = {name: files[name].num_bytes for name in held}
    own = lambda folder, name, place: fetch(held[name], SECRET, folder, name, place)  # noqa: E731
    folder = NearFolder(node.folder.shared, node.disk, fetch=own, sizes=sizes)
    return StoredCheckpoint(folder, step, cache=node.disk.path / "fetched-0")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_lost_takes_nothing_with_it(tmp_path, lost):
    """A new machine has an empty disk: all tensors come from the node that is left, those of the lost rank as well."""
    with two_nodes(tmp_path / "states") as nodes:
        save(nodes, 4, make_values(4))
        shutil.rmtree(nodes[lost].disk.path)
        assert nodes[lost].sound(4) == []
        for node in nodes:
            checkpoint = read(node, nodes, 4)
            assert_holds(checkpoint, make_values(4))
            assert checkpoint.state == {"step": 4}
        # The node that is left has read its own disk, and copied nothing.
        assert not (nodes[1 - lost].disk.path / "fetched-0").exists()
        assert any((nodes[lost].disk.path / "fetched-0").iterdir())
        # The next save removes the copies.
        save(nodes, 5, make_values(5))
        assert not (nodes[lost].disk.path / "fetched-0").exists()


def test_a_file_that_has_changed_is_replaced_by_the_other_nodes_copy(tmp_path):
    """A disk that is about to die gives bits that were never written."""
    with two_nodes(tmp_path / "states") as nodes:
        save(nodes, 4, make_values(4))
        broken = next((nodes[0].disk.path / "step_4").glob("*.safetensors"))
        data = broken.read_bytes()
        broken.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert broken.name not in nodes[0].sound(4) and not broken.exists()
        assert_holds(read(nodes[0], nodes, 4), make_values(4))


def test_the_newest_near_state_alone_is_kept_and_storage_has_what_is_sent_there(tmp_path):
    """Disks of nodes are small; and whoever loses several nodes goes on from storage."""
    root = tmp_path / "states"
    with two_nodes(root) as nodes:
        save(nodes, 1, make_values(1))
        save(nodes, 2, make_values(2), near_only=False)
        assert complete(root) == [2]
        assert_holds(StoredCheckpoint(open_folder(root), 2), make_values(2))
        for step in (3, 4):
            save(nodes, step, make_values(step))
        assert complete(near_root(root)) == [4] and latest(root).endswith("states/step_2")
        assert resumable(root) == [f"{root}/near/step_4", f"{root}/step_2"]
        assert [is_near(path) and lies_in(path, root) for path in resumable(root)] == [True, False]
        save(nodes, 5, make_values(5))
        # Rank 0 deletes when a state is complete, the others when they begin the next one.
        assert [sorted(node.disk.names()) for node in nodes] == [["step_5"], ["step_4", "step_5"]]
        assert abandon(root, after=3) == [5] and resumable(root) == [f"{root}/step_2"]


def test_of_equal_steps_the_near_one_comes_first(tmp_path):
    """It is read from the node's own disk, in seconds."""
    with two_nodes(tmp_path / "states") as nodes:
        save(nodes, 6, make_values(6), near_only=False)
        assert resumable(nodes[0].root) == [f"{nodes[0].root}/near/step_6", f"{nodes[0].root}/step_6"]


def test_a_partner_that_has_gone_fails_the_save_and_leaves_the_state_before(tmp_path):
    """A state with one copy would be taken for one with two."""
    with two_nodes(tmp_path / "states") as nodes:
        save(nodes, 1, make_values(1))
        nodes[1].server.close()
        parts = parts_of(make_values(2), make_holdings(2, 2))
        with pytest.raises(SaveError, match=r"rank 0 could not save step 2 in .*near/step_2"):
            nodes[0].saver.save(2, parts[0], {}, FULL_SHAPES, "a2", near_only=True)
        assert complete(near_root(nodes[0].root)) == [1]
        assert_holds(read(nodes[0], nodes[:1], 1), make_values(1))


def test_strangers_get_and_leave_nothing(tmp_path):
    """The weights of a model lie there, and names of files come from the network."""
    disk = tmp_path / "disk"
    (disk / "step_1").mkdir(parents=True)
    (disk / "step_1" / "a.safetensors").write_bytes(b"weights")
    (disk / "secret.txt").write_bytes(b"secret")
    mine = tmp_path / "step_1" / "b.safetensors"
    mine.parent.mkdir()
    mine.write_bytes(b"other")
    server = CopyServer(disk, "127.0.0.1", SECRET)
    try:
        assert fetch(server.address, SECRET, "step_1", "a.safetensors", tmp_path / "here").read_bytes() == b"weights"
        put(server.address, SECRET, mine)
        assert (disk / "step_1" / "b.safetensors").read_bytes() == b"other"
        with pytest.raises(OSError):
            fetch(server.address, "guessed", "step_1", "a.safetensors", tmp_path / "there")
        for folder, name in (
            ("step_1", "../secret.txt"),
            ("..", "disk/secret.txt"),
            (".", "secret.txt"),
            ("step_1", "/etc/passwd"),
        ):
            with pytest.raises(OSError):
                fetch(server.address, SECRET, folder, name, tmp_path / "there")
        assert not any((tmp_path / "there").iterdir())
        with pytest.raises(FileNotFoundError, match="has no step_1/c"):
            fetch(server.address, SECRET, "step_1", "c", tmp_path / "there")
    finally:
        server.close()
    assert sorted(path.name for path in (disk / "step_1").iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("nodes", "partners"),
    [
        ("a", [None]),
        ("aaaa", [None] * 4),
        ("aabb", [2, 3, 0, 1]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("abab", [1, 2, 3, 0]),
        # Nodes with different numbers of ranks.
        ("aaab", [3, 3, 3, 0]),
    ],
)
def test_copies_go_to_another_node(nodes, partners):
    """A copy on the same node dies with the original."""
    found = [partner(rank, list(nodes)) for rank in range(len(nodes))]
    if nodes == "abab":
        assert all(nodes[to] != nodes[rank] for rank, to in enumerate(found)) and sorted(found) == [0, 1, 2, 3]
    else:
        assert found == partners


def test_processes_that_see_one_folder_find_one_name(tmp_path):
    """Their hosts' names say nothing: containers of one machine have several, and a shared file system none."""
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(node_name(tmp_path / "a"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 16 and len({*names}) == 1 and names[0] != node_name(tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["node"]


VICTIM = """
import sys, threading
from pathlib import Path
from tests.unit.checkpoint.states import make_values
from tests.unit.checkpoint.test_near_states import save, two_nodes
with two_nodes(Path(sys.argv[1])) as nodes:
    for node in nodes:
        node.saver.asynchronous = True
    for step in range(1, 10_000):
        save(nodes, step, make_values(step), near_only=step % 3 > 0)
"""


def test_processes_killed_at_any_moment_leave_whole_near_states(tmp_path):
    """Four times: what is listed first can be read with either disk alone, and it is the state of its step."""
    root = tmp_path / "states"
    for moment in range(4):
        shutil.rmtree(tmp_path, ignore_errors=True)
        victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(root)], cwd=Path(__file__).parents[3])
        try:
            deadline = time.monotonic() + 60
            while not (root.exists() and complete(root) and complete(near_root(root))) and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.037 * moment)
        finally:
            victim.send_signal(signal.SIGKILL)
            victim.wait()
        newest = resumable(root)[0]
        step = int(newest.rpartition("_")[2])
        assert step >= complete(root)[-1]
        with two_nodes(root) as nodes:
            if is_near(newest):
                lost = moment % 2
                shutil.rmtree(nodes[lost].disk.path)
                checkpoint = read(nodes[moment // 2 % 2], nodes, step)
            else:
                checkpoint = StoredCheckpoint(open_folder(root), step)
            assert_holds(checkpoint, make_values(step))
            assert checkpoint.state == {"step": step}
