"""Saving under failures: a checkpoint exists whole or not at all, and the one before it stays."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mgrpo.checkpoint.folder import LocalFolder, complete, latest
from mgrpo.checkpoint.reader import open_checkpoint
from mgrpo.checkpoint.saver import SaveError, Saver
from mgrpo.checkpoint.shard import Part
from mgrpo.models.placement.boxes import Box
from tests.unit.checkpoint.states import (
    FULL_SHAPES,
    assert_holds,
    make_holdings,
    make_values,
    part_of,
    parts_of,
    save,
)


def save_rank(root, rank, step, values, *, attempt, world_size=2, timeout_s=0.1):
    parts = parts_of(values, make_holdings(step, world_size))[rank]
    Saver(root, rank, world_size, keep_last_n=3, timeout_s=timeout_s).save(
        step, parts, {"step": step}, FULL_SHAPES, attempt
    )


def whole(values):
    """All tensors as the parts of one rank."""
    return [
        part_of(values, kind, Box(name, (0,) * value.dim(), tuple(value.shape)))
        for kind, by_name in values.items()
        for name, value in by_name.items()
    ]


class FullDisk(LocalFolder):
    """A folder on a disk with room for a few bytes more."""

    room = 400

    def child(self, name):
        return FullDisk(self.path / name)

    @contextlib.contextmanager
    def create(self, name):
        with super().create(name) as file:
            yield _Limited(file)


class _Limited:
    def __init__(self, file):
        self.file, self.room = file, FullDisk.room

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.file.write(data)


def test_a_rank_that_never_wrote_is_named(root):
    """A checkpoint without one rank's shards would be found out at the resume, after the others are deleted."""
    save(root, 1, make_values(1))
    save_rank(root, 2, 2, make_values(2), attempt="a", world_size=4)
    with pytest.raises(SaveError, match=r"no index of rank 1, 3 appeared within 0.1 s.* is .*step_1$"):
        save_rank(root, 0, 2, make_values(2), attempt="a", world_size=4)
    assert complete(root) == [1]
    assert_holds(open_checkpoint(latest(root)), make_values(1))


def test_files_without_a_manifest_are_no_checkpoint(root):
    """A run that is killed while it saves must resume from the checkpoint before."""
    save(root, 3, make_values(1))
    save_rank(root, 1, 6, make_values(2), attempt="a")
    assert latest(root).endswith("step_3")
    with pytest.raises(
        ValueError, match=r"step_6 is not a complete checkpoint, .* the newest complete one is .*step_3"
    ):
        open_checkpoint(latest(root).replace("step_3", "step_6"))


def test_what_a_killed_attempt_left_is_never_mixed_in(root):
    """Half of the shards would be of a run that no longer exists."""
    save_rank(root, 1, 6, make_values(1), attempt="killed")
    with pytest.raises(SaveError, match="no index of rank 1 appeared"):
        save_rank(root, 0, 6, make_values(2), attempt="again")
    save_rank(root, 1, 6, make_values(2), attempt="again2")
    save_rank(root, 1, 6, make_values(3), attempt="killed")  # a rank that nobody told
    save_rank(root, 0, 6, make_values(2), attempt="again2")
    assert_holds(open_checkpoint(latest(root)), make_values(2))


def test_only_what_the_manifest_names_stays_in_the_folder(tmp_path):
    """Shards of killed attempts would fill the disk, each as large as a checkpoint."""
    save_rank(tmp_path, 1, 6, make_values(1), attempt="killed", world_size=3)
    (tmp_path / "step_6" / "manifest.json.partial-1").write_text("{")
    save(tmp_path, 6, make_values(2), attempt="again", world_size=2)
    names = {path.name for path in (tmp_path / "step_6").iterdir()}
    assert names == {
        "manifest.json", "state-again.json", "shard-00000-0-again.safetensors", "shard-00001-0-again.safetensors",
    }  # fmt: skip


