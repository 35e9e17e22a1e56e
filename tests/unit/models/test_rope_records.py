"""RoPE of a config.json that has records in two forms or in several places: transformers' rule of the family, or a refusal."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import transformers

from mgrpo.models.family import FAMILIES, shape_of
from mgrpo.models.rope import Rope, table_positions
from tests.unit.models.test_family import CLASSES, DEEPSEEK_V3, SMALL

QWEN3 = SMALL | {"model_type": "qwen3", "max_position_embeddings": 32768}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
NEEDED = {
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
    **{family: {"num_key_value_heads": 4} for family in ("deepseek_v3", "kimi_k2", "glm4_moe_lite")},
}
BY_LAYER_TYPE = ("olmo3", "gemma3_text")


def theirs(config: dict[str, Any]) -> Any:
    """transformers' own configuration."""
    family = config["model_type"]
    return transformers.AutoConfig.for_model(**copy.deepcopy(config) | {"model_type": CLASSES.get(family, family)})


def as_transformers_reads(record: dict[str, Any]) -> tuple[Any, ...]:
    """Base, type and scaling of one of its records."""
    kind = record["rope_type"]
    scaling = () if kind == "default" else (record["factor"],)
    original = (record["original_max_position_embeddings"],) if kind in ("llama3", "yarn") else ()
    return record["rope_theta"], kind, *scaling, *original


def as_built(rope: Rope) -> tuple[Any, ...]:
    scaling = () if rope.scaling == "default" else (rope.factor,)
    original = (rope.original_positions,) if rope.scaling in ("llama3", "yarn") else ()
    return rope.theta, rope.scaling, *scaling, *original


def random_record(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["default", "linear", "llama3", "yarn"])
    record: dict[str, Any] = {rng.choice(["rope_type", "rope_type", "type"]): kind}
    if kind != "default":
        record["factor"] = rng.choice([2.0, 4.0])
    if kind == "llama3":
        record |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind in ("llama3", "yarn") and rng.random() < 0.6:
        record["original_max_position_embeddings"] = rng.choice([64, 128])
    if rng.random() < 0.5:
        record["rope_theta"] = rng.choice([500.0, 7000.0])
    return {} if rng.random() < 0.1 else record


def random_config(rng: random.Random, family: str) -> dict[str, Any]:
    """Records in both forms, in one or none, and bases in all of their places."""
    config = SMALL | {"model_type": family} | NEEDED.get(family, {})
    if rng.random() < 0.5:
        config["rope_theta"] = rng.choice([1e6, 300.0])
    if rng.random() < 0.1:
        config["rope_local_base_freq"] = 222.0
    if rng.random() < 0.1:
        config["original_max_position_embeddings"] = 96
    if rng.random() < 0.6:
        config["rope_scaling"] = rng.choice([None, {}, *(random_record(rng) for _ in range(3))])
    if rng.random() < 0.7:
        full, sliding = random_record(rng), random_record(rng)
        nested = [{"full_attention": full, "sliding_attention": sliding}, {"full_attention": full}]
        nested += [{"sliding_attention": sliding}, {"full_attention": None, "sliding_attention": sliding}]
        config["rope_parameters"] = rng.choice([None, {}, random_record(rng), random_record(rng), *nested])
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_two_records_are_read_as_transformers_reads_them(family):
    """A record that the engine prefers and the learner does not is another model in every token after the first."""
    rng, equal = random.Random(family), 0
    for _ in range(200):
        config = random_config(rng, family)
        try:
            shape = shape_of(config)
        except ValueError:
            continue
        own = theirs(config)
        records = own.rope_parameters
        kinds = own.layer_types if family in BY_LAYER_TYPE else [None] * shape.num_layers
        expected = [as_transformers_reads(records[kind] if kind else records) for kind in kinds]
        assert [as_built(rope) for rope in shape.ropes] == expected, config
        equal += 1
    assert equal > 60, "nearly everything is refused"


