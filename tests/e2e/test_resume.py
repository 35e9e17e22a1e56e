"""A run that dies at any moment and is started again is the run that never died: same metrics, same weights, bit for bit.

`make test-e2e` has one death, `make test-all` the others.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import pytest

from mgrpo.checkpoint.folder import ABANDONED, complete
from tests.e2e.interrupted import LIMIT_S, Job, assert_equal, export, metrics, origins, weights
from tests.e2e.launching import survivors
from tests.unit.telemetry import wandb_file

STEPS = 8
FLAGS = [
    # Two optimizer steps a batch; the reference moves; prompts are replaced and leave for good; evaluations in between.
    *("--num_unique_prompts_rollout", "16", "--num_samples_per_prompt_rollout", "8", "--total_episodes", str(STEPS * 128)),
    *("--num_mini_batches", "2", "--beta", "0.05", "--ref_policy_update_freq", "2", "--alpha", "0.5"),
    *("--active_sampling", "true", "--no_resampling_pass_rate", "0.7"),
    *("--local_eval_every", "4", "--eval_pass_at_k", "2", "--checkpoint_state_freq", "3"),
]  # fmt: skip
JOB = Job(flags=FLAGS)
launch, finish, fail = JOB.launch, JOB.finish, JOB.fail


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = finish(tmp_path_factory.mktemp("uninterrupted"))
    # What makes this run a hard one to continue did happen.
    steps = [line for line in metrics(run) if "reward" in line]
    assert len(steps) == STEPS
    assert any(step["batch/no_resampled_prompts"] for step in steps[:5])
    assert any(step["batch/filtered_prompts"] for step in steps[:5])
    assert complete(run.output_dir / "checkpoints") == [3, 6]
    return run


@pytest.fixture
def copied(uninterrupted, tmp_path):
    """A folder in which the uninterrupted run's output lies, as if it had ended there."""
    shutil.copytree(uninterrupted.output_dir, tmp_path / "out")
    return tmp_path


@pytest.fixture(scope="module")
def continued(tmp_path_factory):
    """A run whose rank 0 was killed in the middle of a save, and which was started again; wandb recorded both, offline."""
    folder, tracked = tmp_path_factory.mktemp("continued"), ["--report_to", "wandb"]
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            environment.delenv(name)
        environment.setenv("WANDB_MODE", "offline")
        dead = fail(folder, tracked, fault="kill save, no manifest", step=6)
        assert "SIGKILL" in dead.text(), dead.text()[-3000:]
        assert complete(dead.output_dir / "checkpoints") == [3]
        return finish(folder, tracked)


def test_a_run_that_dies_in_the_middle_of_a_save_goes_on_as_if_it_had_not(uninterrupted, continued):
    """Half a checkpoint that is taken for a whole one, or a prompt that is lost or drawn twice, makes another run."""
    assert origins(continued) == [3]
    assert_equal(continued, uninterrupted)
    assert complete(continued.output_dir / "checkpoints") == [3, 6]


def test_a_tracker_has_what_the_run_reported_before_and_after_its_death(continued):
    """One run with W&B, whose steps go up in each of its folders: the killed process reported also its last step."""
    pytest.importorskip("wandb")
    paths = wandb_file.offline_runs(continued.output_dir)
    assert len({wandb_file.run(path).run_id for path in paths}) == 1
    recorded = [wandb_file.history(path) for path in paths]
    assert [[row["_step"] for row in rows] for rows in recorded] == [[*range(7)], [*range(4, STEPS + 1)]]
    rows = {row["_step"]: row for rows in recorded for row in rows}
    reported: dict[int, dict] = {}
    for line in map(json.loads, (continued.output_dir / "metrics.jsonl").read_text().splitlines()):
        # An evaluation is reported with the step that it follows.
        numbers = {name: value for name, value in line.items() if isinstance(value, (int, float))}
        reported.setdefault(numbers.pop("step"), {}).update(numbers)
    assert list(reported) == [*range(STEPS + 1)]
    for step, numbers in reported.items():
        assert numbers.items() <= rows[step].items()
    settings = wandb_file.values(wandb_file.run(paths[-1]).config.update)
    assert settings["num_mini_batches"] == 2 and settings["seed"] == 1
    assert rows[1]["samples/_type"] == "table-file"