def test_the_same_step_stays_whole_until_its_new_files_are(root):
    """Saving a step again and failing would leave no checkpoint where there was one."""
    save(root, 6, make_values(1), attempt="first", world_size=2)
    save_rank(root, 1, 6, make_values(2), attempt="second")
    checkpoint = open_checkpoint(latest(root))
    checkpoint.verify()
    assert_holds(checkpoint, make_values(1))


def test_an_index_of_another_run_is_refused(tmp_path):
    """A token that was used twice would mix two saves."""
    save_rank(tmp_path, 1, 6, make_values(1), attempt="a", world_size=3)
    with pytest.raises(SaveError, match=r"shard-00001-a\.json is of step 6, rank 1 of 3, attempt a"):
        save_rank(tmp_path, 0, 6, make_values(1), attempt="a", world_size=2)
    (tmp_path / "step_6" / "shard-00001-a.json").write_text('{"step": 6}')
    with pytest.raises(SaveError, match="the index is malformed: KeyError"):
        save_rank(tmp_path, 0, 6, make_values(1), attempt="a", world_size=2)


@pytest.mark.parametrize("attempt", ["", "a/b", "..", "a b", "x" * 41, "\u00e9"])
def test_a_token_that_is_no_file_name_is_refused(tmp_path, attempt):
    """It becomes part of names: a slash would write elsewhere."""
    with pytest.raises(ValueError, match="must be 1 to 40 letters"):
        Saver(tmp_path, 0, 1, keep_last_n=3).save(1, [], {}, {}, attempt)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[1:], r"master embed: 0 of 78 elements are present"),
        (lambda parts: [*parts, parts[0]], r"master embed\[0:13, 0:6\] and embed\[0:13, 0:6\] overlap"),
        (
            lambda parts: [*parts, Part("m", Box("w", (0,), (1,)), torch.ones(1))],
            "rank 0 wrote m w, which is not expected",
        ),
        (
            lambda parts: [
                Part("master", Box("norm", (0,), (3,)), torch.ones(3, dtype=torch.float64)),
                Part("master", Box("norm", (3,), (4,)), torch.ones(4)),
                *(part for part in parts if (part.kind, part.box.name) != ("master", "norm")),
            ],
            "master norm was written as F32 and F64",
        ),
    ],
    ids=["hole", "double", "stranger", "types"],
)
def test_parts_that_are_not_the_whole_are_refused_when_they_are_saved(tmp_path, change, message):
    """At the resume it would be too late."""
    parts = change(whole(make_values(1)))
    with pytest.raises(SaveError, match=message):
        Saver(tmp_path, 0, 1, keep_last_n=3, file_bytes=50).save(1, parts, {}, FULL_SHAPES, "a")
    assert complete(tmp_path) == []


def test_a_full_disk_is_one_error_and_leaves_room_and_the_checkpoint_before(tmp_path):
    """A run that ends for want of space must still have what it saved last."""
    save(tmp_path, 1, make_values(1))
    saver = Saver(tmp_path, 0, 1, keep_last_n=3)
    saver.folder = FullDisk(tmp_path)
    with pytest.raises(SaveError, match=r"could not save step 2 in .*step_2: .*No space left.*is .*step_1$") as caught:
        saver.save(2, whole(make_values(2)), {}, FULL_SHAPES, "a")
    assert isinstance(caught.value.__cause__, OSError)
    assert list((tmp_path / "step_2").iterdir()) == []
    assert_holds(open_checkpoint(latest(tmp_path)), make_values(1))


def test_a_failure_behind_the_manifest_takes_no_file_from_it(tmp_path):
    """Cleaning up after an error must not clean up a checkpoint."""

    class Unlisted(LocalFolder):
        def child(self, name):
            return Unlisted(self.path / name)

        def names(self):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    saver = Saver(tmp_path, 0, 1, keep_last_n=3)
    saver.folder = Unlisted(tmp_path)
    with pytest.raises(SaveError, match="Input/output error"):
        saver.save(1, whole(make_values(1)), {}, FULL_SHAPES, "a")
    checkpoint = open_checkpoint(latest(tmp_path))
    checkpoint.verify()
    assert_holds(checkpoint, make_values(1))


