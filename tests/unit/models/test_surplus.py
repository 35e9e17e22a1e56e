"""Tensors beyond the model: start, ranks that load, teachers, plan and conversion decide alike."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mgrpo.model_io.convert import hf_to_megatron
from mgrpo.model_io.hf_folder import HfFolder, write_weights
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.hf_files.weight_files import INDEX, SINGLE, head_files, left_out, weight_problems
from mgrpo.moving import from_values
from mgrpo.planner.plan_command import plan_command
from mgrpo.policy.weights import hf_reader
from mgrpo.run.inputs.teachers import teacher_problems
from mgrpo.run.start.check import file_problems
from tests.tiny_models import save_tiny

Tensors = dict[str, torch.Tensor]
QUICKSTART = Path(__file__).parents[3] / "examples/quickstart/model"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str, bool], Path]:
    """Models to copy, by family and whether they are tied."""
    made: dict[tuple[str, bool], Path] = {}

    def model(family: str, tied: bool) -> Path:
        if (family, tied) not in made:
            made[family, tied] = save_tiny(tmp_path_factory.mktemp("model"), family, layers=2, tied=tied)
        return made[family, tied]

    return model


@pytest.fixture
def copy(models, tmp_path) -> Callable[..., Path]:
    """Makes a copy with other tensors and other fields in config.json."""

    def make(
        family: str,
        change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
        *,
        tied: bool = False,
        **fields: object,
    ) -> Path:
        folder = Path(shutil.copytree(models(family, tied), tmp_path / "model"))
        tensors = change(load_file(folder / SINGLE))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE)
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))
        return folder

    return make


def more(**tensors: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda own: own | {name.replace("__", "."): tensor for name, tensor in tensors.items()}


def named(names: list[str], size: tuple[int, ...] = (4,)) -> Callable[[Tensors], Tensors]:
    return lambda own: own | {name: torch.ones(size) for name in names}


def planned(*words: str) -> str:
    """The plan's refusal; empty: it was planned."""
    learners = ("--num_learners_per_node", "1", "--suggest", "0", "--learning_rate", "1e-6")
    lengths = ("--max_prompt_token_length", "16", "--response_length", "8")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        status = plan_command([*words, *learners, *lengths])
    assert (status == 2) == bool(said.getvalue())
    return said.getvalue()


def refusal(folder: Path) -> str:
    """The one sentence of all who load a model: start and evaluation, ranks, teachers in learners and engines, plan, conversion."""
    shape = shape_of(read_hf_config(folder))
    (problem,) = weight_problems(folder, shape)
    assert file_problems(from_values({"model_name_or_path": str(folder)}), shape)[0] == f"model_name_or_path={problem}"
    for mode in ("learner", "engine"):
        teacher = {"teacher_model_name_or_path": str(folder), "teacher_mode": mode}
        found = teacher_problems(from_values({"model_name_or_path": str(QUICKSTART)} | teacher), None)
        assert f"teacher_model_name_or_path={problem}" in found
    assert f"model_name_or_path={problem}" in planned("--model_name_or_path", str(folder))
    words = ("--model_name_or_path", str(QUICKSTART), "--teacher_model_name_or_path", str(folder))
    assert f"teacher_model_name_or_path={problem}" in planned(*words)
    for load in (
        lambda: hf_reader(folder, shape),
        lambda: HfFolder(folder, shape),
        lambda: hf_to_megatron(folder, folder.parent / "out", None),
    ):
        with pytest.raises(ValueError) as caught:
            load()
        assert str(caught.value) == problem
    assert not (folder.parent / "out").exists()
    return problem


LORA = [f"model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"]
PEFT = [f"base_model.model.model.layers.0.mlp.up_proj.lora_{part}.default.weight" for part in "AB"]


