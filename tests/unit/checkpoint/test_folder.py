"""Which checkpoints there are, which go, and where none can be kept."""

from __future__ import annotations

import importlib.util
import os

import pytest

from mgrpo.checkpoint.folder import (
    LocalFolder,
    abandon,
    check_complete,
    check_root,
    complete,
    latest,
    lies_in,
    open_folder,
    rotate,
    split_path,
)
from mgrpo.checkpoint.reader import open_checkpoint
from tests.unit.checkpoint.states import assert_holds, make_values, save


def leave_incomplete(root, step):
    open_folder(root).child(f"step_{step}").replace("shard-00000-0-old.safetensors", b"x")


def steps_in(root):
    return sorted(int(name.removeprefix("step_")) for name in open_folder(root).names())


@pytest.mark.parametrize(("keep_last_n", "kept"), [(1, [40]), (2, [30, 40]), (3, [20, 30, 40]), (-1, [10, 20, 30, 40])])
def test_the_newest_stay(root, keep_last_n, kept):
    """Rotation by name would take step_9 for newer than step_10, and delete the wrong one."""
    for step in (9, 10, 20, 30):
        save(root, step, make_values(step), keep_last_n=-1)
    open_folder(root).child("step_9").remove("manifest.json")
    save(root, 40, make_values(40), keep_last_n=keep_last_n)
    assert complete(root) == steps_in(root) == kept
    assert_holds(open_checkpoint(latest(root)), make_values(40))


def test_incomplete_folders_go_when_a_newer_checkpoint_is_there(root):
    """Each is as large as a checkpoint; but a newer one may be the next save, already begun by other ranks."""
    leave_incomplete(root, 3)
    leave_incomplete(root, 7)
    save(root, 5, make_values(5), keep_last_n=-1)
    assert steps_in(root) == [5, 7]


def test_the_last_checkpoint_is_never_deleted(root):
    """Whatever is asked for."""
    save(root, 5, make_values(5))
    save(root, 6, make_values(6))
    rotate(open_folder(root), keep_last_n=0)
    assert complete(root) == [6]


def test_what_cannot_be_deleted_does_not_end_the_run(tmp_path, caplog):
    """A file that another process holds open on a network disk; the checkpoint is saved."""

    class Stubborn(LocalFolder):
        def child(self, name):
            return Stubborn(self.path / name)

        def remove_all(self):
            raise OSError("Device or resource busy")

    for step in (1, 2, 3):
        save(tmp_path, step, make_values(step))
    rotate(Stubborn(tmp_path), keep_last_n=1)
    assert complete(tmp_path) == [3]
    assert "step_1 cannot be deleted: Device or resource busy" in caplog.text
    rotate(LocalFolder(tmp_path), keep_last_n=1)
    assert steps_in(tmp_path) == [3]


def test_other_names_are_no_checkpoints(tmp_path):
    """People keep notes and copies beside checkpoints."""
    save(tmp_path, 4, make_values(4))
    for name in ("step_5.old", "step_05", "step_", "step_-1", "mystep_6", "step_7"):
        (tmp_path / name).mkdir()
        if name != "step_7":
            (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "step_8").write_text("a file")
    assert complete(tmp_path) == [4]
    save(tmp_path, 9, make_values(9), keep_last_n=1)
    assert {"step_5.old", "step_05", "step_", "step_-1", "mystep_6", "step_9"} <= set(os.listdir(tmp_path))


def test_a_root_that_does_not_exist_has_no_checkpoints(root):
    """`--resume auto` of a first run."""
    assert (complete(root), latest(root)) == ([], None)


def test_a_run_that_turns_back_does_not_find_its_old_future(root):
    """Resumed from step 10, killed at 15: the next resume must not jump to step 30 of the run that was given up."""
    for step in (10, 20, 30):
        save(root, step, make_values(step))
    assert abandon(root, after=10) == [20, 30]
    assert complete(root) == [10]
    save(root, 12, make_values(12), keep_last_n=1)
    assert complete(root) == [12]
    save(root, 20, make_values(5))
    assert_holds(open_checkpoint(latest(root)), make_values(5))
    assert abandon(root, after=20) == []


def test_a_missing_driver_is_named_with_its_package():
    """Found after the first hundred steps, when the first checkpoint is due, it would end the run."""
    for protocol, package in (("gs", "gcsfs"), ("s3", "s3fs")):
        if importlib.util.find_spec(package) is None:
            with pytest.raises(
                ValueError, match=f"{protocol}://bucket/run needs the Python package {package}: pip install"
            ):
                check_root(f"{protocol}://bucket/run")


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("nothing://bucket/run", "nothing://bucket/run cannot be used as a folder"),
        ("gs://", "gs:// does not name a folder"),
    ],
)
def test_a_url_that_is_none_is_refused(root, message):
    """Before anything starts."""
    with pytest.raises(ValueError, match=message):
        check_root(root)


def test_a_root_is_looked_at_before_anything_starts(tmp_path):
    """A folder that is a file costs the time until the first save."""
    check_root(tmp_path / "new" / "folder")
    check_root(f"memory://{tmp_path}")
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="is a file; name another folder"):
            check_root(root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_root_without_permission_is_refused(tmp_path):
    """The same, for a folder of somebody else's."""
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match=r"nothing can be written to .* \(Permission denied\)"):
        check_root(tmp_path / "checkpoints")


def test_a_checkpoint_is_known_as_the_runs_own_however_it_is_written(tmp_path, monkeypatch):
    """Another run's is begun anew from; one taken for it would cost the run its metrics and later checkpoints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for path in (
        "run/step_3",
        "./run/step_3/",
        f"{tmp_path}/run/step_3",
        "link/step_3",
        f"file://{tmp_path}/run/step_3",
    ):
        assert lies_in(path, "run"), path
        assert lies_in(path, tmp_path / "run"), path
    for path in ("run2/step_3", "step_3", "run/run/step_3", "memory://run/step_3"):
        assert not lies_in(path, "run"), path
    assert lies_in("memory://a/run/step_3", "memory://a/run/")
    assert not lies_in("memory://a/run2/step_3", "memory://a/run")


def test_an_incomplete_checkpoint_is_refused_before_anything_starts(root):
    """A misspelt path that is noticed after the engines have started costs minutes."""
    save(root, 4, make_values(4))
    leave_incomplete(root, 7)
    check_complete(*split_path(f"{root}/step_4"))
    with pytest.raises(ValueError, match=r"step_7 is not a complete checkpoint.*the newest complete one is .*step_4"):
        check_complete(*split_path(f"{root}/step_7"))