def test_a_rank_that_fails_says_so_to_rank_0(tmp_path):
    """Rank 0 would wait half an hour for it, and then know only its number."""
    saver = Saver(tmp_path, 1, 2, keep_last_n=3)
    saver.folder = FullDisk(tmp_path)
    with pytest.raises(SaveError, match="No space left"):
        saver.save(2, whole(make_values(2)), {}, {}, "a")
    started = time.monotonic()
    with pytest.raises(SaveError, match=r"rank 1 failed: .*No space left"):
        Saver(tmp_path, 0, 2, keep_last_n=3, timeout_s=60).save(2, [], {}, FULL_SHAPES, "a")
    assert time.monotonic() - started < 5


def test_a_root_that_cannot_be_written_is_one_clear_error(tmp_path):
    """The folder is what the user has to change."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match=r"could not save step 1 in .*file/step_1: .*Not a directory"):
        Saver(tmp_path / "file", 0, 1, keep_last_n=3).save(1, whole(make_values(1)), {}, FULL_SHAPES, "a")


def test_an_asynchronous_save_keeps_what_the_tensors_held(root):
    """The next optimizer step changes them while the thread still writes."""
    values = make_values(1)
    state = {"steps": [1, 2]}
    saver = Saver(root, 0, 1, keep_last_n=3, asynchronous=True)
    saver.folder = held_up = HeldUp(saver.folder)
    live = whole(values)
    expected = make_values(1)
    saver.save(1, live, state, FULL_SHAPES, "a")
    for part in live:
        part.tensor.zero_()
    state["steps"].append(3)
    assert complete(root) == []
    held_up.go.set()
    saver.wait()
    assert_holds(open_checkpoint(latest(root)), expected)
    assert open_checkpoint(latest(root)).state == {"steps": [1, 2]}


class HeldUp:
    """A root whose storage answers when `go` is set."""

    def __init__(self, folder):
        self.folder, self.go = folder, threading.Event()

    def child(self, name):
        assert self.go.wait(10)
        return self.folder.child(name)

    def names(self):
        return self.folder.names()


def test_saves_follow_each_other(root):
    """Two at once would hold two copies of the state and rotate each other away."""
    saver = Saver(root, 0, 1, keep_last_n=3, asynchronous=True)
    saver.folder = held_up = HeldUp(saver.folder)
    saver.save(1, whole(make_values(1)), {}, FULL_SHAPES, "a")
    second = threading.Thread(target=saver.save, args=(2, whole(make_values(2)), {}, FULL_SHAPES, "b"), daemon=True)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    held_up.go.set()
    second.join(10)
    assert complete(root)[0] == 1
    saver.wait()
    assert complete(root) == [1, 2]


def test_ranks_save_at_the_same_time(root):
    """They meet in the file system alone, each in a thread of its own, none waiting for the slowest."""
    savers = [Saver(root, rank, 4, keep_last_n=2, asynchronous=True, timeout_s=30) for rank in range(4)]
    for step in range(6):
        parts = parts_of(make_values(step), make_holdings(step, 4))
        for rank in (step % 4, *(rank for rank in range(4) if rank != step % 4)):
            savers[rank].save(step, parts[rank], {"step": step}, FULL_SHAPES, f"a{step}")
    for saver in savers:
        saver.wait()
    assert complete(root) == [4, 5]
    for step in (4, 5):
        checkpoint = open_checkpoint(latest(root).replace("step_5", f"step_{step}"))
        checkpoint.verify()
        assert_holds(checkpoint, make_values(step))


def test_an_error_in_the_thread_surfaces_at_the_next_call(tmp_path):
    """A run would go on for days and have no checkpoint."""
    saver = Saver(tmp_path, 0, 1, keep_last_n=3, asynchronous=True)
    saver.save(1, whole(make_values(1))[1:], {}, FULL_SHAPES, "a")
    with pytest.raises(SaveError, match="master embed: 0 of 78") as caught:
        saver.save(2, whole(make_values(2)), {}, FULL_SHAPES, "b")
    assert isinstance(caught.value.__cause__, ValueError)
    saver.save(3, whole(make_values(3)), {}, FULL_SHAPES, "c")
    saver.wait()
    assert complete(tmp_path) == [3]
    saver.folder = FullDisk(tmp_path)
    saver.save(4, whole(make_values(4)), {}, FULL_SHAPES, "d")
    with pytest.raises(SaveError, match="No space left"):
        saver.wait()


def test_a_run_that_ends_waits_for_nobody(tmp_path):
    """Ctrl-C would hang until the time-out of a save whose other ranks are gone."""
    saver = Saver(tmp_path, 0, 2, keep_last_n=3, asynchronous=True, timeout_s=60)
    saver.save(1, whole(make_values(1)), {}, FULL_SHAPES, "a")
    saver.stop()
    started = time.monotonic()
    with pytest.raises(SaveError, match="the run is ending"):
        saver.wait()
    assert time.monotonic() - started < 5


def test_a_state_that_is_no_json_is_refused_at_once(tmp_path):
    """Pickles are never written; a value that JSON cannot hold is the caller's mistake, not the thread's."""
    with pytest.raises(TypeError, match="not JSON serializable"):
        Saver(tmp_path, 0, 1, keep_last_n=3, asynchronous=True).save(1, [], {"x": torch.ones(1)}, {}, "a")


VICTIM = """
import sys, torch
from mgrpo.checkpoint.saver import Saver
from mgrpo.checkpoint.shard import Part
from mgrpo.models.placement.boxes import Box
saver = Saver(sys.argv[1], 0, 1, keep_last_n=2, file_bytes=1 << 16)
for step in range(10_000):
    parts = [Part("master", Box(f"w{i}", (0,), (1 << 14,)), torch.full((1 << 14,), float(step))) for i in range(20)]
    saver.save(step, parts, {"step": step}, {"master": {f"w{i}": (1 << 14,) for i in range(20)}}, f"a{step}")
