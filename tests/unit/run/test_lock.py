"""Who may write to a folder: one run at a time, and the next one as soon as the last has ended, however it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mgrpo.config import ConfigError
from mgrpo.run.inputs import lock
from mgrpo.run.inputs.lock import Owner, in_use, locked

HOLDER = """
import sys, time
from mgrpo.run.inputs.lock import locked
with locked(sys.argv[1:], on_lost=print):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen]:
    """Another process that writes to `folder`."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to `tmp_path / "out"`."""
    with holding(tmp_path / "out") as process:
        yield process


def test_a_second_run_is_refused_until_the_first_is_gone(holder, tmp_path):
    """A job that is started twice: each would rename, overwrite and delete the other's files. A kill leaves no obstacle."""
    folder = tmp_path / "out"
    assert f"process {holder.pid} on this machine, since 2" in in_use(folder)
    with pytest.raises(ConfigError, match=f"{folder} is in use by another run: process {holder.pid} .*name another"):
        locked([folder], on_lost=unexpected).__enter__()
    assert (folder / lock.NAME).stat().st_mode & 0o777 == 0o666 & ~umask()
    holder.kill()
    holder.wait()
    assert in_use(folder) is None
    with pytest.raises(KeyError), locked([folder], on_lost=unexpected):
        assert in_use(folder) is not None
        raise KeyError
    assert not (folder / lock.NAME).exists()
    assert in_use(tmp_path / "nothing") is None


def unexpected(reason: str) -> None:
    raise AssertionError(reason)


def umask() -> int:
    own = os.umask(0)
    os.umask(own)
    return own


def leave(folder: Path, **changes) -> Path:
    """A lock whose owner is gone."""
    folder.mkdir(exist_ok=True)
    path = folder / lock.NAME
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    dataclasses.replace(Owner.this(), **changes).write(handle)
    os.close(handle)
    return path


ELSEWHERE = {"host": "node7", "kernel": "another boot", "pid": 11}


@pytest.fixture
def touched(tmp_path):
    """A lock of another machine's run, whose times are set again and again by `clock()`."""
    path, ended = leave(tmp_path, **ELSEWHERE), threading.Event()

    @contextlib.contextmanager
    def touching(clock=time.time):
        def touch():
            while not ended.wait(0.05):
                os.utime(path, times=(clock(), clock()))

        thread = threading.Thread(target=touch)
        os.utime(path, times=(clock(), clock()))
        thread.start()
        try:
            yield path
        finally:
            ended.set()
            thread.join()

    return touching


def test_a_lock_of_another_machine_counts_while_it_is_touched(touched, tmp_path, monkeypatch, capsys):
    """Nobody can ask another machine for its processes, and a pre-empted job is started again on another node."""
    with touched() as path:
        assert "process 11 on host node7, since 2" in in_use(tmp_path)
    assert "waiting up to 120 s" in capsys.readouterr().err
    monkeypatch.setattr(lock, "TOUCH_S", 0.1)
    os.utime(path, times=(time.time() - 1000, time.time() - 1000))
    assert in_use(tmp_path) is None
    os.utime(path)
    monkeypatch.setattr(lock, "ABANDONED_S", 0.3)
    started = time.monotonic()
    with locked([tmp_path], on_lost=unexpected):
        assert time.monotonic() - started > 0.2
        assert Owner.read(os.open(path, os.O_RDONLY)).pid == os.getpid()


@pytest.mark.parametrize("jump_s", [-3600, 3600, 10 * 365 * 86400])
def test_a_clock_that_was_set_makes_no_live_owner_a_dead_one_and_no_dead_one_live(
    touched, tmp_path, monkeypatch, capsys, jump_s
):
    """The last touch is an hour old, or an hour ahead, and the owner lives or not."""
    with touched(lambda: time.time() - jump_s):
        assert "process 11 on host node7" in in_use(tmp_path)
    monkeypatch.setattr(lock, "TOUCH_S", 0.1)
    monkeypatch.setattr(lock, "ABANDONED_S", 0.3)
    capsys.readouterr()
    assert in_use(tmp_path) is None
    assert "waiting up to 0 s" in capsys.readouterr().err


def test_without_flock_a_number_that_was_given_again_is_no_owner(tmp_path, monkeypatch):
    """Process 4242 of last week is not the one of today; and file systems that know no flock exist."""

    def unsupported(*args):
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    started = lock._started(os.getppid())
    leave(tmp_path, pid=os.getppid(), started=started)
    assert f"process {os.getppid()} on this machine" in in_use(tmp_path)
    leave(tmp_path, pid=os.getppid(), started="17")
    assert in_use(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 3}', "\0" * 2000])
def test_a_damaged_lock_stops_nobody(tmp_path, text):
    """A crash of the machine leaves an empty file."""
    (tmp_path / lock.NAME).write_text(text)
    with locked([tmp_path], on_lost=unexpected):
        pass


def test_the_owner_touches_its_lock(tmp_path, monkeypatch):
    """Another machine counts on the touches."""
    monkeypatch.setattr(lock, "TOUCH_S", 0.02)
    path = tmp_path / lock.NAME
    with locked([tmp_path], on_lost=unexpected):
        os.utime(path, times=(0, 0))
        assert within(10, lambda: path.stat().st_mtime > 0)


def within(seconds: float, holds: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(holds())


@pytest.mark.parametrize("what", ["lock", "folder", "parent", "renamed"])
def test_a_lock_that_was_deleted_is_taken_again(tmp_path, monkeypatch, what):
    """The run goes on in a new folder, where a second one must be refused as before."""
    monkeypatch.setattr(lock, "TOUCH_S", 0.02)
    folder = tmp_path / "parent" / "out"
    with locked([folder], on_lost=unexpected):
        if what == "lock":
            (folder / lock.NAME).unlink()
        elif what == "renamed":
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder if what == "folder" else folder.parent)
        assert within(10, lambda: in_use(folder))
        assert f"process {os.getpid()} on this machine" in in_use(folder)
    assert not (folder / lock.NAME).exists()


@pytest.mark.parametrize("how", ["renamed", "suspended"])
def test_a_run_whose_folder_another_one_has_taken_is_told_and_leaves_its_lock(tmp_path, monkeypatch, how):
    """Both would write the same files: a folder was renamed for the next run, or a run slept for an hour on another machine."""
    lost: list[str] = []
    monkeypatch.setattr(lock, "TOUCH_S", 0.02)
    (tmp_path / "old").mkdir()
    folder = tmp_path / "out"
    folder.symlink_to("old")
    with contextlib.ExitStack() as others, locked([folder], on_lost=lost.append):
        if how == "renamed":
            process = others.enter_context(holding(tmp_path / "new"))
            (tmp_path / "link").symlink_to("new")
            (tmp_path / "link").replace(folder)  # at once, so that neither run finds no folder
            owner = f"process {process.pid} on this machine"
        else:
            leave(folder, **ELSEWHERE)
            owner = "process 11 on host node7"
        assert within(10, lambda: lost)
        (reason,) = lost
        assert (
            reason.startswith("this run has lost its folder, ")
            and f"{folder} is in use by another run: {owner}" in reason
        )
    assert (folder / lock.NAME).exists()
