"""Folders of prepared data: whole, current, or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgrpo.data.cache import Cache, default_root

KEY = {"content": "abc", "taken": [1, 2]}


def build(cache: Cache, text: str = "content", key: dict = KEY) -> Path:
    def write(folder: Path) -> None:
        (folder / "a.txt").write_text(text)
        (folder / "b.txt").write_text("more")

    return cache.make("rows", key, write)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_is_kept_is_found_by_its_key_and_no_other(tmp_path: Path) -> None:
    """A folder that is found under a wrong key is another data set."""
    cache = Cache(tmp_path)
    assert cache.find("rows", KEY) is None
    folder = build(cache)
    assert Cache(tmp_path).find("rows", json.loads(json.dumps(KEY))) == folder
    assert (folder / "a.txt").read_text() == "content"
    assert cache.find("rows", {**KEY, "taken": [1, 3]}) is None
    assert cache.find("prompts", KEY) is None
    assert names(tmp_path) == [folder.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "a.txt").write_text("contenT"),
        lambda folder: (folder / "a.txt").write_text("conten"),
        lambda folder: (folder / "a.txt").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text('{"files": '),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").write_text('{"made_of": "something else", "files": {}}'),
        lambda folder: os.truncate(folder / "b.txt", 0),
    ],
)
def test_a_damaged_folder_is_not_found_and_is_replaced(tmp_path: Path, caplog, damage) -> None:
    """A disk that was full, a machine that lost power, a byte that flipped: none may change the data silently."""
    cache = Cache(tmp_path)
    folder = build(cache)
    damage(folder)
    assert cache.find("rows", KEY) is None
    assert "damaged" in caplog.text and str(folder) in caplog.text
    assert build(cache) == folder
    assert cache.find("rows", KEY) == folder and (folder / "a.txt").read_text() == "content"
    assert names(tmp_path) == [folder.name]


def test_of_two_that_build_the_same_the_first_is_kept(tmp_path: Path) -> None:
    """Two runs that start at once share one folder, and neither's is pulled away under the other."""
    first, second = Cache(tmp_path), Cache(tmp_path)
    inodes = []

    def write_while_another_does(folder: Path) -> None:
        (folder / "a.txt").write_text("x")
        inodes.append((build(second, "x") / "a.txt").stat().st_ino)

    kept = first.make("rows", KEY, write_while_another_does)
    assert [(kept / "a.txt").stat().st_ino] == inodes and names(tmp_path) == [kept.name]


def test_nothing_remains_of_what_could_not_be_written(tmp_path: Path) -> None:
    """A full disk would be fuller after every attempt."""

    def write(folder: Path) -> None:
        (folder / "a.txt").write_text("x")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        Cache(tmp_path).make("rows", KEY, write)
    assert names(tmp_path) == []


BUILDER = """
import sys
from pathlib import Path
from mgrpo.data.cache import Cache
for number in range(40):
    cache, key = Cache(sys.argv[1]), {"number": number}
    folder = cache.find("rows", key)
    if folder is None:
        def write(new):
            for part in range(5):
                (new / str(part)).write_text(f"{number} {part}" * 1000)
        folder = cache.make("rows", key, write)
    assert all((folder / str(part)).read_text() == f"{number} {part}" * 1000 for part in range(5))
"""


def test_processes_that_build_at_once_all_find_whole_folders(tmp_path: Path) -> None:
    """A sweep of runs starts them together, on the same data."""
    processes = [subprocess.Popen([sys.executable, "-c", BUILDER, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(names(tmp_path)) == 40


def test_skipping_finds_and_keeps_nothing(tmp_path: Path) -> None:
    """`dataset_skip_cache` is for users who do not trust the cache, or have no room for it."""
    folder = build(Cache(tmp_path))
    skipping = Cache(tmp_path, skip=True)
    assert skipping.find("rows", KEY) is None
    other = build(skipping, "other")
    assert other != folder and (other / "a.txt").read_text() == "other"
    del skipping
    assert names(tmp_path) == [folder.name]


def test_without_permission_to_write_the_run_goes_on(tmp_path: Path, caplog) -> None:
    """A run must be able to train from a read-only home."""
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    folder = build(cache)
    assert (folder / "a.txt").read_text() == "content"
    assert "cannot be kept" in caplog.text and "set dataset_local_cache_dir" in caplog.text
    del cache
    assert not folder.exists()


def test_what_killed_runs_left_is_deleted_when_it_is_old(tmp_path: Path) -> None:
    """Half-built gigabytes would pile up; a build that is under way must stay."""
    old, new = tmp_path / "unfinished-1", tmp_path / "unfinished-2"
    old.mkdir()
    new.mkdir()
    os.utime(old, (time.time() - 3 * 24 * 3600,) * 2)
    build(Cache(tmp_path))
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("skip", [False, True])
def test_what_looks_old_and_is_in_use_stays(tmp_path: Path, skip: bool) -> None:
    """A clock that is set in the meantime makes any folder old, and so does a run of a week that keeps nothing."""
    past, cache, building = (time.time() - 3 * 24 * 3600,) * 2, Cache(tmp_path, skip=skip), []

    def write(folder: Path) -> None:
        building.append(folder if not skip else folder.parent)
        (folder / "a.txt").write_text("content")
        os.utime(building[0], past)
        build(Cache(tmp_path), key={"content": "of another run"})

    built = cache.make("rows", KEY, write)
    os.utime(building[0] if skip else built, past)
    build(Cache(tmp_path), key={"content": "of a third"})
    assert (built / "a.txt").read_text() == "content"
    del cache
    assert names(tmp_path) == sorted(name for name in names(tmp_path) if name.startswith("rows-"))


def test_a_folder_may_be_read_by_others(tmp_path: Path) -> None:
    """One cache for a team."""
    umask = os.umask(0o022)
    try:
        assert build(Cache(tmp_path)).stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(umask)


def test_the_folder_is_in_the_users_cache(monkeypatch, tmp_path: Path) -> None:
    """Where every other program keeps what can be made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "mgrpo" / "datasets"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "mgrpo" / "datasets"
