"""Fields of config.json that vLLM reads and transformers does not: each is decided, also those that the next vLLM adds."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mgrpo.models.family import FAMILIES, shape_of
from mgrpo.models.family.engine_fields import ABSENT, ARCHITECTURES, ENGINE_FIELDS, HYBRID, ROPE_FIELDS, WINDOWED
from tests.unit.models.test_family import CLASSES, HUB, SMALL

COMMON = (
    "config/model.py",
    "config/vllm.py",
    "transformers_utils/config.py",
    "transformers_utils/model_arch_config_convertor.py",
    "v1/worker/gpu_model_runner.py",
    "v1/attention/backends/flash_attn.py",
    "v1/attention/backends/fa_utils.py",
    "model_executor/models/utils.py",
)
"""Read for every model."""
DELTA_NETS = "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
BACKEND = ("model_executor/models/transformers/base.py", "model_executor/models/transformers/causal.py")
"""Read for the families without a class in vLLM, which computes them with transformers' own modules."""
NO_MODELS = {"adapters", "interfaces", "interfaces_base", "registry", "utils", "module_mapping", "vision"}
IMAGES = {"clip", "pixtral", "siglip", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
"""Modules of image encoders, of which text models take nothing."""
RECEIVERS = {"config", "hf_config", "hf_text_config", "text_config", "pretrained_config"}
"""Names under which vLLM's code has a config.json."""


def words(text: str) -> set[str]:
    return set(text.split())


REFUSED_ELSEWHERE = words(
    """attention_bias mlp_bias attn_logit_softcapping use_bidirectional_attention quantization_config layer_types hidden_act scoring_func
    topk_method moe_layer_freq first_k_dense_replace architectures rope_parameters original_max_position_embeddings
    partial_rotary_factor"""
)
"""Keys that `refusals` decides on, or the class of the model."""
REASONS = {
    "a method, or an attribute of the class": """get get_text_config update to_diff_dict keys sub_configs standardize_rope_params
        validate_rope""",
    "the run gives it, or it is a name": "model_type dtype _attn_implementation name_or_path",
    "read with index_topk alone": """index_head_dim index_n_heads index_skip_topk_offset index_topk_freq index_topk_pattern
        indexer_rope_interleave""",
    "read with ada_rms_norm_t_cond alone": "ada_rms_norm_t_cond_dim",
    "where prompts are cut, not what is computed": "mamba_chunk_size chunk_size",
    "layers that draft, which never decide what is sampled": """num_nextn_predict_layers mtp_num_hidden_layers n_predict dflash_config
        eagle_config eagle_aux_hidden_state_layer_ids sample_from_anchor""",
    "bounds the length at the start": "model_max_length",
    "of pooling models": """embedding_size is_matryoshka matryoshka_dimensions use_pad_token use_sep_token position_embedding_type""",
    "of models with images or sound": """vision_config encoder_config mm_prefix_clamp_sliding_window max_source_positions
        mm_prefix_span_leading_pad_modulus vision_n_layers _dsv4_vl_inner language_config encoder""",
    "in vLLM's convertors of other types of models": """attention_head_dim attn_config backbone_hidden_size joint_head_config model
        multi_query new_decoder_architecture num_layers transf_decoder""",
    "precision of the state of a delta net on a GPU": "mamba_ssm_dtype",
    "in the shape of every family, or of latent attention": """tie_word_embeddings head_dim rope_theta kv_lora_rank qk_nope_head_dim
        qk_rope_head_dim""",
    "of experts, which the class counts itself: here vLLM asks whether there are any": """num_experts_per_tok moe_topk moe_top_k
        num_experts_per_token top_k_experts""",
    "of another config": "engram_layer_ids temperature trace_decode_token_ids watermarking",
}
HARMLESS = words(" ".join(REASONS.values()))
"""Keys that change nothing of what an engine computes for these families."""
NOT_TAKEN = {
    "qwen3": {"qk_norm"},
    "glm4_moe_lite": {"use_qk_norm"},
    "qwen3_5_text": words(
        """num_experts moe_intermediate_size num_experts_per_tok norm_topk_prob mlp_only_layers decoder_sparse_step
        shared_expert_intermediate_size"""
    ),
    "qwen3_5_moe_text": {"intermediate_size"},
}
"""Keys that a family's modules read in layers of another family."""
ROPE_HARMLESS = words(
    """rope_theta rope_type type factor partial_rotary_factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast
    beta_slow mscale mscale_all_dim attention_factor truncate"""
)
ROPE_ELSEWHERE = words(
    """alpha max_trained_positions mixed_b short_factor long_factor short_mscale long_mscale mrope_interleaved num_key_value_heads
    num_inv_freq fope_sep_head fope_init_factor chunk_size local_size"""
)
"""Keys of scalings that are refused, and keys that are read with mrope_section, use_fope and dual_chunk_attention_config alone."""


def vllm() -> Path:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def keys_read(node: ast.AST) -> set[str]:
    """Fields of a config that code reads: `config.key`, `getattr(config, "key")`, and lists of names that are tried in turn."""
    found = set()
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=value, attr=attr) if last_name(value) in RECEIVERS:
                found.add(attr)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[value, ast.Constant(value=key), *_]):
                is_text = isinstance(value, ast.Call) and last_name(value.func) == "get_text_config"
                if last_name(value) in RECEIVERS or is_text:
                    found.add(key)
            case ast.Assign(targets=[ast.Name(id="names")], value=ast.List(elts=elements)):
                found |= {each.value for each in elements if isinstance(each, ast.Constant)}
            case ast.AnnAssign(target=ast.Name(id="_CONFIG_ATTRS_MAPPING"), value=ast.Dict(keys=keys)):
                found |= {each.value for each in keys if isinstance(each, ast.Constant)}
    return found


