"""Makes a student: a model with some of the layers of another, evenly chosen, the first and the last among them.

    python examples/distillation/make_student.py --layers 24 [--model examples/smollm2/model] [--out examples/distillation/student]

Embeddings, norms and the LM head are the teacher's. What the layers in between did is missing, so that the student writes worse texts
than its teacher, and can learn from it.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def kept(layers: int, count: int) -> list[int]:
    """The layers that are kept of so many."""
    return [round(place * (layers - 1) / (count - 1)) for place in range(count)]


def cut(teacher: Path, count: int, student: Path) -> list[int]:
    """Writes a folder like the teacher's, its tokenizer included; returns the layers that are kept."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype="auto")
    stack = model.model
    if not 2 <= count < len(stack.layers):
        raise SystemExit(
            f"--layers {count}: expected 2 to {len(stack.layers) - 1}, fewer than the {len(stack.layers)} of {teacher}"
        )
    layers = kept(len(stack.layers), count)
    stack.layers = torch.nn.ModuleList(stack.layers[layer] for layer in layers)
    for place, layer in enumerate(stack.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = count
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[layer] for layer in layers]
    model.save_pretrained(student)
    for path in teacher.iterdir():
        if path.name.startswith("tokenizer") or path.name == "chat_template.jinja":
            shutil.copyfile(path, student / path.name)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("examples/smollm2/model"), help="folder of the teacher")
    parser.add_argument("--layers", type=int, default=24, help="layers of the student")
    parser.add_argument("--out", type=Path, default=Path("examples/distillation/student"))
    args = parser.parse_args()
    print(f"layers {', '.join(map(str, cut(args.model, args.layers, args.out)))} are in {args.out}")


if __name__ == "__main__":
    main()