@pytest.mark.parametrize(
    ("family", "names", "words"),
    [
        ("llama", LORA, ["holds 2 tensors (model.layers.0.self_attn.q_proj.lora_A.weight", "merge the adapter into the weights"]),
        ("llama", PEFT, ["merge the adapter into the weights"]),
        ("llama", ["model.layers.0.self_attn.q_norm.weight"], ["q_norm.weight, which a llama model with this config.json does not have"]),
        ("llama", ["model.layers.1.mlp.down_proj.bias"], ["mlp.down_proj.bias", "correct config.json, or take it out"]),
        ("qwen3", ["model.layers.1.self_attn.k_proj.bias"], ["k_proj.bias, which a qwen3 model"]),
        ("qwen2", ["model.layers.0.self_attn.q_proj.weight_scale"], ["q_proj.weight_scale"]),
        ("llama", ["model.layers.2.input_layernorm.weight"], ["there are 3 layers, config.json has num_hidden_layers=2"]),
        ("llama", ["score.weight"], ["holds score.weight"]),
        ("llama", ["lm_head.modules_to_save.weight"], ["merge the adapter into the weights"]),
        ("qwen2", ["visual.patch_embed.weight", "model.visual.norm.weight"], ["holds 2 tensors (model.visual.norm.weight"]),
        ("llama", ["model.layers.0.self_attn.inv_freq"], ["holds model.layers.0.self_attn.inv_freq"]),
        ("deepseek_v3", ["model.layers.3.eh_proj.weight"], ["set num_nextn_predict_layers to their number"]),
        ("glm4_moe", ["model.layers.3.input_layernorm.weight"], ["there are 4 layers"]),
    ],
)  # fmt: skip
def test_tensors_that_change_the_model_are_refused(copy, family, names, words):
    """Dropped without a word, the model in the folder is not the one that is trained."""
    problem = refusal(copy(family, named(names)))
    assert all(word in problem for word in words), problem


def test_a_config_without_weights_is_planned(copy):
    """On a machine that has the model's config.json alone, and with another config.json than the folder's."""
    folder = copy("llama", named(["score.weight"]))
    bare = folder.parent / "config.json"
    shutil.copy(folder / "config.json", bare)
    assert planned("--model_name_or_path", str(folder.parent)) == ""
    assert planned("--model_name_or_path", str(folder), "--hf_config", str(bare)) == ""


def test_fewer_layers_in_config_than_in_the_file_are_refused(copy):
    """The rest of the model would be missing."""
    folder = copy("llama", num_hidden_layers=1)
    assert "there are 2 layers, config.json has num_hidden_layers=1" in refusal(folder)


def other_head(own: Tensors) -> Tensors:
    head = own["model.embed_tokens.weight"].clone()
    head[-1, -1] = -head[-1, -1]
    return own | {"lm_head.weight": head}


@pytest.mark.parametrize(
    "change",
    [
        other_head,
        lambda own: own | {"lm_head.weight": own["model.embed_tokens.weight"].bfloat16()},
        lambda own: own | {"lm_head.weight": torch.cat([own["model.embed_tokens.weight"], torch.zeros(3, 64)])},
    ],
    ids=["one value", "another type", "padded"],
)
def test_another_head_of_a_tied_model_is_refused_with_both_cures(copy, change):
    """transformers and vLLM would compute with the head in the file, training with the embedding."""
    problem = refusal(copy("llama", change, tied=True))
    assert "set tie_word_embeddings to false in config.json" in problem
    assert "or take lm_head.weight out of the folder" in problem


def test_the_untied_head_is_read_where_config_says_so(copy):
    """The first cure."""
    folder = copy("llama", other_head, tied=True, tie_word_embeddings=False)
    shape = shape_of(read_hf_config(folder))
    assert not list(weight_problems(folder, shape)) and left_out(folder, shape) == []


TABLES = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]


