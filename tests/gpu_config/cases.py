"""What engines on GPUs are asked to be: every configuration under examples/, and what else the settings can ask for."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgrpo.config import Config
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.moving import parse
from mgrpo.planner.plan_command import shipped_config
from mgrpo.rollout.vllm.engine_arguments import engine_args, engine_environment
from tests.shipped import EXAMPLES, FILES, SMOLLM2

ONE_GPU = {"single_gpu_mode": "true", "vllm_kv_cache_mb": "2000"}
SEVEN_B = "configs/7b_8gpu.yaml"
MIXTURE = "configs/30b_a3b_4x8.yaml"
ALONE = {
    "vllm_tensor_parallel_size": "1",
    "vllm_data_parallel_size": "1",
    "vllm_enable_expert_parallel": "false",
}
QUICKSTART = "configs/quickstart.yaml"
VARIANTS: Mapping[str, tuple[str, dict[str, str]]] = {
    "learner and engine by turns": (QUICKSTART, ONE_GPU),
    "by turns, bfloat16, eager": (QUICKSTART, ONE_GPU | {"model_dtype": "bfloat16", "vllm_enforce_eager": "true"}),
    "side by side": (QUICKSTART, ONE_GPU | {"vllm_enable_sleep_mode": "false"}),
    "several workers by turns": (
        SEVEN_B,
        {
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": "true",
            "vllm_tensor_parallel_size": "2",
            "vllm_num_engines": "2",
            "vllm_kv_cache_mb": "20000",
        },
    ),
    "eager": (SEVEN_B, {"vllm_enforce_eager": "true"}),
    "float16": (SEVEN_B, {"model_dtype": "float16"}),
    "float32": (SEVEN_B, {"model_dtype": "float32"}),
    "experts": (MIXTURE, ALONE),
    "experts in float32": (MIXTURE, ALONE | {"model_dtype": "float32"}),
    "experts in float16": (MIXTURE, ALONE | {"model_dtype": "float16"}),
    "cache fp8": (SEVEN_B, {"vllm_kv_cache_dtype": "fp8"}),
    "cache fp8_e4m3": (SEVEN_B, {"vllm_kv_cache_dtype": "fp8_e4m3"}),
    "cache fp8_e5m2": (SEVEN_B, {"vllm_kv_cache_dtype": "fp8_e5m2"}),
    "cache fp8_per_token_head": (SEVEN_B, {"vllm_kv_cache_dtype": "fp8_per_token_head"}),
    "head in float32": (SEVEN_B, {"cast_lm_head_to_fp32": "true"}),
    "kept sets": (SEVEN_B, {"top_k": "50"}),
    "kept sets as masks": (SEVEN_B, {"top_k": "100"}),
    "masks by turns": (QUICKSTART, ONE_GPU | {"top_k": "100"}),
    "regex": (SEVEN_B, {"vllm_guided_decoding_regex": "[0-9]+"}),
    "no prefix cache": (SEVEN_B, {"vllm_enable_prefix_caching": "false"}),
    "workers on several nodes": (SEVEN_B, {"vllm_tensor_parallel_size": "4"}),
}
"""Name -> configuration and the settings that differ from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An engine on GPUs."""

    name: str
    file: str
    settings: Mapping[str, str]
    spans_nodes: bool = False

    @property
    def config(self) -> Config:
        flags = [word for name, value in self.settings.items() for word in (f"--{name}", value)]
        return parse(["--config", str(EXAMPLES / self.file), *flags], world_size=8)

    def args(self, folder: Path) -> dict[str, Any]:
        """Of vLLM's AsyncEngineArgs; the model is a folder below `folder` with nothing but its sizes."""
        config = self.config
        model = folder / "models" / self.file
        model.mkdir(parents=True, exist_ok=True)
        own = EXAMPLES.parent / config.model_path
        if (own / "tokenizer.json").is_file():
            shutil.copytree(own, model, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        else:
            (model / "config.json").write_text(json.dumps(shipped_config(config.model_path) or SMOLLM2))
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, model_name_or_path=str(model)))
        return engine_args(config, on_gpu=True, spans_nodes=self.spans_nodes, has_learners=True)

    def environment(self) -> dict[str, str]:
        """Of the engine's processes."""
        return engine_environment(self.config, on_gpu=True, is_local=True)


def kinds(args: Mapping[str, Any]) -> dict[str, Any]:
    """Of what sort the engine is: the arguments without sizes and paths, and the model's type and heads."""
    shape = shape_of(read_hf_config(args["model"]))
    plain = {name: value if isinstance(value, (bool, str, dict)) else "..." for name, value in args.items()}
    paths = {name: "..." for name in ("tokenizer",) if name in args}
    return plain | paths | {"model": f"{shape.family} with heads of {shape.head_dim}"}


def cases() -> list[Case]:
    """All of them, those under examples/ first.

    Latent attention aside: where vLLM chooses a kernel for it, it asks CUDA itself, which the GPU that is put before it is not.
    """
    every = [Case(name=file, file=file, settings={}) for file in FILES]
    shipped = [case for case in every if "kv_lora_rank" not in (shipped_config(case.config.model_path) or {})]
    return shipped + [
        Case(name=name, file=file, settings=settings, spans_nodes="several nodes" in name)
        for name, (file, settings) in VARIANTS.items()
    ]
