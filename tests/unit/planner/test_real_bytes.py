"""The plan against real models: built on the meta device for the shipped configurations, counted on the CPU at small sizes.

Everything is measured in one process with a fake process group (`real`), but for Megatron-FSDP and experts' tokens, whose
sizes depend on what other ranks send: those on two gloo ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mgrpo.config.derived import layout_of
from mgrpo.config.schema import Parallel
from mgrpo.layout import Layout
from mgrpo.models.adapters import LoraShape
from mgrpo.models.family import shape_of
from mgrpo.models.memory import DTYPE_BYTES, logits_bytes, stage_elements, state_bytes
from mgrpo.moving import load_file
from mgrpo.planner.activations import stage_activations
from mgrpo.planner.plan_command import shipped_config
from tests.ranks.rank_pool import RankPool

ROOT = Path(__file__).parents[3]
TINY = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 352,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}

BIASED = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64}
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
DELTA = {
    **EXPERTS,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json, large enough that norms and indices are a small part of it."""
    return {"model_type": family, **TINY, **(EXPERTS if "moe" in family else {}), **changes}


def shipped(name: str) -> tuple[str, Layout]:
    """Name of the model and layout of a shipped configuration."""
    config = load_file(ROOT / "examples" / f"{name}.yaml", world_size=1)
    return config.model.model_name_or_path, layout_of(config, sum(config.parallel.num_learners_per_node))


def as_dict(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in Layout.__dataclass_fields__}


META = {}
for _name in (
    "configs/7b_8gpu",
    "configs/32b_16x8",
    "configs/30b_a3b_4x8",
    "recipes/gpt_oss_120b",
    "recipes/glm_4.5_air",
    "recipes/deepseek_v3",
    "recipes/qwen3_next_80b_a3b",
):
    _model, _layout = shipped(_name)
    for _rank in sorted({0, _layout.world_size - 1}):
        META[f"{_name}, rank {_rank}"] = {"model": _model, "layout": as_dict(_layout), "rank": _rank}

STATES: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"layout": {"world_size": 2, "zero_stage": 0}},
    "ZeRO 1": {"layout": {"world_size": 4}},
    "ZeRO 1, fp32": {"layout": {"world_size": 4}, "dtype": "float32"},
    "tensor and data": {"layout": {"world_size": 4, "tensor": 2, "sequence_parallel": True}},
    "context": {"layout": {"world_size": 2, "context": 2}},
    "experts": {"hf": tiny("qwen3_moe"), "layout": {"world_size": 4, "expert": 2}},
    "experts with biases": {"hf": tiny("gpt_oss", **BIASED), "layout": {"world_size": 4, "expert": 2}},
    "latent attention, frozen bias": {
        "hf": tiny("deepseek_v3", **LATENT),
        "layout": {"world_size": 4, "tensor": 2, "expert": 2, "sequence_parallel": True},
    },
    "delta nets": {
        "hf": tiny("qwen3_next", **DELTA),
        "layout": {"world_size": 4, "tensor": 2, "sequence_parallel": True},
    },
    "last stage of a tied model": {
        "hf": tiny("qwen2", tie_word_embeddings=True),
        "layout": {"world_size": 4, "pipeline": 2},
        "rank": 3,
    },
    "chunks": {"layout": {"world_size": 2, "pipeline": 2, "virtual_pipeline": 2}, "rank": 1},
}
LORA = {"rank": 8, "alpha": 16}
STATES |= {
    "adapters": {"layout": {"world_size": 2, "tensor": 2}, "lora": LORA},
    "adapters, ZeRO 0, fp32": {"layout": {"world_size": 2, "zero_stage": 0}, "dtype": "float32", "lora": LORA},
    "adapters, ZeRO 1": {"layout": {"world_size": 2}, "lora": LORA},
    "adapters of experts": {"hf": tiny("qwen3_moe"), "layout": {"world_size": 4, "expert": 2}, "lora": LORA},
}
SHARED_STATES: dict[str, dict[str, Any]] = {
    "ZeRO 2": {"layout": {"world_size": 2, "zero_stage": 2}},
    "ZeRO 3": {"layout": {"world_size": 2, "zero_stage": 3}},
    "ZeRO 3, fp32": {"layout": {"world_size": 2, "zero_stage": 3}, "dtype": "float32"},
}
SELECTIVE = {"recompute_granularity": "selective"}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "bf16": {"dtype": "bfloat16"},
    "QK norm": {"hf": tiny("qwen3")},
    "QKV bias": {"hf": tiny("qwen2"), "documents": 1},
    "experts": {"hf": tiny("qwen3_moe")},
    # The CPU's kernel that keeps no scores takes values as wide as keys only.
    "latent attention": {"hf": tiny("deepseek_v3", **LATENT | {"v_head_dim": 24})},
    "latent attention, queries of hidden states": {
        "hf": tiny("deepseek_v3", **LATENT | {"v_head_dim": 24, "q_lora_rank": None})
    },
    "tensor": {"layout": {"world_size": 2, "tensor": 2}},
    "sequence parallel": {"layout": {"world_size": 2, "tensor": 2, "sequence_parallel": True}},
    "tensor-parallel experts": {
        "hf": tiny("qwen3_moe"),
        "layout": {"world_size": 2, "tensor": 2, "sequence_parallel": True},
    },
    "first stage": {"layout": {"world_size": 2, "pipeline": 2}},
    "last stage": {"layout": {"world_size": 2, "pipeline": 2}, "rank": 1},
    "gathered context": {"layout": {"world_size": 2, "context": 2}},
    "exchanged context": {"layout": {"world_size": 2, "context": 2}, "parallel": {"cp_comm_type": "a2a"}},
    "recompute full": {"parallel": {"recompute_granularity": "full"}},
    "recompute mlp": {"parallel": {**SELECTIVE, "recompute_modules": ["mlp"]}},
    "recompute attention and mlp": {"parallel": {**SELECTIVE, "recompute_modules": ["core_attn", "mlp"]}},
    "recompute experts": {"hf": tiny("qwen3_moe"), "parallel": {**SELECTIVE, "recompute_modules": ["moe"]}},
    "chunked logits": {"parallel": {"logits_chunk": 250}},
}
SHARED_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "experts on two ranks": {"hf": tiny("qwen3_moe"), "layout": {"world_size": 2, "expert": 2}},
}