@pytest.mark.parametrize(
    ("family", "tied", "change", "names"),
    [
        ("llama", False, named(TABLES), TABLES),
        ("kimi_k2", False, named(TABLES), TABLES),
        ("llama", False, named(["model.rotary_emb.inv_freq"]), ["model.rotary_emb.inv_freq"]),
        ("gemma3_text", True, named(["model.rotary_emb_local.inv_freq"]), ["model.rotary_emb_local.inv_freq"]),
        ("olmo3", False, named(["model.rotary_emb.full_attention_inv_freq"]), ["model.rotary_emb.full_attention_inv_freq"]),
        ("qwen3_next", False, named(["mtp.layers.0.mlp.gate.weight"]), ["mtp.layers.0.mlp.gate.weight"]),
        ("llama", False, named(["mtp.fc.weight"]), ["mtp.fc.weight"]),
        ("llama", True, lambda own: own | {"lm_head.weight": own["model.embed_tokens.weight"].clone()}, ["lm_head.weight"]),
    ],
)  # fmt: skip
def test_tensors_that_no_model_needs_are_left_out_by_name(copy, capsys, family, tied, change, names):
    """Llama 2, Moonlight and Kimi-K2 hold tables of RoPE, some tied models their embedding twice: nothing is lost without them."""
    folder = copy(family, change, tied=tied)
    shape = shape_of(read_hf_config(folder))
    assert list(weight_problems(folder, shape)) == []
    assert HfFolder(folder, shape).left_out == left_out(folder, shape) == names
    assert planned("--model_name_or_path", str(folder)) == ""
    hf_to_megatron(folder, folder.parent / "out", None)
    assert f"left out: {names[0] if len(names) == 1 else f'{len(names)} tensors ('}" in capsys.readouterr().out


def test_heads_that_draft_are_none_of_the_tables_of_rope(copy):
    """Engines load what `head_files` names, and a table is no head."""
    folder = copy("qwen3_next", named([*TABLES, "mtp.fc.weight"]))
    assert [*head_files(folder, shape_of(read_hf_config(folder)))] == ["mtp.fc.weight"]


def test_tensors_that_an_index_does_not_list_count(copy):
    """transformers and vLLM load whole files."""
    folder = copy("llama")
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).rename(folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}))
    assert not list(weight_problems(folder, shape_of(read_hf_config(folder))))
    save_file(tensors | {LORA[0]: torch.ones(4)}, folder / "model-00001-of-00001.safetensors")
    assert LORA[0] in refusal(folder)