"""


def test_a_process_killed_while_it_saves_leaves_whole_checkpoints(tmp_path):
    """Machines are taken away at any moment; what is listed must be what can be loaded."""
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, str(tmp_path)], cwd=Path(__file__).parents[3])
    try:
        deadline = time.monotonic() + 60
        while not complete(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.111)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    steps = complete(tmp_path)
    assert 1 <= len(steps) <= 3  # a third one while the first is being deleted
    for step in steps:
        checkpoint = open_checkpoint(tmp_path / f"step_{step}")
        checkpoint.verify()
        assert checkpoint.state == {"step": step}
        assert (checkpoint.read("master", Box("w7", (100,), (50,))) == step).all()


def test_a_rank_writes_several_files_at_a_time(tmp_path):
    """A checksum takes longer than the storage: one file after another, a state of 22 GB takes 16 s."""
    barrier = threading.Barrier(2)

    class Meeting(LocalFolder):
        def child(self, name):
            return Meeting(self.path / name)

        @contextlib.contextmanager
        def create(self, name):
            with super().create(name) as file:
                if name.startswith(("shard-00000-0-", "shard-00000-1-")):
                    barrier.wait(20)
                yield file

    values = make_values(1)
    saver = Saver(tmp_path, 0, 1, keep_last_n=3, file_bytes=600)
    saver.folder = Meeting(tmp_path)
    saver.save(1, whole(values), {}, FULL_SHAPES, "a")
    assert_holds(open_checkpoint(latest(tmp_path)), values)