@pytest.mark.parametrize(
    ("config", "rope"),
    [
        # transformers 5 wrote `rope_parameters`; the lines of the model card were added for longer texts.
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
            (1e6, "yarn", 4.0, 64),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN}, (1e4, "yarn", 4.0, 64)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}, "rope_scaling": {}}, (1e6, "linear", 2.0)),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            (1e4, "linear", 2.0),
        ),
        ({"rope_parameters": {**YARN, "rope_theta": 5e5}, "rope_scaling": {"rope_theta": 7e3}}, (7e3, "default")),
    ],
)  # fmt: skip
def test_a_scaling_replaces_the_flat_record(config, rope):
    """By hand, the cases that users make; `table_positions` bounds what an engine may be asked for."""
    shape = shape_of(QWEN3 | config)
    assert as_built(shape.ropes[0]) == rope == as_transformers_reads(theirs(QWEN3 | config).rope_parameters)
    assert table_positions(QWEN3 | config) == (256 if rope[1] == "yarn" else None)


def test_latent_attention_scales_its_scores_by_the_record_that_holds():
    """The scale of scores comes from yarn as well."""
    plain = DEEPSEEK_V3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    yarn = {key: value for key, value in plain.items() if key != "rope_parameters"}
    assert shape_of(SMALL | plain).attention_scale == shape_of(SMALL | yarn).attention_scale
    assert shape_of(SMALL | plain).attention_scale > shape_of(SMALL | plain | {"rope_scaling": None}).attention_scale


def test_each_type_of_layer_keeps_its_own_record():
    """A scaling is laid over the full-attention record alone."""
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default"},
    }
    scaled = {"rope_parameters": both, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for family, base in (("gemma3_text", 1e4), ("olmo3", 5e5)):
        shape = shape_of(SMALL | {"model_type": family} | scaled)
        assert {as_built(rope) for rope in shape.ropes} == {(1e6, "linear", 8.0), (base, "default")}


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("qwen3", {"rope_parameters": {"full_attention": YARN}}, "records of their own for full_attention"),
        (
            "llama",
            {"rope_parameters": {"full_attention": YARN, "sliding_attention": {}}},
            "records of their own for full_att",
        ),
        ("gemma3_text", {"rope_parameters": YARN}, "one record for all layers"),
        ("olmo3", {"rope_parameters": {"sliding_attention": {}}, "rope_scaling": YARN}, "without full_attention"),
        ("olmo3", {"rope_scaling": {"type": "yarn", "factor": 8.0}}, "rope_type 'default' and type 'yarn'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}},
            "rope_type 'yarn' and type 'lin",
        ),
        ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 4096}, "=4096 beside 64 in the record"),
        ("qwen3", {"rope_scaling": {"full_attention": YARN}}, "rope_scaling with records of their own for full_attention"),
        ("gemma3_text", {"rope_scaling": {"full_attention": YARN}}, "in rope_parameters alone"),
        ("qwen3", {"rope_theta": None}, "RoPE with rope_theta=None .expected numbers above 0"),
        ("qwen3", {"rope_theta": 0}, "rope_theta=0 "),
        ("qwen3", {"rope_theta": "500"}, "rope_theta='500'"),
        ("llama", {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta=None"),
        ("gemma3_text", {"rope_local_base_freq": None}, "rope_theta=None"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2.0"}}, "RoPE with factor='2.0'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": True}}, "RoPE with factor=True"),
        ("qwen3", {"rope_scaling": {**YARN, "original_max_position_embeddings": None}}, "original_max_position_embeddings=None"),
        ("qwen3", {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings=0"),
        ("qwen3", {"rope_scaling": {**YARN, "rope_type": None, "type": "yarn"}}, "rope_type None .expected one of default"),
        ("qwen3", {"rope_scaling": {**YARN, "rope_type": ""}}, "rope_type ''"),
        ("llama", {"rope_scaling": [1]}, r"has rope_scaling=\[1\]; expected an object"),
        ("llama", {"rope_parameters": "yarn"}, "has rope_parameters='yarn'; expected an object"),
    ],
)  # fmt: skip
def test_records_that_nobody_reads_alike_are_refused(family, config, words):
    """transformers cannot load some of them, and vLLM reads or refuses others."""
    with pytest.raises(ValueError, match=words):
        shape_of(SMALL | {"model_type": family} | config)
