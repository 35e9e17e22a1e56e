"""A run whose engine has several copies of attention: sampled, trained, synced, killed and resumed like any other."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.e2e.interrupted import LIMIT_S, Job, assert_equal, metrics, origins
from tests.e2e.launching import ROOT, survivors
from tests.e2e.test_asynchronous import prompts
from tests.e2e.test_families import END, ENGINE_DIFFERENCE, FLAGS, REWARD, STEPS, TOKENS
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.slow
LONG = 20
COPIES = ("--vllm_enable_expert_parallel", "true", "--vllm_data_parallel_size", "2")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    model = save_tiny(folder, "qwen3_moe", vocab_size=TOKENS, eos_token_id=END)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples/quickstart/model" / name, model / name)
    (folder / "rewards.py").write_text(REWARD)
    named = ["--model_name_or_path", str(model), "--reward_funcs", f"{folder / 'rewards.py'}:of_ids"]
    return Job(flags=[*FLAGS, *COPIES, *named])


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    return job.finish(tmp_path_factory.mktemp("whole"))


def test_all_copies_are_the_trainers_model_after_every_step(whole):
    """Every digest is compared as well, and the trainer uses the experts that each copy says it has chosen."""
    steps = [line for line in metrics(whole) if "reward" in line]
    assert len(steps) == STEPS
    for line in steps:
        assert line["debug/vllm_vs_local_logprob_diff_max"] < ENGINE_DIFFERENCE, line["step"]
        assert "policy/routing_differs" in line, line["step"]
    assert len({line["reward"] for line in steps}) > 1


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(job, whole, tmp_path):
    """Which copy samples a group, and in which batch, must not depend on the time at which requests arrive."""
    job.fail(tmp_path, fault="kill forward", step=4)
    resumed = job.finish(tmp_path)
    assert origins(resumed) == [2]
    assert_equal(resumed, whole)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["kill", "suspend"])
def test_an_engine_that_loses_a_copy_is_replaced_while_the_run_goes_on(job, tmp_path, how):
    """The copies that are left wait in the exchange with its experts: they go with it, and their groups come again."""
    flags = ["--total_episodes", str(LONG * 16), "--checkpoint_state_freq", "-1", "--save_traces", "true"]
    flags += ["--engine_heartbeat_timeout", "20"]
    run = job.launch(tmp_path, flags)
    try:
        run.wait_for(f"\nstep  2/{LONG} ", LIMIT_S)
        cores = [process for process in run.family() if "EngineCore_DP" in " ".join(process.cmdline())]
        assert len(cores) == 2
        getattr(cores[1], how)()
        run.wait_for("mgrpo: engine 0 is dead and is started again: ", 60)
        assert survivors([*cores], 40) == []
        family = run.family()
        assert run.wait(2 * LIMIT_S) == 0, run.text()[-3000:]
    finally:
        run.end()
    assert survivors(family, 40) == []
    joined = re.search(r"engine 0 has joined and serves the weights of version (\d+)", run.text())
    assert joined and 2 <= int(joined[1]) < LONG - 2, run.text()[-3000:]
    # Digests of every tensor are compared at each sync, and every token's log-probability with the trainer's.
    steps = [line for line in metrics(run) if "reward" in line]
    assert [line["step"] for line in steps] == [*range(1, LONG + 1)]
    assert all(line["debug/vllm_vs_local_logprob_diff_max"] < ENGINE_DIFFERENCE for line in steps)
    counted = prompts(run)
    assert set(counted.values()) == {1} and len(counted) == 4 * LONG
