"""Teachers' engines: how vLLM is started for them, and the GPUs they are on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mgrpo.config.derived import most_tokens
from mgrpo.moving import from_values
from mgrpo.rollout import start
from mgrpo.rollout.vllm import engine_arguments, teacher_engine
from mgrpo.rollout.vllm.teacher_engine import STEP_TOKENS, gpu_share, teacher_args, teacher_kinds

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 3}
LENGTHS = {"max_prompt_token_length": 24, "response_length": 1000, "pack_length": 4096}


def folder(path: Path, **values: object) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": 100, **values}))
    return str(path)


def config_of(*teachers: str, **values: Any):
    own = {"teacher_model_name_or_path": list(teachers), "teacher_mode": "engine", "model_name_or_path": "m"}
    return from_values({**own, **LENGTHS, **values})


@pytest.mark.parametrize(
    ("values", "free", "share"),
    [
        ({}, 1, 1.0),
        ({}, 0, None),
        ({"teacher_num_engines": 2}, 2, 1.0),
        ({"teacher_num_engines": 2}, 1, None),
        ({"teacher_num_engines": 2, "teacher_gpu_memory_utilization": 0.5}, 1, 0.5),
        ({"teacher_num_engines": 3, "teacher_gpu_memory_utilization": 0.33}, 1, 0.33),
        ({"teacher_num_engines": 3, "teacher_gpu_memory_utilization": 0.5}, 1, None),
        ({"teacher_num_engines": 3, "teacher_gpu_memory_utilization": 0.5}, 2, 0.5),
        ({"teacher_tensor_parallel_size": 2, "teacher_gpu_memory_utilization": 0.5}, 1, None),
        ({"teacher_tensor_parallel_size": 2, "teacher_gpu_memory_utilization": 0.5}, 2, 1.0),
    ],
)
def test_engines_share_gpus_only_where_too_few_are_free_and_their_shares_fit(values, free, share) -> None:
    """Workers of one engine wait for each other, and would on one GPU for their own work."""
    assert gpu_share(config_of("a", **values), num_free=free) == share


REMEDY = "start fewer learners or engines, lower teacher_gpu_memory_utilization so that several fit on one GPU, or use teacher_mode=learner"


@pytest.mark.parametrize(
    ("values", "gpus", "learners", "problem"),
    [
        ({}, 4, 1, None),
        (
            {},
            2,
            1,
            "no GPU is left for the teachers' engines: 2 x teacher_num_engines=1 x teacher_tensor_parallel_size=1 need 2 GPUs, but of 2 on this "
            f"machine 1 belong to learners and 1 to the policy's engines: 0 left; {REMEDY}",
        ),
        ({"teacher_gpu_memory_utilization": 0.5}, 3, 1, None),
        ({"vllm_mode": "server", "vllm_server_base_url": ["http://127.0.0.1:1"]}, 3, 1, None),
        ({"ray_address": "10.0.0.9:6379"}, 1, 1, None),
        ({"vllm_mode": "colocate", "teacher_gpu_memory_utilization": 0.35}, 1, 1, None),
        (
            {"vllm_mode": "colocate"},
            1,
            1,
            "vllm_mode=colocate puts 2 of the teachers' 2 workers on a learner's GPU, and teacher_gpu_memory_utilization=0.9 of each are more than "
            "the 0.7 that the policy's engine leaves; set it to at most 0.35",
        ),
        (
            {"vllm_mode": "colocate", "teacher_tensor_parallel_size": 2},
            1,
            1,
            "teacher_tensor_parallel_size=2 needs as many GPUs, and vllm_mode=colocate has 1; lower it",
        ),
    ],
)
def test_a_machine_without_gpus_for_its_teachers_is_refused_before_anything_starts(
    monkeypatch, tmp_path, values, gpus, learners, problem
) -> None:
    """Ray would wait for a GPU that nobody gives back."""
    monkeypatch.setattr(engine_arguments, "machine_problems", lambda *args, **kwargs: [])
    monkeypatch.setattr(teacher_engine, "serving_gpus", lambda: list(map(str, range(gpus))))
    config = config_of("math:a", "code:b", **values)
    found = start.machine_problems(config, num_local_learners=learners, hf_config={"head_dim": 64}, starts_engines=True)
    assert found == ([problem] if problem else [])
    # An evaluation starts none of them, and other machines than rank 0's neither.
    assert start.machine_problems(config, num_local_learners=0, hf_config={"head_dim": 64}, starts_engines=True) == []
    assert start.machine_problems(config, num_local_learners=1, hf_config={"head_dim": 64}, starts_engines=False) == []


def test_on_a_cpu_a_teachers_heads_must_be_of_a_size_that_vllm_serves(monkeypatch, tmp_path) -> None:
    """It starts with others, and dies at the first question."""
    monkeypatch.setattr(engine_arguments, "machine_problems", lambda *args, **kwargs: [])
    monkeypatch.setattr(teacher_engine, "serving_gpus", list)
    good, bad = folder(tmp_path / "good"), folder(tmp_path / "bad", head_dim=48)
    (found,) = start.machine_problems(
        config_of(f"a:{good}", f"b:{bad}"), num_local_learners=1, hf_config={"head_dim": 64}, starts_engines=True
    )
    assert found.startswith(f"teacher_model_name_or_path={bad} has head_dim=48, which is not served by vLLM on a CPU")


def test_teachers_have_logs_by_name_and_with_colocation_the_learners_gpus(monkeypatch, tmp_path) -> None:
    """Elsewhere Ray chooses: the share says how many it may put on one."""
    monkeypatch.setattr(teacher_engine, "serving_gpus", lambda: ["4", "7"])
    teachers = [f"math:{folder(tmp_path / 'a')}", f"org/code:{folder(tmp_path / 'b')}"]
    numbers = {"on_gpu": True, "num_local_learners": 2}
    shared = {"teacher_num_engines": 3, "teacher_gpu_memory_utilization": 0.2, "vllm_mode": "colocate"}
    math, code = teacher_kinds(config_of(*teachers, **shared), num_gpus=0, **numbers)
    assert (math.log, code.log) == ("teacher_math", "teacher_org-code")
    assert (math.gpus, code.gpus) == (["4", "7", "4"], ["7", "4", "7"])
    apart = config_of(*teachers, teacher_gpu_memory_utilization=0.5, teacher_temperature=2)
    math, code = teacher_kinds(apart, num_gpus=2, **numbers)
    assert (math.gpus, math.gpu_share, code.gpu_share, math.teacher_temperature) == ([], 0.5, 0.5, 2)
    assert math.args(False)["model"] == teachers[0].partition(":")[2] and "kv_cache_memory_bytes" in math.args(False)
    with pytest.raises(RuntimeError, match=r"no GPU is left for the teachers' engines: .* and Ray has 0 left for them"):
        teacher_kinds(apart, num_gpus=1, **numbers)
    (alone,) = teacher_kinds(config_of(folder(tmp_path / "a")), num_gpus=2, **numbers)
    assert alone.log == "teacher" and alone.gpu_share == 1 and "kv_cache_memory_bytes" not in alone.args(False)


@pytest.mark.parametrize(
    ("values", "positions", "longest"),
    [({}, 8192, 1024), ({}, 1024, 1024), ({"teacher_prompt_template": "{prompt} {answer}"}, 8192, 4096), ({"teacher_prompt_template": "{prompt} {answer}"}, 2048, 2048)],
)  # fmt: skip
def test_an_engine_reads_what_it_can_be_asked_about_and_has_room_for_a_token_of_its_own(
    tmp_path, values, positions, longest
) -> None:
    """vLLM samples at least one token, and refuses a sequence that leaves no room for it."""
    model = folder(tmp_path / "t", max_position_embeddings=positions)
    config = config_of(model, **values)
    assert most_tokens(config, model) == longest
    args = teacher_args(config, model, on_gpu=True)
    assert args["max_model_len"] == longest + 1 and args["max_num_batched_tokens"] == STEP_TOKENS
    (kind,) = teacher_kinds(config, on_gpu=False, num_gpus=0, num_local_learners=1)
    assert kind.environment["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1"


def test_an_engine_on_a_cpu_has_room_for_two_steps_and_gives_what_is_compared(tmp_path) -> None:
    model = folder(tmp_path / "t")
    config = config_of(
        model, model_dtype="float32", distillation_loss="jsd", distillation_topk=33, cast_lm_head_to_fp32=True
    )
    args = teacher_args(config, model, on_gpu=False)
    token = 2 * 3 * 2 * 64 * 4
    assert args["kv_cache_memory_bytes"] >= 2 * token * (1025 + STEP_TOKENS)
    assert args["max_logprobs"] == 33 and args["hf_overrides"] == {"head_dtype": "float32"}
    assert "max_logprobs" not in teacher_args(config_of(model), model, on_gpu=False)
    assert args["dtype"] == "float32" and "gpu_memory_utilization" not in args
