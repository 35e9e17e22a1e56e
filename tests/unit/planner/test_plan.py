"""The whole plan: the shipped configurations, other trainers' published step times, and suggested layouts."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mgrpo.config.derived import layout_of
from mgrpo.config.validate import problems, warnings
from mgrpo.layout import Layout
from mgrpo.models.adapters import adapter_tensors
from mgrpo.models.family import shape_of
from mgrpo.models.memory import holdings, num_parameters, state_bytes
from mgrpo.moving import from_values, load_file
from mgrpo.planner.engines.public_steps import public_step
from mgrpo.planner.hardware import GIB, GPUS, Assumptions, Hardware
from mgrpo.planner.learners.timing import learner_time
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.plan_command import plan_command, shipped_config
from mgrpo.planner.suggest import _axes, _ends, other_splits, suggest
from mgrpo.planner.work import forward_flops, passes_of
from tests.unit.planner.figures.steps import CONFIGS, large
from tests.unit.planner.test_activations import GPT_175B
from tests.unit.planner.test_work import BATCH

SHIPPED = {"7b_8gpu": 1, "32b_16x8": 16, "32b_4x8": 4, "30b_a3b_4x8": 4, "235b_a22b_32x8": 32}
"""Nodes of 8 GPUs."""
WEIGHTS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
"""Weights that the safetensors files of these models hold, as the Hub shows them; files of others have layers that are not built."""


def test_shipped_sizes_are_those_of_the_published_models() -> None:
    """One wrong size changes every figure of a plan, and no model is there to compare it with."""
    found = {name: num_parameters(shape_of(shipped_config(name)), Layout(world_size=1), stage=0) for name in WEIGHTS}
    assert found == WEIGHTS


def shipped_plan(name: str, **changes: Any) -> tuple[RunPlan, dict[str, Any]]:
    """A shipped configuration on the cluster in its name."""
    config = load_file(CONFIGS / f"{name}.yaml", world_size=1)
    hf_config = shipped_config(config.model.model_name_or_path)
    hardware = Hardware(gpu=GPUS["H100"], nodes=SHIPPED[name])
    if changes:
        config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **changes))
    learners = sum(config.parallel.num_learners_per_node)
    return plan_run(config, shape_of(hf_config), hardware, num_learners=learners), hf_config


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_configuration_is_legal_and_fits(name: str) -> None:
    """The tests have no such GPUs to find out otherwise; every GPU is used and a tenth of each stays free."""
    plan, hf_config = shipped_plan(name)
    learners = plan.split.learners
    assert problems(plan.config, world_size=learners, hf_config=hf_config) == []
    assert warnings(plan.config, world_size=learners, hf_config=hf_config) == []
    assert plan.fits and plan.split.idle == 0
    assert plan.worst.total < 0.9 * 80 * GIB
    assert plan.engine.longest_sequences >= 32


def published(values: dict[str, Any], hf: dict[str, Any], response_share: float) -> RunPlan:
    """NeMo RL's GRPO runs on H100: 64 prompts x 32 samples of at most 4096 tokens, logprobs of policy and reference."""
    config = from_values(
        {
            "num_unique_prompts_rollout": 64,
            "num_samples_per_prompt_rollout": 32,
            "max_prompt_token_length": 256,
            "response_length": 3840,
            "pack_length": 4096,
            "beta": 0.01,
            "vllm_gpu_memory_utilization": 0.8,
            "total_episodes": 2048,
            **values,
        }
    )
    hardware = Hardware(gpu=GPUS["H100"], nodes=8, assumed=Assumptions(response_share=response_share))
    learners = values["num_learners_per_node"]
    return plan_run(config, shape_of(hf), hardware, num_learners=sum(learners))


def test_a_step_has_its_share_of_a_weight_sync() -> None:
    """A cluster with a slow network would be refused a plan that avoids most of its syncs."""
    values, hf = {"num_learners_per_node": [8], "vllm_num_engines": 8, "beta": 0.0}, shipped_config("qwen3-30b-a3b")
    each, fourth = (published({**values, "weight_sync_steps": steps}, hf, 0.8) for steps in (1, 4))
    assert fourth.sync_s == each.sync_s / 4 > 0


