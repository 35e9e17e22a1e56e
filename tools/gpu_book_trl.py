"""The work of the stage `big` of tools/gpu_whole_run.py done by TRL's GRPOTrainer on the same device.

    python tools/gpu_book_trl.py --config RUN/config.yaml [--device cpu|cuda] [--steps 5] [--transformers]

The configuration is that of the run: same model, rows, lengths, batch, loss and sampling. vLLM shares the GPU and sleeps while
TRL trains; with --transformers completions are sampled without vLLM. The model and AdamW's states are in bfloat16, the fastest
that TRL has; mgrpo's weights and states are in float32. The last line is JSON: seconds and seconds of generation, weight sync
included, of every step; or {"skipped": reason} where TRL cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

MICRO_BATCH = 8
"""Completions of one forward pass."""
VLLM_MEMORY = 0.3
"""Share of the GPU's memory that vLLM may take."""


def draw(completions: list[Any], **_: object) -> list[float]:
    """A reward drawn at random, so that every group has a signal; mgrpo's runs name it in `reward_funcs`."""
    return [random.random() for _ in completions]


def run(config: Path, *, device: str, steps: int, has_vllm: bool) -> dict[str, Any]:
    """Train, and return the figures of every step."""
    import torch
    import yaml
    from bench_loop_trl import train
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = yaml.safe_load(config.read_text())
    folder, on_cuda = settings["model_name_or_path"], device == "cuda"
    completions = settings["num_unique_prompts_rollout"] * settings["num_samples_per_prompt_rollout"]
    sampling: dict[str, Any] = {"use_vllm": has_vllm}
    if has_vllm:
        sampling |= {
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": True,
            "vllm_gpu_memory_utilization": VLLM_MEMORY,
            "vllm_max_model_length": settings["max_prompt_token_length"] + settings["response_length"],
            # The run trusts the sampled tokens as well: no further forward pass.
            "vllm_importance_sampling_correction": False,
        }
    return train(
        settings,
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
        tokenizer=AutoTokenizer.from_pretrained(settings["tokenizer_name_or_path"]),
        reward_func=draw,
        num_steps=steps,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=completions // MICRO_BATCH,
        bf16=on_cuda,
        use_cpu=not on_cuda,
        seed=settings["seed"],
        **sampling,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--transformers", action="store_true", help="sample without vLLM")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # FlashInfer compiles its sampler when it is first used.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        import trl  # noqa: F401
    except ImportError as error:
        print(json.dumps({"skipped": f"trl cannot be imported: {error}"}), file=stdout)
        return
    by = "transformers" if args.transformers else "vLLM"
    figures = run(args.config, device=args.device, steps=args.steps, has_vllm=not args.transformers)
    print(json.dumps({"sampled_by": by, **figures}), file=stdout)


if __name__ == "__main__":
    main()
