"""A run that is killed and has lost a node's disk is started again and is the run that never died, bit for bit."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import signal
import time

import psutil
import pytest

from mgrpo.checkpoint.folder import complete, near_root
from tests.e2e.interrupted import LIMIT_S, Job, assert_equal, origins
from tests.e2e.launching import survivors

JOB = Job(
    flags=[
        *("--num_unique_prompts_rollout", "16", "--num_samples_per_prompt_rollout", "8", "--total_episodes", str(8 * 128)),
        *("--beta", "0.05", "--ref_policy_update_freq", "2", "--alpha", "0.5", "--local_eval_every", "4", "--warm_up_steps", "1"),
    ]
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_that_has_lost_a_node_goes_on_from_the_other(tmp_path):
    """Killed twice in or near a save, each time with all its processes, and each time another disk is lost."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    reference, rng = JOB.finish(tmp_path / "whole"), random.Random(7)
    disk = f"{tmp_path}/disk"
    flags = [
        # Each rank has a disk of its own, and every step ends with a state there.
        *("--checkpoint_local_dir", f"{disk}$RANK", "--save_every_minutes", "0.0001", "--checkpoint_async", "true"),
        *("--checkpoint_state_freq", "100"),
    ]  # fmt: skip
    for lost in (0, 1):
        run = JOB.launch(tmp_path / "killed", flags)
        try:
            run.wait_for(f"state of step {2 + 3 * lost}: ", LIMIT_S)
            time.sleep(rng.random())
            family = run.family()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        finally:
            run.end()
        assert survivors(family, 40) == []
        root = run.output_dir / "checkpoints"
        assert complete(root) == [] and len(complete(near_root(root))) in (1, 2)
        shutil.rmtree(f"{disk}{lost}")
    run = JOB.finish(tmp_path / "killed", flags)
    assert_equal(run, reference)
    first, second = origins(run)
    assert 1 <= first <= 5 and 4 <= second <= 8 and first < second, run.text()[-3000:]
    assert re.search(r"continues from \S*/near/step_", run.text())
    # What has ended leaves nothing on the nodes.
    assert not any(path.is_dir() for path in (tmp_path / "disk0").iterdir()) and not (root / "near").exists()