def test_training_times_are_near_megatrons_own() -> None:
    """GPT-3 175B on 64 A100, 1F1B with 3 chunks, sequence parallelism: 13.75 s per step (arXiv:2205.05198, table 5)."""
    config = from_values(
        {
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": 8,
            "virtual_pipeline_model_parallel_size": 3,
            "pack_length": 2048,
            "beta": 0.0,
        }
    )
    layout = layout_of(config, 64)
    hardware = Hardware(gpu=GPUS["A100-80"], nodes=8, assumed=Assumptions(pack_fill=1.0))
    states = state_bytes(GPT_175B, layout, stage=0, dtype_bytes=2)
    time = learner_time(
        config, GPT_175B, layout, BATCH, passes_of(config), states, hardware, logits_chunk=0, dtype_bytes=2
    )
    assert time.num_micro_batches == 64
    assert time.total == pytest.approx(13.75, rel=0.25)
    busy = sum(seconds for cause, seconds in time.training.items() if cause not in ("bubble", "optimizer"))
    assert time.training["bubble"] == pytest.approx(busy * 7 / (64 * 3))
    assert 3 * forward_flops(GPT_175B, BATCH).total / 64 / 13.75 == pytest.approx(0.514 * 312e12, rel=0.03)


def test_peak_is_what_is_there_at_once() -> None:
    """The loss, the layers' backward passes and a weight sync follow one another; the rest is there throughout."""
    plan, _ = shipped_plan("32b_16x8")
    for stage in plan.stages:
        held = stage.activations.kept + stage.activations.buffers
        passes = held + max(stage.activations.loss, stage.activations.layer)
        assert stage.peak == stage.states.total + passes
        assert stage.total == stage.states.total + max(int(1.1 * passes), stage.sync) + 4 * GIB
    assert plan.stages[0].loss == 0 < plan.stages[1].loss
    # Two buckets of 256 MiB for each of 64 workers, from 64 learners.
    assert plan.worst.sync == 2 * 256 * 2**20


def test_whole_gradients_are_those_of_two_layers_and_the_head() -> None:
    """ZeRO-2 and 3 scatter a layer's gradients while the next layer's arise; a layer that is done keeps no activations."""
    plan, _ = shipped_plan("7b_8gpu", zero_stage=3, recompute_granularity="full")
    held = holdings(plan.shape, tensor=2, expert=1)
    layer, outside = held.layers[0].total, held.embedding + held.head + held.norm
    stage = plan.worst
    assert stage.states.unsharded == 2 * (2 * layer + outside)
    assert stage.loss == stage.activations.loss + 4 * (held.head + held.norm)
    whole = stage.layer - stage.activations.layer
    assert whole == 4 * (2 * layer + held.head + held.norm) - stage.activations.kept_layer
    one = shipped_plan("7b_8gpu", zero_stage=1)[0].worst
    assert one.states.unsharded == 0 and (one.loss, one.layer) == (one.activations.loss, one.activations.layer)


def test_offload_and_small_moments_shrink_the_optimizer() -> None:
    """Settings that the plan does not pass on would make a run look too large for its GPUs.

    Megatron keeps the fp32 masters of what the host updates on the GPU: 8 of 12 bytes a weight leave it. The host has
    16: a master, two moments and a gradient.
    """
    plan = shipped_plan("7b_8gpu")[0]
    optimizer = plan.worst.states.optimizer
    offloaded = shipped_plan("7b_8gpu", optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)[0]
    half = offloaded.worst.states
    assert half.optimizer == pytest.approx(optimizer * (4 + 4) / 12)
    assert half.host == pytest.approx(optimizer / 12 * 16 / 2)
    whole = shipped_plan("7b_8gpu", optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)[0].worst.states
    assert whole.optimizer == pytest.approx(optimizer * 4 / 12)
    # A thread of the host updates 1e8 weights in a second, and two thirds of the GPU's bytes still lie there.
    seconds = [found.learners.training["optimizer"] for found in (plan, offloaded)]
    weights = half.host / 16
    assert seconds[1] == pytest.approx(weights / 1e8, rel=0.1) and seconds[0] < 0.02 * seconds[1]
    moments = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
    small = shipped_plan("7b_8gpu", **moments)[0].worst.states
    assert small.optimizer == pytest.approx(optimizer * 8 / 12)


