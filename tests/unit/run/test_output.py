"""The folders of a run, looked at before anything is started."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mgrpo.config.derived import with_saves
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.moving import from_values
from mgrpo.run.inputs.disk_space import output_problems, owned_folders, room_notes
from mgrpo.run.inputs.lock import locked

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"
WEIGHTS = (MODEL / "model.safetensors").stat().st_size / 4


@pytest.fixture
def shape():
    return shape_of(read_hf_config(MODEL))


def config(folder, **settings):
    """Ten steps."""
    values = {"model_dtype": "float32", "total_episodes": 640, "save_freq": -1}
    return from_values({"output_dir": str(folder), **values, **settings})


def with_free(monkeypatch, num_bytes):
    """Let every file system have this much room."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(num_bytes)))


def test_a_folder_that_cannot_be_written_is_named_by_its_setting(tmp_path, shape):
    """The user gave an output_dir and asked for no checkpoints; /proc ended in a traceback after the start."""
    assert list(output_problems(config(tmp_path / "new" / "folder"), shape)) == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder, why in (("/proc/x", "nothing can be written to /proc"), (tmp_path / "file/x", "file is a file")):
        (problem,) = output_problems(config(folder), shape)
        assert problem.startswith(f"output_dir={folder} cannot be written to: ") and why in problem
        assert problem.endswith("name another folder") and "checkpoint" not in problem
    (problem,) = output_problems(
        config(tmp_path, checkpoint_state_freq=1, checkpoint_state_dir=str(tmp_path / "file")), shape
    )
    assert problem.startswith(f"checkpoints cannot be kept in {tmp_path}/file: ")


def test_folders_in_use_are_refused(tmp_path, shape):
    """Also the folder of the states alone, which two runs with folders of their own may share by mistake."""
    settings = {"checkpoint_state_freq": 1, "checkpoint_state_dir": str(tmp_path / "states")}
    own = config(tmp_path / "a", **settings)
    assert owned_folders(own) == [str(tmp_path / "a"), str(tmp_path / "states")]
    assert owned_folders(config(tmp_path / "a")) == [str(tmp_path / "a")]
    with locked(owned_folders(own), on_lost=print):
        for other, folder in ((config(tmp_path / "a"), "a"), (config(tmp_path / "b", **settings), "states")):
            (problem,) = output_problems(other, shape)
            assert problem.startswith(f"{tmp_path / folder} is in use by another run: process ")
    assert list(output_problems(own, shape)) == []


def test_too_little_room_is_said_before_the_start(tmp_path, shape, monkeypatch):
    """A disk that is full after the last step takes the trained model with it."""
    with_free(monkeypatch, 4.5 * WEIGHTS)
    assert list(output_problems(config(tmp_path), shape)) == []
    (problem,) = output_problems(config(tmp_path / "new", checkpoint_state_freq=2), shape)
    assert problem == (
        f"{tmp_path}/new has 2.08 MB free, but 7.37 MB are needed for an exported model and a training state; make room or "
        "name another folder"
    )
    # What the run does not write does not count, and no config.json, no estimate.
    assert list(output_problems(config(tmp_path, checkpoint_state_freq=11), shape)) == []
    assert list(output_problems(config(tmp_path, checkpoint_state_freq=2), None)) == []
    with_free(monkeypatch, 3.9 * WEIGHTS)
    assert "1.84 MB are needed for an exported model" in next(output_problems(config(tmp_path), shape))
    assert list(output_problems(config(tmp_path, save_final=False), shape)) == []
    remote = {"checkpoint_state_freq": 2, "checkpoint_state_dir": "memory://states"}
    with_free(monkeypatch, 5 * WEIGHTS)
    assert list(output_problems(config(tmp_path, **remote), shape)) == []


def test_a_run_that_may_fill_the_disk_later_is_warned(tmp_path, shape, monkeypatch):
    """Exports are never deleted, and states only when there are too many."""
    with_free(monkeypatch, 20 * WEIGHTS)
    assert list(room_notes(config(tmp_path, checkpoint_state_freq=5), shape)) == [
        f"{tmp_path} has 9.23 MB free, and this run will write up to 12.9 MB there; exports are never deleted: export less "
        "often (save_freq) or keep fewer states (keep_last_n_checkpoints)"
    ]
    assert list(room_notes(config(tmp_path, checkpoint_state_freq=10), shape)) == []
    assert len(list(room_notes(config(tmp_path, save_freq=1), shape))) == 1
    with_free(monkeypatch, 29 * WEIGHTS)
    few = {"checkpoint_state_freq": 1, "keep_last_n_checkpoints": 1}
    assert list(room_notes(config(tmp_path, **few), shape)) == []
    assert len(list(room_notes(config(tmp_path, **few | {"keep_last_n_checkpoints": 2}), shape))) == 1


def test_states_that_nobody_has_asked_for_can_be_left_out(tmp_path, shape, monkeypatch):
    """A run on many GPUs saves states by itself: whoever has no room for them must learn how to go without."""
    settings = {"save_final": False, "save_freq": -1}
    own = with_saves(config(tmp_path, **settings), 1024)
    assert own.checkpoint.save_every_minutes == 31
    with_free(monkeypatch, 10)
    (problem,) = output_problems(own, shape)
    assert problem.endswith("make room or name another folder, or save no states: save_every_minutes=0")
    (problem,) = output_problems(config(tmp_path, **settings, checkpoint_state_freq=1), shape)
    assert problem.endswith("make room or name another folder")
    assert list(output_problems(with_saves(config(tmp_path, **settings, save_every_minutes=0), 1024), shape)) == []
