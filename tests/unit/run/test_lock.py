"""Who may write to a folder: one run at a time, and the next one as soon as the last has ended, however it ended."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mgrpo.config import ConfigError
from mgrpo.run.inputs import lock
from mgrpo.run.inputs.lock import Owner, in_use, locked

HOLDER = """
import sys, time
from mgrpo.run.inputs.lock import locked
with locked(sys.argv[1:]):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to `tmp_path / "out"`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_run_is_refused_until_the_first_is_gone(holder, tmp_path):
    """A job that is started twice: each would rename, overwrite and delete the other's files. A kill leaves no obstacle."""
    folder = tmp_path / "out"
    assert f"process {holder.pid} on this machine, since 2" in in_use(folder)
    with pytest.raises(ConfigError, match=f"{folder} is in use by another run: process {holder.pid} .*name another"):
        locked([folder]).__enter__()
    assert (folder / lock.NAME).stat().st_mode & 0o777 == 0o666 & ~umask()
    holder.kill()
    holder.wait()
    assert in_use(folder) is None
    with pytest.raises(KeyError), locked([folder]):
        assert in_use(folder) is not None
        raise KeyError
    assert not (folder / lock.NAME).exists()
    assert in_use(tmp_path / "nothing") is None


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


def test_a_lock_of_another_machine_counts_while_it_is_touched(tmp_path, monkeypatch, capsys):
    """Nobody can ask another machine for its processes, and a pre-empted job is started again on another node."""
    path = leave(tmp_path, **ELSEWHERE)
    ended = threading.Event()

    def touch():
        while not ended.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        assert "process 11 on host node7, since 2" in in_use(tmp_path)
    finally:
        ended.set()
        thread.join()
    assert "waiting up to" in capsys.readouterr().err
    os.utime(path, times=(time.time() - 1000, time.time() - 1000))
    assert in_use(tmp_path) is None
    os.utime(path)
    monkeypatch.setattr(lock, "ABANDONED_S", 0.3)
    started = time.monotonic()
    with locked([tmp_path]):
        assert time.monotonic() - started > 0.2
        assert Owner.read(os.open(path, os.O_RDONLY)).pid == os.getpid()


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
    with locked([tmp_path]):
        pass


def test_the_owner_touches_its_lock_and_notices_that_it_lost_it(tmp_path, monkeypatch, caplog):
    """Another machine counts on the touches; a run that was suspended for an hour must not delete its successor's lock."""
    monkeypatch.setattr(lock, "TOUCH_S", 0.02)
    path = tmp_path / lock.NAME
    with locked([tmp_path]):
        os.utime(path, times=(0, 0))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
        leave(tmp_path, **ELSEWHERE)
        while "taken over" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "another run has taken over run.lock" in caplog.text
    assert path.exists()