def test_phases_and_causes_add_up_to_the_step() -> None:
    """A cause without a phase, or counted twice, would name the wrong bottleneck."""
    plan, _ = shipped_plan("7b_8gpu")
    assert plan.step_s == pytest.approx(sum(plan.causes.values())) == pytest.approx(sum(plan.phases.values()))
    phase, cause = plan.bottleneck
    assert plan.phases[phase] == max(plan.phases.values())
    assert plan.causes[phase, cause] == max(s for (name, _), s in plan.causes.items() if name == phase)


def test_each_shortage_is_reported() -> None:
    """One sentence per shortage: learners, engines, GPUs."""
    plan, _ = shipped_plan("7b_8gpu", tensor_model_parallel_size=1, recompute_granularity="none")
    (sentence,) = plan.shortages()
    assert sentence.startswith("learners: ") and not plan.fits
    small = dataclasses.replace(plan.hardware, gpu=GPUS["L40S"], nodes=1, gpus_per_node=4)
    settings = dataclasses.replace(plan.config.engine, vllm_gpu_memory_utilization=0.4)
    config = dataclasses.replace(plan.config, engine=settings)
    starts = [s.split(":")[0] for s in plan_run(config, plan.shape, small, num_learners=4).shortages()]
    assert starts[0].startswith("num_learners_per_node") and starts[1:] == ["learners", "vllm_tensor_parallel_size=1"]


def test_suggested_layouts_fit_are_legal_and_ordered() -> None:
    """A suggestion that the run would refuse, or that is slower than the current layout, is worse than none."""
    plan, hf_config = shipped_plan("7b_8gpu")
    found = suggest(plan, count=4, hf_config=hf_config)
    assert len(found) == 4
    for suggestion in found:
        assert suggestion.plan.fits
        assert problems(suggestion.plan.config, world_size=4, hf_config=hf_config) == []
        assert suggestion.why.startswith("compute")
    seconds = [suggestion.plan.step_s for suggestion in found]
    assert all(later >= 0.98 * earlier for earlier, later in itertools.pairwise(seconds))
    assert seconds[0] <= 1.02 * plan.step_s
    assert suggest(plan, count=0, hf_config=hf_config) == []
    axes = {(s.plan.layout.tensor, s.plan.layout.pipeline, s.plan.layout.context, s.plan.layout.expert) for s in found}
    assert len(axes) == 4


def test_a_cluster_that_is_too_small_gets_layouts_of_its_own_size() -> None:
    """Layouts of 64 learners are of no use on 8 GPUs."""
    plan, hf_config = shipped_plan("32b_16x8")
    small = dataclasses.replace(plan.hardware, nodes=3)
    config = plan.config
    too_large = plan_run(config, plan.shape, small, num_learners=64)
    assert too_large.split.idle < 0
    found = suggest(too_large, count=2, hf_config=hf_config)
    assert found
    for suggestion in [*found, *other_splits(too_large, found, hf_config=hf_config)]:
        own = suggestion.plan
        assert own.fits and own.split.idle >= 0 and own.split.learners + own.split.engines <= 24
        assert problems(own.config, world_size=own.split.learners, hf_config=hf_config, has_dataset=True) == []
    (sentence,) = plan_run(
        config, plan.shape, dataclasses.replace(small, nodes=1, gpus_per_node=1), num_learners=64
    ).shortages()
    assert sentence.startswith("one GPU: ") and "at least 2" in sentence


def test_a_better_division_between_learners_and_engines_is_found() -> None:
    """The number of engines is the largest lever on the time of a step: one engine for seven learners is slow."""
    plan, hf_config = shipped_plan("7b_8gpu")
    settings = dataclasses.replace(plan.config.engine, vllm_num_engines=1)
    parallel = dataclasses.replace(plan.config.parallel, num_learners_per_node=(), tensor_model_parallel_size=1)
    config = dataclasses.replace(plan.config, engine=settings, parallel=parallel)
    alone = plan_run(config, plan.shape, plan.hardware, num_learners=7)
    best, *others = other_splits(alone, suggest(alone, count=3, hf_config=hf_config), hf_config=hf_config)
    assert best.plan.split.engines > 1 and best.plan.fits and best.plan.step_s < 0.8 * alone.step_s
    assert all(best.plan.step_s <= 1.02 * other.plan.step_s for other in others)