DEATHS = [
    # Place, step, and the step from which the next run continues.
    ("generate", 2, None),
    ("generate", 5, 3),
    ("score", 5, 3),
    ("forward", 4, 3),
    ("optimizer", 5, 3),
    ("sync", 6, 3),
    ("after the evaluation", 4, 3),
    ("save, half a file", 6, 3),
    ("rotation", 6, 6),
    ("after the line", 7, 6),
    ("after the evaluation", 8, 6),
    ("export", 8, 6),
]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_run_that_dies_in_every_phase_goes_on_as_if_it_had_not(uninterrupted, tmp_path):
    """Twelve deaths of one run, each in another phase; what any of them changes the end shows."""
    flags = ["--keep_last_n_checkpoints", "1"]
    expected = []
    for place, step, origin in DEATHS:
        run = fail(tmp_path, flags, fault=f"kill {place}", step=step)
        assert "(SIGKILL)" in run.text().rpartition("sync: ")[2], (place, run.text()[-3000:])
        assert origins(run) == expected, place
        expected += [origin] if origin else []
    run = finish(tmp_path, flags)
    assert origins(run) == expected
    assert_equal(run, uninterrupted)
    assert complete(run.output_dir / "checkpoints") == [6]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_sigterm_saves_the_last_finished_step(uninterrupted, tmp_path):
    """A pre-empted job loses nothing, whatever it was doing: an evaluation, sampling, or training."""
    expected = [
        # What is under way, in which step, and the steps saved then.
        ("evaluation", 4, [3, 4]),
        ("generate", 5, [3, 4]),
        ("optimizer", 5, [3, 4, 5]),
    ]
    for place, step, saved in expected:
        run = fail(tmp_path, fault=f"stop {place}", step=step)
        assert complete(run.output_dir / "checkpoints") == saved, (place, run.text()[-3000:])
    run = finish(tmp_path)
    assert origins(run) == [4, 4, 5]
    assert_equal(run, uninterrupted)


@pytest.mark.slow
def test_a_second_sigterm_ends_the_run_at_once(tmp_path):
    """Whoever sends it twice does not want to wait for a save."""
    start = time.monotonic()
    run = fail(tmp_path, fault="stop twice save, no manifest", step=3)
    assert time.monotonic() - start < 120
    assert complete(run.output_dir / "checkpoints") == []


