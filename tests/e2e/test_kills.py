"""Twenty kills at random moments, of any process of a run or of all at once: what is started again is the run that never died.

`make test-kills` runs it and prints what was killed when. MGRPO_KILLS is the number of kills. MGRPO_KILLS_SEED repeats the draws of
an earlier time; the moments themselves depend on the machine.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from mgrpo.checkpoint.folder import complete, near_root
from tests.e2e.interrupted import LIMIT_S, Job, assert_equal, origins
from tests.e2e.launching import Run, survivors

KILLS = int(os.environ.get("MGRPO_KILLS", "20"))
STEPS = 30
JOB = Job(
    flags=[
        *("--num_unique_prompts_rollout", "16", "--num_samples_per_prompt_rollout", "8"),
        *("--total_episodes", str(STEPS * 128), "--num_mini_batches", "2"),
        *("--beta", "0.05", "--ref_policy_update_freq", "2", "--alpha", "0.5"),
        *("--active_sampling", "true", "--no_resampling_pass_rate", "0.7"),
        *("--local_eval_every", "8", "--eval_pass_at_k", "2", "--save_freq", "8"),
        *("--checkpoint_state_freq", "3", "--keep_last_n_checkpoints", "2"),
        # An engine that is started again samples the rest of its step anew, from another stream.
        *("--engine_max_restarts", "0"),
    ]
)  # fmt: skip
FIRST_STEP = "\nstep "
EVERYTHING = 0.25
"""Share of the kills that hit all processes at once, as when a machine loses its power."""
AT_START = 0.2
"""Share of the kills before the first step."""
NEAR = 0.75
"""Share of the starts that have states on the ranks' disks, a newer one than storage's after every step."""
LOST = 0.5
"""Share of the kills of all processes that cost a rank's disk as well."""


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_runs_that_are_killed_at_random_moments_end_as_if_they_had_not_been(tmp_path):
    """No list of places has them all: files half written, ranks that wait for each other, engines that outlive their run."""
    seed = int(os.environ.get("MGRPO_KILLS_SEED", random.SystemRandom().randrange(10**6)))
    rng = random.Random(seed)
    print(f"\nMGRPO_KILLS_SEED={seed}", flush=True)
    begun = time.monotonic()
    reference = JOB.launch(new_folder(tmp_path))
    try:
        reference.wait_for(FIRST_STEP, LIMIT_S)
        start_s = time.monotonic() - begun
        assert reference.wait(LIMIT_S) == 0, reference.text()[-3000:]
        train_s = time.monotonic() - begun - start_s
    finally:
        reference.end()
    folder, kills = new_folder(tmp_path), 0
    while kills < KILLS:
        # Saves in the background and in the foreground are of one format; between those on storage each rank's disk has newer ones.
        is_near = rng.random() < NEAR
        flags = ["--checkpoint_async", rng.choice(["true", "false"]), *(near(folder) if is_near else [])]
        run = JOB.launch(folder, flags)
        try:
            before = run.text().count(FIRST_STEP) if run.log.exists() else 0
            moment = wait_for_moment(run, rng, before=before, start_s=start_s, train_s=train_s)
            victim = kill(run, rng) if run.process.poll() is None else ""
            status, family = run.end_of_all(LIMIT_S)
        finally:
            run.end()
        kills += bool(victim)
        left = survivors(family, 40)
        disks = sorted(folder.glob("disk?"))
        if victim.startswith("all") and disks and rng.random() < LOST:
            shutil.rmtree(lost := rng.choice(disks))
            victim += f", {lost.name}"
        saved = complete(run.output_dir / "checkpoints")
        kept = f"{saved}, near {complete(near_root(run.output_dir / 'checkpoints'))}" if is_near else saved
        print(f"{kills:2}  {victim or 'none':24}  {moment:22}  status {status:3}  states {kept}", flush=True)
        assert left == [], left
        if status == 0:
            assert_equal(run, reference)
            folder = new_folder(tmp_path)
    run = JOB.finish(folder, near(folder))
    assert_equal(run, reference)
    print(f"all ends are equal; the last run went on from the steps {origins(run)}", flush=True)


def near(folder: Path) -> list[str]:
    """A disk for each rank, with a state after every step."""
    return ["--checkpoint_local_dir", f"{folder}/disk$RANK", "--save_every_minutes", "0.0001"]


def new_folder(parent: Path) -> Path:
    folder = parent / str(len(list(parent.iterdir())))
    folder.mkdir()
    return folder


def wait_for_moment(run: Run, rng: random.Random, *, before: int, start_s: float, train_s: float) -> str:
    """Wait, unless the run ends; the moment in words.

    Args:
        before: the lines of steps in the log from earlier starts.
    """
    is_early, share = rng.random() < AT_START, rng.random()
    if is_early:
        wait(run, share * start_s)
        return f"{share * start_s:.1f} s after the start"
    deadline = time.monotonic() + LIMIT_S
    while run.text().count(FIRST_STEP) == before and run.process.poll() is None:
        assert time.monotonic() < deadline, run.text()[-3000:]
        time.sleep(0.05)
    seconds = share * 0.6 * train_s
    wait(run, seconds)
    return f"{seconds:.1f} s of training"


def wait(run: Run, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and run.process.poll() is None:
        time.sleep(0.01)


def kill(run: Run, rng: random.Random) -> str:
    """SIGKILL to one process of the run or to all; its name."""
    while True:
        try:
            family = run.family()
            if rng.random() < EVERYTHING:
                for process in family:
                    process.send_signal(signal.SIGKILL)
                return f"all {len(family)} processes"
            victim = rng.choice(family)
            name = name_of(victim)
            victim.kill()
            return name
        except psutil.NoSuchProcess:
            if run.process.poll() is not None:
                return ""


def name_of(process: psutil.Process) -> str:
    words = [Path(word).name for word in process.cmdline()]
    if "-m" in words:
        return " ".join(words[words.index("-m") + 1 :])[:24]
    return " ".join(words)[:24]