LORA = {"use_peft": True, "lora_r": 32, "learning_rate": 1e-5}


def test_adapters_take_the_place_of_states_and_reference() -> None:
    """16 bytes an adapter in place of 16 a weight, two forward passes' work in place of three, and their merging."""
    full, _ = shipped_plan("7b_8gpu")
    lora = plan_run(
        dataclasses.replace(full.config, adapter=from_values(LORA).adapter),
        full.shape,
        full.hardware,
        num_learners=4,
    )
    weights = full.worst.states.parameters
    assert full.worst.states.reference == weights and lora.worst.states.reference == 0
    assert weights < lora.worst.states.parameters < 1.05 * weights
    assert lora.worst.states.total < 1.1 * weights < full.worst.states.total / 4
    assert lora.worst.activations == full.worst.activations
    assert lora.worst.passes == lora.worst.activations.kept + lora.worst.activations.buffers + max(
        lora.worst.loss, lora.worst.layer + lora.worst.merged
    )
    assert lora.learners.training["compute"] == pytest.approx(full.learners.training["compute"] * 2 / 3)
    assert lora.learners.traffic.data < 0.02 * full.learners.traffic.data
    assert 0 < lora.learners.training["adapters"] < 0.1 * lora.learners.training["compute"]
    assert "adapters" not in full.learners.training and "adapters" not in lora.learners.logprobs
    assert lora.sync_s == full.sync_s
    apart = plan_run(
        dataclasses.replace(full.config, adapter=from_values(LORA | {"lora_sync": "adapter"}).adapter),
        full.shape,
        full.hardware,
        num_learners=4,
    )
    tensors = adapter_tensors(full.shape, apart.config.adapter.lora)
    copies = apart.config.engine.vllm_tensor_parallel_size  # of what is the same on all workers
    sizes = 2 * sum(map(math.prod, tensors.values()))
    assert sizes <= apart.sync_bytes <= copies * sizes and apart.sync_s < full.sync_s / 5
    assert apart.worst.merged == 0 and "adapters" not in apart.learners.training
    assert 0 < apart.engine.weights - lora.engine.weights < 0.02 * lora.engine.weights
    assert lora.worst.start < full.worst.start


def test_layouts_of_adapters_are_those_that_a_run_accepts() -> None:
    """ZeRO 2 and 3 are refused with adapters."""
    full, hf_config = shipped_plan("7b_8gpu")
    config = dataclasses.replace(full.config, adapter=from_values(LORA).adapter)
    plan = plan_run(config, full.shape, full.hardware, num_learners=4)
    found = suggest(plan, count=5, hf_config=hf_config)
    assert found and {suggestion.plan.layout.zero_stage for suggestion in found} == {1}


