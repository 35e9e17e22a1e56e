"""Models with heads of their own that draft (MTP), and a program that reads the heads of one into an engine in its own process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

OWN = (
    "embed_tokens.weight",
    "enorm.weight",
    "hnorm.weight",
    "eh_proj.weight",
    "shared_head.norm.weight",
    "shared_head.head.weight",
)
"""What a head of DeepSeek's kind has beside the tensors of a layer. The first and the last repeat the model's."""
RIGHT_SCALE = 6
"""Of the LM head where heads are right, so that the likeliest token has most of the probability."""


def add_head(folder: Path, *, is_right: bool = False) -> None:
    """Write a random head behind the last layer of a tiny model.

    Args:
        is_right: instead let the model and its head both guess the next token from the last one alone: all their layers add nothing.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    number, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, at = f"model.layers.{number - 1}.", f"model.layers.{number}."
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int, scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator)

    if is_right:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        tensors["lm_head.weight"] *= RIGHT_SCALE
    head = {
        at + name.removeprefix(last): tensor + (0 if is_right else noise(*tensor.shape, scale=0.05))
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    norms = torch.ones(hidden) if is_right else 1 + noise(hidden, scale=0.1)
    both = (
        torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
        if is_right
        else noise(hidden, 2 * hidden, scale=0.1)
    )
    final = tensors["model.norm.weight"] if is_right else norms
    own = (tensors["model.embed_tokens.weight"], norms, norms, both, final, tensors["lm_head.weight"])
    head |= {at + name: tensor.clone() for name, tensor in zip(OWN, own, strict=True)}
    save_file(tensors | head, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def main(folder: str) -> None:
    """Print what differs between the weights that vLLM has loaded and those that are read again, and how many bytes were."""
    from mgrpo.moving import from_values
    from mgrpo.rollout.vllm.engine_arguments import engine_args, environment_of

    os.environ |= environment_of(workers=1, threads=1, on_gpu=False, is_local=True) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    import torch
    from vllm import LLM

    values = {
        "model_name_or_path": folder,
        "model_dtype": "float32",
        "max_prompt_token_length": 16,
        "response_length": 16,
        "vllm_speculative_method": "mtp",
        "output_dir": folder,
    }
    engine = LLM(**engine_args(from_values(values), on_gpu=False))
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    shared = {parameter.data_ptr() for parameter in runner.model.parameters()}
    weights = {f"{kind}.{name}": weight for kind in ("model", "drafter.model") for name, weight in named(runner, kind)}
    loaded = {name: weight.clone() for name, weight in weights.items()}
    with torch.no_grad():
        lost = [weight.fill_(torch.nan) for weight in weights.values() if weight.data_ptr() not in shared]
    (num_bytes,) = engine.collective_rpc("read_heads")
    wrong = [name for name, weight in weights.items() if not torch.equal(weight, loaded[name])]
    print("read", json.dumps({"wrong": wrong, "num_bytes": num_bytes, "lost": sum(weight.nbytes for weight in lost)}))


def named(runner: object, kind: str) -> list:
    from operator import attrgetter

    return [*attrgetter(kind)(runner).named_parameters()]


if __name__ == "__main__":
    main(sys.argv[1])