def in_shards(folder: Path, more: Callable[[Tensors], Tensors]) -> None:
    """Two files with an index that does not list what `more` adds to the second one."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, own in parts.items():
        part = {name: tensors[name] for name in own}
        save_file(part | (more(tensors) if file == "b.safetensors" else {}), folder / file)
    index = {name: file for file, own in parts.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))


def test_a_tensor_in_two_files_is_refused_unless_both_are_equal(copy):
    """transformers and vLLM keep the one that they read last, training the one in the index."""
    name = "model.embed_tokens.weight"
    folder = copy("llama")
    in_shards(folder, lambda own: {name: own[name] + 1})
    assert (
        refusal(folder)
        == f"{folder} holds {name} in a.safetensors and with other values in b.safetensors; take one of them out"
    )


def test_equal_tensors_in_two_files_are_accepted(copy):
    """Shards that were cut by layer repeat a tied embedding."""
    folder = copy("llama")
    in_shards(folder, lambda own: {"model.embed_tokens.weight": own["model.embed_tokens.weight"].clone()})
    assert list(weight_problems(folder, shape_of(read_hf_config(folder)))) == []


def test_a_single_file_beside_an_index_of_others_is_refused(copy):
    """transformers reads the single file, training and vLLM the files in the index."""
    folder = copy("llama")
    tensors = load_file(folder / SINGLE)
    in_shards(folder, lambda own: {})
    assert list(weight_problems(folder, shape_of(read_hf_config(folder)))) == []
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / SINGLE)
    assert f"holds {SINGLE}, and {INDEX} of other files" in refusal(folder)


def test_a_second_file_with_the_same_tensors_is_refused(copy):
    """Without an index vLLM loads every file of an evaluation or a teacher, and the last one counts."""
    folder = copy("llama")
    save_file({"tok_embeddings.weight": torch.ones(4)}, folder / "consolidated.safetensors")
    assert list(weight_problems(folder, shape_of(read_hf_config(folder)))) == []
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model_old.safetensors")
    assert "holds model.norm.weight in model_old.safetensors as well, which vLLM loads" in refusal(folder)


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda own: {change(name): tensor for name, tensor in own.items()}


def fused(own: Tensors) -> Tensors:
    """Experts as transformers holds them."""
    rest = {name: tensor for name, tensor in own.items() if ".experts." not in name}
    return rest | {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 80, 64)}


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", renamed(lambda name: "_orig_mod." + name), ["but holds", "names have '_orig_mod.' in them; write them without"]),
        ("llama", renamed(lambda name: "module.model." + name), ["names have 'module.model.' in them"]),
        ("llama", renamed(lambda name: name.removeprefix("model.")), ["but holds", "names lack 'model.'; write them with it"]),
        ("llama", renamed(lambda name: "base_model.model." + name), ["names have 'base_model.model.' in them"]),
        ("llama", renamed(lambda name: name.replace("model.", "model._orig_mod.")), ["names have '_orig_mod.' in them"]),
        ("llama", renamed(lambda name: name.replace("model.", "model.language_model.")), ["names have 'language_model.' in them"]),
        ("llama", renamed(lambda name: re.sub(r"(layers\.\d+\.)", r"\1_fsdp_wrapped_module.", name)), ["'_fsdp_wrapped_module.' in them"]),
        ("llama", renamed(lambda name: name.replace("layers.", "layers._checkpoint_wrapped_module.")), ["'_checkpoint_wrapped_module.'"]),
        ("llama", renamed(lambda name: name.replace("q_proj", "q_proj.base_layer")), ["names have 'base_layer.' in them"]),
        ("llama", renamed(lambda name: name.replace("self_attn", "attn")), ["but holds 8 tensors (model.layers.0.attn.k_proj.weight"]),
        (
            "qwen3_moe",
            fused,
            ["lacks 12 tensors", "but holds model.layers.0.mlp.experts.gate_up_proj", "all experts of a layer are in one tensor"],
        ),
        ("llama", lambda own: {name: own[name] for name in own if name != "model.norm.weight"}, ["lacks model.norm.weight, which its"]),
        (
            "llama",
            lambda own: {name: own[name] for name in own if name != "lm_head.weight"},
            ["lacks lm_head.weight", "set tie_word_embeddings to true in config.json if"],
        ),
    ],
)  # fmt: skip
def test_a_missing_tensor_is_named_with_what_is_there_instead(copy, family, change, words):
    """The list of what is missing hides that all of it is there under other names."""
    problem = refusal(copy(family, change))
    assert all(word in problem for word in words), problem


def test_a_missing_shard_is_named(copy):
    """The most frequent reason why a copy is not whole."""
    folder = copy("llama")
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    headers = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_weights(headers, lambda name: [tensors[name]], folder, file_bytes=100_000)
    missing = sorted(folder.glob("model-*.safetensors"))[1]
    missing.unlink()
    assert refusal(folder) == f"{folder} lacks {missing.name}, which {INDEX} lists; download it again"


def test_an_adapter_beside_the_weights_is_refused(copy):
    """transformers loads it on top of them, vLLM and training do not."""
    folder = copy("llama")
    (folder / "adapter_config.json").write_text("{}")
    save_file({LORA[0]: torch.ones(4)}, folder / "adapter_model.safetensors")
    assert "holds an adapter, adapter_model.safetensors, beside the weights" in refusal(folder)


def test_a_second_record_of_quantisation_is_refused(copy):
    """vLLM reads it beside config.json."""
    folder = copy("llama")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert "hf_quant_config.json, by which vLLM takes the weights for quantised" in refusal(folder)