def states_case(**case: Any) -> dict[str, Any]:
    return {"hf": tiny("llama"), "rank": 0, "dtype": "bfloat16", "parallel": {}, **case}


def activations_case(**case: Any) -> dict[str, Any]:
    defaults = {"layout": {"world_size": 1}, "dtype": "float32", "tokens": 512, "documents": 4}
    return states_case(**{**defaults, **case})


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], dict[str, Any]]:
    """What one process measures, all cases at once: importing Megatron takes longer than they do."""
    cases = [("meta", name, case) for name, case in META.items()]
    cases += [("states", name, states_case(**case)) for name, case in STATES.items()]
    cases += [("activations", name, activations_case(**case)) for name, case in ACTIVATIONS.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.planner.real"],
        input=json.dumps([(kind, case) for kind, _, case in cases]),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return {(kind, name): result for (kind, name, _), result in zip(cases, results, strict=True)}


@pytest.fixture(scope="module")
def together():
    """Measures on two gloo ranks."""
    pool = RankPool(2)

    def run(function: str, case: dict[str, Any]) -> list[dict[str, Any]]:
        # By name: importing the module here would import Megatron into every test of this process.
        return pool.start(SimpleNamespace(__module__="tests.unit.planner.real", __name__=function), **case).results()

    yield run
    pool.close()


@pytest.mark.parametrize("name", META)
def test_the_real_model_of_a_shipped_configuration_has_the_planned_parameters(name, alone) -> None:
    """Megatron's own module tree, built on the meta device: what the plan, the loader and the sync call a parameter."""
    result, case = alone["meta", name], META[name]
    assert "error" not in result, result
    assert result["differing"] == []
    layout = Layout(**case["layout"])
    shape = shape_of(shipped_config(case["model"]))
    stage = case["rank"] // (layout.world_size // layout.pipeline)
    held = stage_elements(shape, layout, stage=stage)
    assert result["parameters"] == held.total - held.frozen


def compare_states(case: dict[str, Any], result: dict[str, Any]) -> None:
    assert "error" not in result, result
    layout, shape = Layout(**case["layout"]), shape_of(case["hf"])
    stage = case["rank"] // (layout.world_size // layout.pipeline)
    lora = LoraShape(**case["lora"]) if "lora" in case else None
    planned = state_bytes(shape, layout, stage=stage, dtype_bytes=DTYPE_BYTES[case["dtype"]], lora=lora)
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(planned, part) == pytest.approx(result[part], rel=0.05), part


@pytest.mark.parametrize("name", STATES)
def test_states_take_the_planned_bytes(name, alone) -> None:
    """Weights, gradient buffers, masters and moments as Megatron allocates them."""
    compare_states(states_case(**STATES[name]), alone["states", name])


@pytest.mark.parametrize("name", SHARED_STATES)
def test_states_under_fsdp_take_the_planned_bytes(name, together) -> None:
    """Megatron-FSDP also keeps an fp32 master of fp32 weights, which is easy to miss."""
    case = states_case(**SHARED_STATES[name])
    for result in together("states", case):
        compare_states(case, result)


def planned_activations(case: dict[str, Any], rows: int) -> int:
    """What one forward pass keeps on a CPU; `rows` of the tokens are responses, which alone reach the head."""
    layout, shape = Layout(**case["layout"]), shape_of(case["hf"])
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in case["parallel"].items()}
    settings, dtype_bytes = Parallel(**lists), DTYPE_BYTES[case["dtype"]]
    stage = case["rank"] // (layout.world_size // layout.pipeline)
    kept = stage_activations(
        shape,
        layout,
        stage=stage,
        pack_length=case["tokens"],
        dtype_bytes=dtype_bytes,
        settings=settings,
        num_micro_batches=1,
        fused=False,
    ).kept
    if stage < layout.pipeline - 1:
        return kept
    kept -= (case["tokens"] // layout.context - rows) * shape.hidden * dtype_bytes
    if settings.logits_chunk != "auto":
        return kept
    return kept + logits_bytes(rows, shape=shape, layout=layout, dtype_bytes=dtype_bytes)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_take_the_planned_bytes(name, alone) -> None:
    """Unique storages that autograd saves; docs/planning.md states how far off the plan was when it was measured."""
    case, result = activations_case(**ACTIVATIONS[name]), alone["activations", name]
    assert "error" not in result, result
    planned = planned_activations(case, result["rows"])
    print(f"{name}: {planned / result['bytes'] - 1:+.1%}")
    assert planned == pytest.approx(result["bytes"], rel=0.06 if "context" in name else 0.03)


@pytest.mark.parametrize("name", SHARED_ACTIVATIONS)
def test_activations_of_shared_experts_take_the_planned_bytes(name, together) -> None:
    """Ranks get as many tokens as the router sends them; the mean is what is planned."""
    case = activations_case(**SHARED_ACTIVATIONS[name])
    results = together("activations", case)
    mean = sum(result["bytes"] for result in results) / len(results)
    planned = planned_activations(case, results[0]["rows"])
    print(f"{name}: {planned / mean - 1:+.1%}")
    assert planned == pytest.approx(mean, rel=0.08)