def test_the_memory_in_docs_lora_is_what_its_commands_print(capsys, monkeypatch) -> None:
    """With adapters, and the same commands without them."""
    monkeypatch.chdir(CONFIGS.parents[1])
    text = Path("docs/lora.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    table = {row[0].split(",")[0]: row[1:] for row in rows if len(row) == 5}
    commands = [shlex.split(line) for line in text.replace("\\\n", "").splitlines() if line.startswith("mgrpo plan")]
    assert len(commands) == 2
    for column, flags in enumerate(commands):
        assert flags[flags.index("--use_peft") :] == ["--use_peft", "--lora_r", "32", "--learning_rate", "1e-5"]
        for place, own in enumerate((flags, flags[: flags.index("--use_peft")])):
            assert plan_command([*own[2:], "--suggest", "0"]) == 0
            printed = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
            found = {cells[1].split(" (")[0]: cells[2] for cells in reversed(printed) if len(cells) > 3}
            for name in ("parameters", "gradients", "optimizer", "peak"):
                assert found[name] == table[name][2 * column + place], (own, name)
            assert found.get("reference model", "0") == table["reference model"][2 * column + place].split(" ")[0]


def test_the_length_of_a_run_in_passes_does_not_change_the_plan_of_its_steps(capsys: pytest.CaptureFixture) -> None:
    """A script of TRL gives passes, and its data need not be here: neither a step nor its memory depends on them.

    Only the sum of all steps is not said, which those data decide.
    """
    own = ["--model_name_or_path", "Qwen/Qwen2.5-7B-Instruct", "--num_learners_per_node", "8", "--suggest", "0"]
    printed = []
    for length in (["--num_train_epochs", "2", "--warm_up_steps", "500"], ["--total_episodes", "800000"]):
        assert plan_command([*own, *length]) in (0, 1)
        printed.append(capsys.readouterr().out)
    step, sums, rest = re.split(r"^(whole run: (?:.*\n)+?)(?=operations)", printed[1], flags=re.MULTILINE)
    assert printed[0] == step + rest and "learner" in step and "exports" in sums


def test_what_has_no_effect_is_said_beside_the_plan(capsys: pytest.CaptureFixture) -> None:
    """Else a user would take the plan for that of what he asked for."""
    words = [
        "--model_name_or_path",
        "qwen2.5-7b",
        "--dataset_mixer_list",
        "sums",
        "1.0",
        "--learning_rate",
        "1e-6",
        "--suggest",
        "0",
    ]
    plan_command(words)
    before = capsys.readouterr()
    assert before.err == ""
    plan_command([*words, "--routing_replay", "rollout"])
    after = capsys.readouterr()
    assert after.out == before.out
    assert after.err == "mgrpo: routing_replay=rollout has no effect on a model without experts\n"


def test_stages_that_do_not_divide_the_layers_are_suggested_with_shorter_ends() -> None:
    """94 layers have no divisor but 2 and 47: without ends of their own a model of 235B has no pipeline of 4 or 8 stages."""
    plan, hf_config = shipped_plan("235b_a22b_32x8")
    assert (
        _ends(94, 8, 1) == _ends(94, 8, 4) == (11, 11)
        and _ends(126, 16, 8) == (7, 7)
        and _ends(96, 8, 4) == (None, None)
    )
    assert _ends(61, 8, 4) == (7, 6) and _ends(94, 63, 1) == (None, None)
    learners = plan.split.learners
    layouts = [
        layout_of(dataclasses.replace(plan.config, parallel=parallel), learners)
        for parallel in _axes(plan.config, plan.shape, plan.hardware, learners, (hf_config,))
    ]
    assert {4, 8} <= {layout.pipeline for layout in layouts}
    assert all(sum(layout.stage_sizes(94)) == 94 for layout in layouts)


def test_a_plan_is_shown_beside_the_best_published_step_of_its_size() -> None:
    """Who rents 256 GPUs wants to know what others reach on them: tokens a second and GPU, because answers differ in length."""
    plan, _ = shipped_plan("235b_a22b_32x8")
    public = plan.public
    assert public is not None and (public.model, public.gpus, public.seconds) == ("Qwen3-235B-A22B", 256, 203)
    assert public.tokens_s_gpu == pytest.approx(512 * 5707 / 203 / 256)
    assert plan.tokens_s_gpu == pytest.approx(2048 * (512 + 3584) / plan.pace_s / 256)
    dense = shipped_plan("32b_16x8")[0].public
    assert dense is not None and (dense.model, dense.gpus) == ("Qwen3-32B", 64)
    # A dense model is not compared with a mixture of its size, nor an H100 with another GPU.
    assert public_step(weights=235, has_experts=False, gpu="H100") is None
    assert public_step(weights=32, has_experts=False, gpu="H200") is None


def test_experts_over_copies_of_the_attention_are_proposed_for_a_large_mixture() -> None:
    """Qwen3-235B at answers of 16k tokens: engines of 8 tensor ranks hold 16 sequences each, and read 55 GiB for them at every step."""
    plan = large("Qwen3-235B-A22B, 256 H100")
    hf_config = shipped_config("qwen3-235b-a22b")
    best, *_ = other_splits(plan, [], hf_config=hf_config)
    engine = best.plan.config.engine
    assert engine.vllm_data_parallel_size > 1 and engine.vllm_enable_expert_parallel
    assert best.plan.fits and best.plan.phases["generate"] < 0.5 * plan.phases["generate"]
    assert best.plan.split.learners + best.plan.split.engines <= 256
