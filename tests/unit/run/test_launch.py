"""What a run does, and must not do, before it starts anything."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from mgrpo import cli
from mgrpo.checkpoint.folder import complete
from mgrpo.config import ConfigError
from mgrpo.config.derived import state_root
from mgrpo.moving import load_file
from mgrpo.parallel import backend
from mgrpo.run.report.result import NothingTrained, TrainResult
from mgrpo.run.start import launch
from tests.unit.checkpoint.states import make_values, save


@pytest.fixture
def config(tmp_path):
    loaded = load_file("examples/configs/quickstart.yaml")
    return dataclasses.replace(
        loaded,
        parallel=dataclasses.replace(loaded.parallel, tensor_model_parallel_size=1),
        experiment=dataclasses.replace(loaded.experiment, output_dir=str(tmp_path / "out")),
    )


def with_checkpoint(config, **settings):
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **settings))


def test_a_dry_run_keeps_away_from_the_runs_checkpoints(config, tmp_path, monkeypatch):
    """It starts anew, which turns older checkpoints away: those of the real run would never be found again."""
    started = []
    monkeypatch.setattr(launch, "check_run", lambda config, **kwargs: (config, None))
    monkeypatch.setattr(launch, "_start", lambda config, *rest: started.append(config))
    for settings in ({}, {"checkpoint_state_dir": str(tmp_path / "a")}, {"checkpoint_state_dir": "gs://bucket/run"}):
        real = with_checkpoint(config, **settings)
        launch.try_out(real)
        root = state_root(started[-1])
        assert root != state_root(real)
        assert root.startswith(started[-1].experiment.output_dir)


@pytest.mark.skipif(backend.has_cuda(), reason="torch finds this machine's GPUs")
def test_learners_do_not_train_on_the_cpu_where_engines_are_promised_gpus(monkeypatch):
    """With too old a driver torch finds no GPU and says nothing: a step would take a hundred times as long."""
    launch._check_gpus()
    monkeypatch.setattr(launch, "serving_gpus", lambda: ["0", "1"])
    with pytest.raises(
        ConfigError, match=r"has 2 GPUs for engines, but torch finds none .*: torch .*; (install the pack|.* update it)"
    ):
        launch._check_gpus()


def test_engines_do_not_run_on_the_cpu_where_learners_find_gpus(monkeypatch):
    """Without /dev/nvidia0, as in WSL, GPUs are counted by this variable alone; an engine would ask for most of a learner's GPU."""
    monkeypatch.setattr(backend, "has_cuda", lambda: True)
    monkeypatch.setattr(launch, "serving_gpus", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="set CUDA_VISIBLE_DEVICES"):
        launch._check_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    launch._check_gpus()


@pytest.mark.parametrize("has_trained", [True, False])
def test_the_end_says_where_everything_is_and_whether_anything_was_trained(
    config, tmp_path, monkeypatch, capsys, has_trained
):
    """A user who is told neither looks for the model by hand, or evaluates one that has not changed."""
    out = tmp_path / "out"
    result = TrainResult(
        output_dir=out,
        steps=4,
        before={},
        after={},
        exported=out / "hf" / "step_4",
        has_trained=has_trained,
        tracked=(f"tensorboard --logdir {out}/tensorboard",),
    )
    monkeypatch.setattr(launch, "check_run", lambda config, **kwargs: (config, None))
    monkeypatch.setattr(launch, "_start", lambda *args: result)
    monkeypatch.setattr(cli, "parse", lambda *args, **kwargs: config)
    assert cli.train_command([]) == (0 if has_trained else 1)
    told = capsys.readouterr()
    for name in ("report.html", "metrics.jsonl", "tensorboard", "rollouts", "hf/step_4"):
        assert str(out / name) in told.out
    assert f"mgrpo eval --config {out}/config.yaml --model_name_or_path {out}/hf/step_4" in told.out
    assert told.err == (
        "" if has_trained else "mgrpo: nothing was trained: none of 4 steps changed the weights; the warnings above and "
        f"{out}/report.html say why\n"
    )  # fmt: skip
    if not has_trained:
        with pytest.raises(NothingTrained):
            launch.train(config)


def test_the_best_export_is_the_model_that_is_named(tmp_path):
    """The last one is named as well, where it is another one."""
    hf = tmp_path / "hf"
    for exported, last in ((hf / "step_8", [f"last     {hf}/step_8"]), (hf / "step_4", []), (None, [])):
        result = TrainResult(
            output_dir=tmp_path, steps=8, before={}, after={}, exported=exported, best=hf / "step_4", has_trained=True
        )
        *_, model, command = [line for line in result.where(has_held_out=True) if line not in last]
        assert model == f"model    {hf}/step_4" and command.endswith(f"--model_name_or_path {hf}/step_4")
        assert set(last) <= set(result.where(has_held_out=True))


def test_a_checkpoint_that_is_not_there_is_a_problem_of_the_configuration(config, tmp_path):
    """Said with the others, before Ray, engines and torch are started; and nothing is turned away for it."""
    root = tmp_path / "out" / "checkpoints"
    save(root, 6, make_values(6))
    (root / "step_4").mkdir()
    for path, words in (
        (root / "step_4", f"^1 problem .*\n.*the newest complete one is {root}/step_6"),
        (root / "step_5", "^1 problem .*\n.*is not a folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            launch.train(with_checkpoint(config, resume=str(path)))
    assert complete(root) == [6]


@pytest.fixture
def stop():
    """A stop request that handles SIGTERM."""
    own = launch.StopRequest()
    before = signal.signal(signal.SIGTERM, own.on_signal)
    yield own
    signal.signal(signal.SIGTERM, before)


def test_a_signal_before_training_ends_the_run_at_once(stop):
    """Engines take minutes to start, and there is no state to save."""
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM and not stop.event.is_set()


def test_a_signal_in_training_lets_it_save_its_state_and_a_second_one_does_not(stop):
    """Schedulers send SIGTERM some time before SIGKILL; a user who sends it twice does not want to wait."""
    stop.is_polled = True
    signal.raise_signal(signal.SIGTERM)
    assert stop.event.is_set()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
