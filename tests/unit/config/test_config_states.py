"""Training states: where they are kept, how many, and from which one a run goes on."""

from __future__ import annotations

import pytest

from mgrpo.config import ConfigError, to_yaml
from mgrpo.config.checkpoint import best_interval_s, lost_share, mtbf_s
from mgrpo.config.derived import seconds_between_saves, state_root, with_saves
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
        ({"gs_checkpoint_state_dir": "gs://bucket/a/", "checkpoint_state_dir": "b"}, "gs://bucket/a/"),
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
        (
            {"save_total_limit": 5},
            "keep_last_n_checkpoints=5 has no effect without checkpoint_state_freq or save_every_minutes above 0",
        ),
        (
            {"checkpoint_async": True},
            "checkpoint_async=true has no effect without checkpoint_state_freq or save_every_minutes above 0",
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


@pytest.mark.parametrize(
    ("num_gpus", "settings", "minutes"),
    [
        (8, {}, None),
        (63, {}, None),
        (64, {}, 126),
        (1024, {}, 31),
        (4096, {}, 16),
        (1024, {"save_every_minutes": 0}, 0),
        (1024, {"save_every_minutes": 5}, 5),
        (1024, {"checkpoint_state_freq": 25}, None),
        (1024, {"checkpoint_state_freq": -1}, None),
        (1024, {"use_precision_aware_optimizer": True}, None),
    ],
)
def test_runs_on_many_gpus_save_by_time_unless_somebody_has_said_otherwise(num_gpus, settings, minutes):
    """A failure would take days of 1,024 GPUs from who does not know the setting, and disks would fill on a laptop."""
    config = with_saves(from_values(settings), num_gpus)
    assert config.checkpoint.save_every_minutes == minutes
    assert config.checkpoint.saves_states == (bool(minutes) or settings.get("checkpoint_state_freq", -1) > 0)
    assert any("save_every_minutes is" in note for note in config.notes) == (minutes not in (None, *settings.values()))


def test_failures_are_those_of_the_source_and_the_interval_is_the_best():
    """Another unit or a lost factor of two would be a plausible number."""
    assert mtbf_s(16384) / 3600 == pytest.approx(54 * 24 / 419)
    assert mtbf_s(1024) / 3600 == pytest.approx(49.5, abs=0.05)

    def lost(seconds: float) -> float:
        return lost_share(seconds, save_s=10, restart_s=180, mtbf_s=mtbf_s(1024))

    best = best_interval_s(10, mtbf_s(1024))
    assert lost(best) < min(lost(best * 0.9), lost(best * 1.1))
    # By hand: every hour 10 s, and every 178,200 s half an hour and three minutes.
    assert lost(3600) == pytest.approx(10 / 3600 + 1980 / 178_200, rel=1e-3)


def test_an_interval_ends_with_a_step():
    """A plan of steps of 20 minutes that counted 15 between states would promise too much."""
    config = from_values({"save_every_minutes": 15})
    assert seconds_between_saves(config, 1200, 8) == 1200
    assert seconds_between_saves(config, 400, 8) == 1200
    assert seconds_between_saves(from_values({"checkpoint_state_freq": 25}), 400, 8) == 10_000
    assert seconds_between_saves(from_values({"checkpoint_state_freq": 2, "save_every_minutes": 15}), 400, 8) == 800
    assert seconds_between_saves(from_values({}), 400, 8) == 0
