"""What tests of conversions between Hugging Face and Megatron do to their folders, and what they compare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mgrpo.layout import Layout
from mgrpo.model_io.convert import hf_to_megatron, megatron_to_hf
from mgrpo.model_io.hf_folder import same_bits
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config

ROOT = Path(__file__).parents[3]
CARRIED = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"a": 1}',
    "chat_template.jinja": "{{ messages }}",
    "tokenizer.model.v3": "x",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}


def layout_of(tensor: int = 1, pipeline: int = 1) -> Layout:
    return Layout(world_size=tensor * pipeline, tensor=tensor, pipeline=pipeline)


def change(folder: Path, how) -> None:
    """Replace the tensors of a folder's only file."""
    save_file(how(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the files of a folder."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same(folder: Path, source: Path) -> None:
    """The same tensors, and the same files beside them."""
    found, expected = tensors_of(folder), tensors_of(source)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name
    for name in (*CARRIED, "config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()


def refused(out: Path, convert, *parts: str) -> None:
    """It is refused by an error with these words, and leaves nothing."""
    before = set(out.parent.iterdir())
    with pytest.raises(ValueError) as caught:
        convert()
    for part in parts:
        assert part in str(caught.value)
    assert set(out.parent.iterdir()) == before


def run_tool(name: str, *arguments: object, cwd: Path | None = None) -> str:
    """What a conversion prints that ends well."""
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def there_and_back(source: Path, layout: Layout, folder: Path) -> None:
    hf_to_megatron(source, folder / "megatron", layout)
    megatron_to_hf(folder / "megatron", folder / "hf")
    assert_same(folder / "hf", source)


def shape(folder: Path):
    return shape_of(read_hf_config(folder))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