def model_modules(module: str, known: set[str] | None = None) -> set[str]:
    """A module of vLLM's models with those that it imports."""
    known = set() if known is None else known
    path = vllm() / f"model_executor/models/{module}.py"
    if module in known or module in NO_MODELS | IMAGES or not path.is_file():
        return known
    known.add(module)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            name = node.module if node.level == 1 else node.module.removeprefix("vllm.model_executor.models.")
            model_modules(name, known)
    return known


def registered() -> dict[str, str]:
    """The module of vLLM that has the class of each architecture."""
    found = {}
    for node in ast.walk(tree(vllm() / "model_executor/models/registry.py")):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                match key, value:
                    case ast.Constant(value=str(name)), ast.Tuple(elts=[ast.Constant(value=str(module)), *_]):
                        found.setdefault(name, module)
    return found


def adjusting_classes(architecture: str) -> Iterator[ast.ClassDef]:
    """Classes in vLLM's `models/config.py` that adjust a config of this architecture."""
    body = tree(vllm() / "model_executor/models/config.py")
    classes = {node.name: node for node in body.body if isinstance(node, ast.ClassDef)}
    maps = [node for node in ast.walk(body) if isinstance(node, ast.Dict)]
    named = {
        key.value: value.id
        for node in maps
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Name)
    }
    name = named.get(architecture)
    while name in classes:
        yield classes[name]
        name = next((base.id for base in classes[name].bases if isinstance(base, ast.Name)), None)


def read_in_vllm(family: str) -> set[str]:
    architecture = ARCHITECTURES[family]
    module = registered()[architecture]
    own = [f"model_executor/models/{name}.py" for name in model_modules(module)]
    files = [*COMMON, *(BACKEND if module == "transformers" else own), *([DELTA_NETS] if family in HYBRID else [])]
    found = set().union(*(keys_read(tree(vllm() / file)) for file in files))
    return found.union(*map(keys_read, adjusting_classes(architecture)))


def read_in_transformers(family: str) -> set[str]:
    """Fields of the family's own class, without those that every class has."""
    import transformers

    config = transformers.CONFIG_MAPPING[CLASSES.get(family, family)]
    common = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    return ({field.name for field in dataclasses.fields(config)} | set(config.attribute_map)) - common


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_vllm_reads_is_decided(family):
    """A field of the next vLLM that transformers ignores is another model in the engine, and no metric is compared with anything."""
    decided = {key for key, field in ENGINE_FIELDS.items() if family in field.families}
    known = read_in_transformers(family) | decided | HARMLESS | REFUSED_ELSEWHERE | NOT_TAKEN.get(family, set())
    undecided = read_in_vllm(family) - known
    assert not undecided, (
        f"decide in mgrpo/models/family/engine_fields.py, or in this test why not: {sorted(undecided)}"
    )


def test_nothing_is_decided_that_vllm_does_not_read():
    """Tables that grow with every version hide what they are for."""
    read = {family: read_in_vllm(family) for family in FAMILIES}
    assert not HARMLESS - set().union(*read.values())
    for key, field in ENGINE_FIELDS.items():
        assert all(key in read[family] for family in field.families), key
    assert all(keys <= read[family] for family, keys in NOT_TAKEN.items())


def test_every_field_of_a_rope_record_that_vllm_reads_is_decided():
    """The same one floor below."""
    node = tree(vllm() / "model_executor/layers/rotary_embedding/__init__.py")
    found = set()
    for part in ast.walk(node):
        match part:
            case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[ast.Constant(value=key), *_]):
                found |= {key} if last_name(value) == "rope_parameters" else set()
            case ast.Subscript(value=value, slice=ast.Constant(value=key)) if last_name(value) == "rope_parameters":
                found.add(key)
            case ast.Compare(left=ast.Constant(value=key), ops=[ast.In()], comparators=[value]):
                found |= {key} if last_name(value) == "rope_parameters" else set()
            case ast.Compare(left=ast.Name(id="k"), ops=[ast.In()], comparators=[ast.Tuple(elts=elements)]):
                found |= {each.value for each in elements if isinstance(each, ast.Constant)}
    assert {"rope_dim", "mrope_section", "rope_theta"} <= found
    assert not found - ROPE_HARMLESS - ROPE_ELSEWHERE - ROPE_FIELDS.keys()


