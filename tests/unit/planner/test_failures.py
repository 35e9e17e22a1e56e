"""What a plan says of failures, against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mgrpo.models.family import shape_of
from mgrpo.moving import load_file
from mgrpo.planner.failures import RestartTimes, StartTimes, failures, restart_phases, start_phases, state_bytes
from mgrpo.planner.hardware import GPUS, Hardware
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.plan_command import shipped_config

CONFIG = Path(__file__).parents[3] / "examples/configs/32b_16x8.yaml"


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    config = load_file(CONFIG)
    hf_config = shipped_config(str(config.model.model_name_or_path))
    assert hf_config is not None
    return plan_run(config, shape_of(hf_config), Hardware(gpu=GPUS["H100"], nodes=16), num_learners=64)


def with_settings(plan: RunPlan, **settings: object) -> RunPlan:
    config = plan.config
    return replace(plan, config=replace(config, checkpoint=replace(config.checkpoint, **settings)))


def test_a_restart_is_the_sum_of_its_phases(plan):
    """A phase that is left out would promise minutes that nobody gets; 32.76 billion weights of 12 bytes on 64 learners."""
    own = state_bytes(plan) / 64 / 1e9
    assert own == pytest.approx(32.76 * 12 / 64, rel=0.001)
    storage = restart_phases(plan, RestartTimes(engines_s=0))
    read = "the state read, engines beside it"
    # 393 GB at 50 GB/s take longer than 6.1 GB of each learner at 1 GB/s; then 5 GB/s are hashed.
    assert storage[read] == pytest.approx(64 * own / 50 + own / 5, rel=0.001)
    assert sum(storage.values()) == pytest.approx(30 + 10 + 20 + 35 + storage[read] + 15 + plan.sync_s)
    near = restart_phases(with_settings(plan, checkpoint_local_dir="/nvme"), RestartTimes(engines_s=0))
    # Two copies of 8 learners at 12 GB/s, and a learner's own over 400 Gbit/s.
    assert near[read] == pytest.approx(2 * 8 * own / 12 + own / (50 * plan.hardware.assumed.link_efficiency), rel=0.001)
    slow = restart_phases(plan, RestartTimes(engines_s=100))
    assert slow[read] == 100 and sum(slow.values()) < 225


def test_a_sentence_says_what_failures_cost(plan):
    """The one who rents 128 GPUs decides by it how often to save; eight of them need not think about it."""
    often = failures(plan)
    assert "one every 396 hours on 128 GPUs" in often and "no states" not in often
    never = failures(with_settings(plan, save_every_minutes=0, checkpoint_state_freq=-1))
    assert "no states are saved; the least is lost with one every" in never
    # Nobody has said anything: the run saves by itself.
    assert "states and the share of the time that is lost: every 1." in failures(
        with_settings(plan, save_every_minutes=None, checkpoint_state_freq=-1, checkpoint_async=False)
    )
    small = replace(plan.config, engine=replace(plan.config.engine, vllm_num_engines=1))
    assert failures(replace(plan, config=small)) != "" and "68 GPUs" in failures(replace(plan, config=small))


def test_a_start_is_read_once_and_waits_for_engines_only_beyond_the_learners(plan):
    """Read by each of the replicas, 65.5 GB of a model are as many times 1.3 s; engines that load as well, as many again."""
    layout = plan.layout
    assert (layout.tensor, layout.pipeline, layout.world_size, plan.passes.reference) == (4, 2, 64, 0)
    phases = start_phases(plan)
    whole = 32.76e9 * 2
    # 64 learners map 1 GB each, and storage gives 50 GB a second; then the eighth of a tensor rank of a stage crosses a card of 400 Gbit/s.
    link = 50e9 * plan.hardware.assumed.link_efficiency
    assert phases["weights"] == pytest.approx(max(whole / 50e9, whole / 64 / 1.5e9) + whole / 8 / link, rel=0.01)
    assert phases["engines"] == pytest.approx(45 - 15 - 10 - phases["weights"])
    assert start_phases(plan, StartTimes(engines_s=5))["engines"] == 0
    assert phases["sync"] == 15 + plan.sync_s * plan.config.engine.weight_sync_steps
    assert plan.generation is not None and 0 < phases["sample"] < plan.generation.total
    apart = replace(plan.config, adapter=replace(plan.config.adapter, use_peft=True, lora_sync="adapter"))
    loaded = start_phases(replace(plan, config=apart))["engines"] - phases["engines"]
    engines = plan.config.engine.vllm_num_engines
    assert loaded == pytest.approx(engines * whole / 50e9, rel=0.01)