@pytest.mark.slow
def test_sigterm_before_the_first_step_ends_the_run_at_once(tmp_path):
    """There is nothing to save, and engines that are still starting would take their time."""
    run = launch(tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not any("raylet" in process.name() for process in run.family()):
            assert time.monotonic() < deadline, run.text()
            time.sleep(0.1)
        family = run.family()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(40) != 0
    finally:
        run.end()
    assert survivors(family, 40) == []
    assert not (run.output_dir / "checkpoints").exists()


@pytest.mark.slow
def test_gradients_that_stay_nan_end_the_run_with_the_last_good_checkpoint(tmp_path):
    """A run that goes on without learning burns GPUs until someone looks."""
    run = fail(tmp_path, fault="nan", step=4)
    good = run.output_dir / "checkpoints" / "step_3"
    assert f"the last good checkpoint is {good}, continue from it with --resume {good}" in run.text()
    assert "3 steps in a row" in run.text()
    assert [line["step"] for line in metrics(run)][-1] == 5
    assert complete(run.output_dir / "checkpoints") == [3]


def flip(data: bytes) -> bytes:
    return data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "damage"), [("is truncated", lambda data: data[:-8]), ("has changed", flip)], ids=["truncated", "flipped"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_checkpoint_is_refused_with_the_one_before_it(copied, rank, words, damage):
    """A run that goes on from weights with a flipped bit is worse than one that does not start."""
    checkpoints = copied / "out" / "checkpoints"
    (shard,) = (checkpoints / "step_6").glob(f"shard-{rank:05d}-*.safetensors")
    shard.write_bytes(damage(shard.read_bytes()))
    before = (copied / "out" / "metrics.jsonl").read_bytes()
    run = fail(copied)
    assert f"{shard.name} {words}" in run.text()
    assert f"--resume {checkpoints / 'step_3'}" in run.text()
    assert "mgrpo/run/train/trainer.py" not in run.text()  # a message, no traceback
    assert (copied / "out" / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_run_does_not_start_from_a_damaged_export(uninterrupted, tmp_path, name):
    """Its checksums are compared by the ranks as they load it, and those of small files before anything is started."""
    model = shutil.copytree(export(uninterrupted), tmp_path / "model")
    (model / name).write_bytes(flip((model / name).read_bytes()))
    run = fail(tmp_path, ["--model_name_or_path", str(model)])
    assert f"model_name_or_path={model}: {name} has changed since it was written" in run.text()
    assert "mgrpo/run" not in run.text()  # a message, no traceback
    assert ("starting Ray" in run.text()) == (name == "model.safetensors")


@pytest.mark.slow
def test_resume_from_a_path_turns_later_checkpoints_away(uninterrupted, copied):
    """The next resume would go on from the later checkpoint, of a run that has not happened."""
    checkpoints = copied / "out" / "checkpoints"
    (checkpoints / "step_4").mkdir()
    missing = fail(copied, ["--resume", str(checkpoints / "step_4")])
    assert f"the newest complete one is {checkpoints / 'step_6'}" in missing.text()
    assert complete(checkpoints) == [3, 6]
    dead = fail(copied, ["--resume", str(checkpoints / "step_3")], fault="kill generate", step=5)
    assert complete(checkpoints) == [3]
    assert (checkpoints / "step_6" / ABANDONED).exists()
    run = finish(copied)
    assert origins(run) == [3, 3]
    assert dead.output_dir == run.output_dir
    assert_equal(run, uninterrupted)
    assert complete(checkpoints) == [3, 6]


@pytest.mark.slow
def test_another_runs_checkpoint_begins_a_run_of_its_own(uninterrupted, copied):
    """The metrics of the run whose folder it was would be cut and continued by another run's."""
    own = copied / "out" / "metrics.jsonl"
    before = own.read_text()
    run = finish(copied, ["--resume", str(uninterrupted.output_dir / "checkpoints" / "step_3")])
    assert (copied / "out" / "metrics.jsonl.1").read_text() == before
    after = [line for line in metrics(uninterrupted)[1:] if line["step"] > 3]
    assert metrics(run) == after
    assert weights(run) == weights(uninterrupted)
    assert complete(copied / "out" / "checkpoints") == [6]


@pytest.mark.slow
def test_resume_never_starts_anew(uninterrupted, copied):
    """Old checkpoints in the folder would be found by the next resume, and make rotation delete the new ones."""
    dead = fail(copied, ["--resume", "never"], fault="kill generate", step=5)
    assert complete(dead.output_dir / "checkpoints") == [3]
    assert len((copied / "out" / "metrics.jsonl.1").read_text().splitlines()) == STEPS + 3
    run = finish(copied)
    assert origins(run) == [3]
    assert_equal(run, uninterrupted)


@pytest.mark.slow
def test_saves_in_the_background_are_the_same(uninterrupted, tmp_path):
    """A tensor that is written while the next step changes it belongs to no step."""
    flags = ["--checkpoint_async", "true"]
    dead = fail(tmp_path, flags, fault="kill optimizer", step=7)
    saved = complete(dead.output_dir / "checkpoints")
    assert saved[0] == 3
    run = finish(tmp_path, flags)
    assert origins(run) == saved[-1:]
    assert_equal(run, uninterrupted)
    assert complete(run.output_dir / "checkpoints") == [3, 6]


@pytest.mark.slow
def test_a_run_goes_on_from_remote_storage(uninterrupted, tmp_path):
    """Machines that are taken away take their disks along."""
    url = f"shared://{tmp_path}/bucket/run"
    flags = ["--checkpoint_state_dir", url]
    fail(tmp_path, flags, fault="kill save, half a file", step=6)
    assert complete(tmp_path / "bucket" / "run") == [3]
    run = launch(tmp_path, flags, fault="none")
    try:
        assert run.wait(LIMIT_S) == 0, run.text()[-3000:]
    finally:
        run.end()
    assert origins(run) == [3]
    assert_equal(run, uninterrupted)
    assert complete(tmp_path / "bucket" / "run") == [3, 6]
    assert not (run.output_dir / "checkpoints").exists()


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(uninterrupted, copied):
    """TP2 -> PP2: sums in another order differ in their last bits, and so, sooner or later, do the samples.

    The first step's samples are the same here, and all that is measured on them agrees to rounding; after that only that
    the run ends, still learning, can be asked for.
    """
    shutil.rmtree(copied / "out" / "checkpoints" / "step_6")
    pipeline = ["--pipeline_model_parallel_size", "2", "--num_layers_in_first_pipeline_stage", "1"]  # of three
    run = finish(copied, ["--tensor_model_parallel_size", "1", *pipeline])
    assert origins(run) == [3]
    ours, theirs = metrics(run), metrics(uninterrupted)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    first = {line["step"]: line for line in reversed(theirs)}[4]
    own = {line["step"]: line for line in reversed(ours)}[4]
    for key in ("reward", "sequence_lengths", "loss/total_avg", "optim/grad_norm", "policy/entropy_avg"):
        if key in first:
            assert own[key] == pytest.approx(first[key], rel=1e-3, abs=1e-5), key
