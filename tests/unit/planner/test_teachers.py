"""Teachers in the plan: their memory where learners hold them, their GPUs where they are engines, and their time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mgrpo.models.family import shape_of
from mgrpo.models.memory import num_parameters
from mgrpo.moving import load_file
from mgrpo.planner.hardware import GIB, GPUS, Hardware
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.plan_command import plan_command, shipped_config
from mgrpo.planner.suggest import suggest
from mgrpo.planner.work import generation_flops

CONFIG = Path(__file__).parents[3] / "examples" / "configs" / "7b_8gpu.yaml"
BIG = "Qwen/Qwen2.5-14B-Instruct"


def planned(*models: str, gpus: int = 8, **values: Any) -> RunPlan:
    config = load_file(CONFIG, world_size=1)
    own = dataclasses.replace(config.distillation, teacher_model_name_or_path=models, **values)
    config = dataclasses.replace(config, distillation=own)
    shapes = [shape_of(shipped_config(teacher.model)) for teacher in own.loaded_teachers]
    return plan_run(
        config,
        shape_of(shipped_config(config.model.model_name_or_path)),
        Hardware(gpu=GPUS["H100"], nodes=1, gpus_per_node=gpus),
        num_learners=sum(config.parallel.num_learners_per_node),
        teachers=shapes,
    )


def test_learners_hold_a_teacher_whole() -> None:
    without, plan = planned(), planned(BIG)
    big = shape_of(shipped_config(BIG))
    for before, stage in zip(without.stages, plan.stages, strict=True):
        held = num_parameters(big, plan.layout, stage=stage.stage) * 2
        assert stage.states.teachers == held > 10 * GIB
        assert stage.states.total == before.states.total + held
    expected = plan.hardware.compute_seconds(generation_flops(big, plan.work), gpus=plan.split.learners)
    assert plan.phases["teach"] == pytest.approx(expected)
    assert plan.step_s == pytest.approx(without.step_s + expected)
    assert plan.split == without.split


def test_several_teachers_share_the_rows() -> None:
    one, two = planned(BIG), planned(f"math:{BIG}", f"code:{BIG}")
    assert two.worst.states.teachers == 2 * one.worst.states.teachers
    assert two.teach_s == pytest.approx(one.teach_s)


def test_the_policy_as_its_own_teacher_takes_time_and_its_average_memory() -> None:
    own = planned("self", teacher_prompt_template="{prompt} {solution}")
    average = planned("self", teacher_update_rate=0.1)
    assert own.worst.states.teachers == 0
    assert own.teach_s == average.teach_s > 0
    held = num_parameters(own.shape, own.layout, stage=0)
    assert average.stages[0].states.teachers == held * (2 + 4)


def test_engines_of_teachers_need_gpus() -> None:
    without = planned()
    plan = planned(BIG, teacher_mode="engine", gpus=8)
    assert without.split.idle == 0
    assert (plan.split.teachers, plan.split.idle) == (1, -1)
    (sentence,) = plan.shortages()
    assert "teacher_num_engines x teacher_tensor_parallel_size ask for" in sentence
    assert f"{plan.split.learners} + {plan.split.engines} + 1 GPUs, the cluster has 8" in sentence
    larger = planned(BIG, teacher_mode="engine", gpus=12, teacher_num_engines=2, teacher_tensor_parallel_size=2)
    assert larger.fits
    assert (larger.split.teachers, larger.split.idle) == (4, 0)
    assert larger.worst.states.teachers == 0


@pytest.mark.parametrize(("share", "gpus"), [(0.5, 1), (0.34, 2), (0.3, 1), (0.9, 3)])
def test_small_teachers_share_a_gpu_where_there_is_no_other(share: float, gpus: int) -> None:
    own = {"teacher_mode": "engine", "teacher_gpu_memory_utilization": share}
    models = [f"{name}:Qwen/Qwen2.5-1.5B" for name in "abc"][: 2 if share == 0.5 else 3]
    assert planned(*models, gpus=8, **own).split.teachers == gpus
    assert planned(*models, gpus=16, **own).split.teachers == len(models)


def test_servers_are_not_the_runs() -> None:
    url = {"teacher_mode": "server", "teacher_server_base_url": ("http://127.0.0.1:1",)}
    assert planned("big", **url).step_s == planned().step_s


def test_layouts_are_those_that_a_teacher_also_has() -> None:
    plan = planned(BIG, gpus=8)
    odd = shipped_config(BIG) | {"num_attention_heads": 7, "num_key_value_heads": 7}
    hf_config = shipped_config(plan.config.model.model_name_or_path)
    assert {found.plan.layout.tensor for found in suggest(plan, count=20, hf_config=hf_config, teachers=[odd])} == {1}


def test_the_command_shows_them(capsys: pytest.CaptureFixture) -> None:
    words = ["--config", str(CONFIG), "--suggest", "0", "--nodes", "2", "--teacher_model_name_or_path", BIG]
    assert plan_command(words) == 0
    shown = capsys.readouterr().out
    assert "teachers" in shown
    assert "reading completions" in shown
    assert plan_command([*words[:-1], "Qwen/no-such-0B"]) == 2
    assert "teacher_model_name_or_path=Qwen/no-such-0B" in capsys.readouterr().err