def test_the_source_is_read_where_the_known_faults_were():
    """A reader of the source that finds nothing would agree with everything."""
    assert {"is_causal", "logit_scale", "qkv_bias", "sliding_window"} <= read_in_vllm("llama")
    assert {"dual_chunk_attention_config", "qk_norm"} <= read_in_vllm("qwen2")
    assert {"index_topk", "llama_4_scaling"} <= read_in_vllm("deepseek_v3")
    assert {"logit_scale", "final_logit_softcapping"} <= read_in_vllm("seed_oss")
    assert {"rotary_pct", "rotary_emb_base"} <= read_in_vllm("llama")


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_that_transformers_reads_are_not_refused(family):
    """A window of a Mistral is its own; `norm_topk_prob` and the like are read by the shape in the families that have them."""
    refused = {key for key, field in ENGINE_FIELDS.items() if family in field.families}
    assert not refused & read_in_transformers(family)
    assert (family in WINDOWED) == ("sliding_window" in read_in_transformers(family))


def test_classes_are_those_of_transformers():
    """vLLM goes by `architectures`."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    for family, name in ARCHITECTURES.items():
        assert NAMES[CLASSES.get(family, family)] == name
        assert hasattr(transformers, name)
    assert ARCHITECTURES.keys() == FAMILIES.keys()


LLAMA = SMALL | {"model_type": "llama", "num_key_value_heads": 2}
QWEN2 = SMALL | {"model_type": "qwen2"}
DUAL = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LLAMA | {"sliding_window": 16},
            "sliding_window=16 .vLLM reads it, transformers ignores it in this family; take it",
        ),
        (SMALL | HUB["glm 4.5 air"] | {"sliding_window": 16}, "sliding_window=16"),
        (LLAMA | {"sliding_window": 0}, "sliding_window=0 "),
        (LLAMA | {"quantization_config": {}}, "quantization_config .export the weights unquantised"),
        (LLAMA | {"logit_scale": 0.0625}, "logit_scale=0.0625"),
        (LLAMA | {"is_causal": False}, "is_causal=False"),
        (LLAMA | {"bias": True}, "bias=True"),
        (LLAMA | {"rotary_pct": 0.5}, "rotary_pct=0.5"),
        (LLAMA | {"head_dtype": "float32"}, "head_dtype='float32'"),
        (LLAMA | {"rope_scaling": {"rope_type": "default", "rope_dim": 8}}, "RoPE with rope_dim=8"),
        (
            LLAMA | {"architectures": ["LlamaBidirectionalModel"]},
            r"architectures=\['LlamaBidirectionalModel'\] .vLLM goes by",
        ),
        (LLAMA | {"architectures": ["MistralForCausalLM"]}, "architectures"),
        (QWEN2 | {"dual_chunk_attention_config": DUAL}, "dual_chunk_attention_config={'chunk_size': 262144"),
        (
            QWEN2 | {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [4, 6, 6]}},
            r"RoPE with mrope_section=\[4, 6, 6\] .*take it out of config.json",
        ),
        (SMALL | HUB["deepseek v3"] | {"index_topk": 2048}, "index_topk=2048"),
        (SMALL | HUB["olmo 2 7B"] | {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        (SMALL | HUB["qwen3 30B-A3B"] | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        (SMALL | HUB["deepseek v3"] | {"per_layer_config": {"0": {}}}, "per_layer_config"),
        (SMALL | HUB["glm 4.7 flash"] | {"first_k_dense_replace": 3}, "first_k_dense_replace=3 with 1 dense layers"),
        (
            SMALL | {"model_type": "seed_oss", "attention_out_bias": True, "attention_bias": False},
            "attention_out_bias=true with attention_bias=false",
        ),
    ],
)
def test_fields_that_only_the_engine_reads_are_refused(config, message):
    """The engine would sample from another model than the one that is trained, or end after all checks have passed."""
    with pytest.raises(ValueError, match=message):
        shape_of(config)


HARMLESS_VALUES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"sliding_window": None, "is_causal": True, "logit_scale": 1.0, "architectures": ["LlamaForCausalLM"]}),
    (LLAMA, {"pretraining_tp": 1, "unknown_to_all": {"a": 1}, "head_dtype": None, "qkv_bias": False}),
    (QWEN2, {"dual_chunk_attention_config": None, "sliding_window": 131072, "use_sliding_window": False}),
    (QWEN2, {"rope_scaling": {"type": "default", "rope_type": "default"}}),
    (SMALL | HUB["kimi k2"], {"architectures": ["DeepseekV3ForCausalLM"]}),
]


@pytest.mark.parametrize(("config", "more"), HARMLESS_VALUES)
def test_values_that_change_nothing_are_accepted(config, more):
    """Half of what publishers write into config.json says that a feature is off."""
    assert shape_of(config | more) == shape_of(config)


@pytest.mark.parametrize("key", [key for key, field in ENGINE_FIELDS.items() if field.harmless != ABSENT])
def test_harmless_values_are_accepted_in_every_family(key):
    """By the table itself: `None` and what stands for "off"."""
    field = ENGINE_FIELDS[key]
    for name, config in HUB.items():
        if config["model_type"] in field.families:
            for value in field.harmless:
                assert shape_of(SMALL | config | {key: value}), (name, key, value)
