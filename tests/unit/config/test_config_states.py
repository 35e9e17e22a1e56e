"""Training states: where they are kept, how many, and from which one a run goes on."""

from __future__ import annotations

import pytest

from mgrpo.config import ConfigError, to_yaml
from mgrpo.config.derived import state_root
from mgrpo.config.validate import problems, warnings
from mgrpo.moving import GRPOConfig, from_values, load_file


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ({}, "output/checkpoints"),
        ({"output_dir": "runs/a", "checkpoint_state_freq": 5}, "runs/a/checkpoints"),
        ({"checkpoint_state_freq": 5, "checkpoint_state_dir": "/states/a"}, "/states/a"),
        ({"checkpoint_state_freq": 5, "checkpoint_state_dir": "s3://bucket/a"}, "s3://bucket/a"),
        ({"checkpoint_state_freq": 5, "gs_checkpoint_state_dir": "gs://bucket/a"}, "gs://bucket/a"),
        ({"gs_checkpoint_state_dir": "gs://bucket/a", "checkpoint_state_dir": "b"}, "gs://bucket/a"),
        ({"gs_bucket_path": "gs://bucket/", "checkpoint_state_dir": "/states/a/"}, "gs://bucket/states/a"),
        (
            {"gs_bucket_path": "gs://bucket", "gs_checkpoint_state_dir": "gs://other/a", "checkpoint_state_dir": "b"},
            "gs://other/a",
        ),
    ],
)
def test_states_go_where_the_run_was_told(given, root):
    """A run that saves in one place and looks for its states in another would start afresh at every resume."""
    assert state_root(from_values(given)) == root


@pytest.mark.parametrize(
    ("given", "resume"),
    [
        (True, "auto"),
        ("true", "auto"),
        ("yes", "auto"),
        (False, "auto"),
        ("false", "auto"),
        (None, "auto"),
        ("", "auto"),
        ("out/checkpoints/step_5", "out/checkpoints/step_5"),
    ],
)
def test_trl_says_true_or_a_path(given, resume):
    """Many scripts contain `--resume_from_checkpoint False`, which is not a path."""
    assert from_values({"resume_from_checkpoint": given}).checkpoint.resume == resume


def test_two_words_for_resuming_must_agree():
    """One of them would be ignored, and the run might start afresh."""
    with pytest.raises(ConfigError, match="resume_from_checkpoint means resume=auto, but resume=never is given"):
        from_values({"resume": "never", "resume_from_checkpoint": True})
    assert from_values({"resume": "never", "resume_from_checkpoint": False}).checkpoint.resume == "never"


@pytest.mark.parametrize(("given", "kept"), [(2, 2), (None, -1), (0, -1), (-3, -1)])
def test_trl_keeps_all_without_a_limit(given, kept):
    """In transformers 0 and less are no limit; here 0 would be an error and none is not a number."""
    assert from_values({"save_total_limit": given}).checkpoint.keep_last_n_checkpoints == kept


def test_open_instruct_saves_every_200_steps_once_it_knows_where():
    """Its present version has that default, and saves nothing without a folder."""
    known = GRPOConfig.from_open_instruct("--checkpoint_state_dir /states")
    assert (known.checkpoint.checkpoint_state_freq, state_root(known)) == (200, "/states")
    assert any(note.startswith("checkpoint_state_freq is 200") for note in known.notes)
    assert GRPOConfig.from_open_instruct("--seed 2").checkpoint.checkpoint_state_freq == -1
    given = GRPOConfig.from_open_instruct("--checkpoint_state_dir /states --checkpoint_state_freq 7")
    assert given.checkpoint.checkpoint_state_freq == 7


@pytest.mark.parametrize("resume", ["auto", "intact", "never", "gs://bucket/run/step_3", "step_7/", "."])
def test_a_state_to_resume_from_is_judged_by_its_path(tmp_path, monkeypatch, resume):
    """A wrong path must be found before engines are started, and a right one must not be refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step_7").mkdir()
    (tmp_path / "config.json").write_text("{}")
    config = from_values({"resume": resume, "model_name_or_path": str(tmp_path), "dataset_mixer_list": ["a", "1.0"]})
    found = problems(config, world_size=1)
    assert len(found) == (resume == "."), found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"save_total_limit": 5}, "keep_last_n_checkpoints=5 has no effect without checkpoint_state_freq above 0"),
        ({"checkpoint_async": True}, "checkpoint_async=true has no effect without checkpoint_state_freq above 0"),
        (
            {"checkpoint_state_freq": 5, "checkpoint_state_dir": "a", "gs_checkpoint_state_dir": "gs://b/c"},
            "checkpoint_state_dir=a is ignored, because training states are written to gs_checkpoint_state_dir=gs://b/c",
        ),
    ],
)
def test_what_has_no_effect_is_said(given, words):
    """Its user would believe that it has an effect."""
    (found,) = warnings(from_values(given), world_size=1)
    assert found == words


def test_a_folder_of_a_bucket_is_used():
    """No warning for what was asked for and is done."""
    given = {"checkpoint_state_freq": 5, "checkpoint_state_dir": "a", "gs_bucket_path": "gs://b"}
    assert warnings(from_values(given), world_size=1) == []


def test_the_written_config_names_the_same_root(tmp_path):
    """A resume reads the config.yaml of the run."""
    config = from_values({"gs_bucket_path": "gs://b", "checkpoint_state_dir": "a", "checkpoint_state_freq": 5})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert state_root(load_file(tmp_path / "config.yaml")) == "gs://b/a"
