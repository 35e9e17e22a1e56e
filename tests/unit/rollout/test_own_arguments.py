"""vLLM's own arguments, and drafting: what may be given is, and what would sample from another policy is refused."""

from __future__ import annotations

import json
import re
import sys

import pytest

from mgrpo.config.derived import untold_routes
from mgrpo.moving import from_values
from mgrpo.rollout import drafts
from mgrpo.rollout.vllm import engine_arguments


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", None),
        ('{"max_num_batched_tokens": 8192, "attention_backend": "FLASH_ATTN"}', None),
        ('{"kv_cache_dtype": "fp8"}', "cannot hold kv_cache_dtype: use vllm_kv_cache_dtype"),
        ('{"hf_overrides": {"head_dtype": "float32"}}', "for head_dtype use cast_lm_head_to_fp32"),
        (
            '{"max_num_batch_tokens": 1}',
            "has max_num_batch_tokens, which .* does not know; it knows max_num_batched_tokens",
        ),
        ('{"zzz": 1}', "has zzz, .* it knows .*async_scheduling, .*, worker_extension_cls"),
        ('{"seed": 1}', "cannot hold seed: use seed"),
        ('{"max_num_seqs": 1}', "cannot hold max_num_seqs: use vllm_max_num_seqs"),
        ("[1]", "expected a JSON object"),
        ("{max", "is not JSON"),
    ],
)
def test_vllms_own_arguments_are_checked_before_an_engine_starts(text, words):
    """vLLM would refuse an unknown one after Ray and the engines' imports; one of ours would break the weight sync."""
    had_vllm = "vllm" in sys.modules  # of another test
    found = engine_arguments.extra_problems(text)
    assert len(found) == (words is not None) and all(re.search(words, sentence) for sentence in found)
    assert had_vllm or "vllm" not in sys.modules


OWN_WEIGHTS = "the weight sync"
OWN_MODEL = "the engine samples from the model that is trained"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("dtype", "float16", "use model_dtype"),
        ("tensor_parallel_size", 2, "use vllm_tensor_parallel_size"),
        ("logprobs_mode", "raw_logprobs", "needs processed_logprobs"),
        ("quantization", "fp8", OWN_WEIGHTS),
        ("quantization_config", {"linear": "fp8_per_block"}, OWN_WEIGHTS),
        ("load_format", "dummy", OWN_WEIGHTS),
        ("model_impl", "transformers", OWN_WEIGHTS),
        ("enable_lora", True, "use use_peft and lora_sync"),
        ("max_lora_rank", 16, "use use_peft and lora_sync"),
        ("cpu_offload_gb", 4, OWN_WEIGHTS),
        ("worker_cls", "a.B", OWN_WEIGHTS),
        ("disable_sliding_window", True, OWN_MODEL),
        ("enable_expert_parallel", True, "use vllm_enable_expert_parallel"),
        ("data_parallel_size", 2, "use vllm_data_parallel_size"),
        ("data_parallel_rpc_port", 2, "it follows from where the engine's copies"),
        ("enable_eplb", True, "where vLLM places it by default"),
        ("expert_placement_strategy", "round_robin", "where vLLM places it by default"),
        ("logits_processors", ["a:B"], "model's own logits"),
        ("watermark_config", {}, "model's own logits"),
        ("prefill_context_parallel_size", 2, "use vllm_tensor_parallel_size"),
        ("nnodes", 2, "use ray_address"),
    ],
)
def test_an_argument_that_would_make_the_engine_another_policy_is_refused(name, value, reason):
    """Weights would be written where nothing reads them, or the engine would sample from another distribution."""
    (sentence,) = engine_arguments.extra_problems(json.dumps({name: value}))
    assert sentence.startswith(f"vllm_extra_args cannot hold {name}: ") and reason in sentence


@pytest.mark.parametrize(
    ("method", "values", "on_gpu", "has_states", "words"),
    [
        ("ngram", {}, False, False, None),
        ("suffix", {}, True, True, None),
        ("ngram", {"top_k": 8}, True, False, "with top_k=8: what the engine samples from is known of tokens"),
        ("ngram", {"routing_replay": "rollout"}, True, False, "use routing_replay=learner"),
        ("ngram", {}, False, True, "cannot go back to the last accepted token"),
    ],
)
def test_tokens_are_drafted_without_weights(method, values, on_gpu, has_states, words, monkeypatch):
    """A second model would stay that of the first step, and fewer of its drafts be right with every step."""
    monkeypatch.setattr(drafts, "find_spec", lambda module: object())
    config = from_values({"vllm_speculative_method": method, "vllm_num_speculative_tokens": 5, **values})
    found = list(drafts.draft_problems(config, on_gpu=on_gpu, has_states=has_states))
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)
    given = drafts.draft_args(config)["speculative_config"]
    assert (given.get("suffix_decoding_max_cached_requests") == 2**24 // 256) == (method == "suffix")
    assert (given["method"], given["num_speculative_tokens"]) == (method, 5) and not drafts.draft_args(from_values({}))


def test_an_engine_that_drafts_is_not_asked_for_its_experts_by_default():
    """It would say them of fewer tokens than it samples, and die of that."""
    for method, is_asked in (("none", True), ("ngram", False)):
        config = from_values({"vllm_speculative_method": method})
        assert (untold_routes(config, on_gpu=False) == "") == is_asked


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_method_whose_package_is_missing_is_refused(method, monkeypatch):
    """An engine would say so when it has started, minutes later."""
    monkeypatch.setattr(drafts, "find_spec", lambda module: None)
    config = from_values({"vllm_speculative_method": method})
    (sentence,) = drafts.draft_problems(config, on_gpu=True, has_states=False)
    assert sentence.startswith(f"vllm_speculative_method={method} needs a package") and "pip install" in sentence


def test_what_drafts_with_weights_of_its_own_is_refused_on_servers():
    """By vLLM's words: a method, a model, or a model's name in the place of a method."""
    assert not drafts.second_model({"method": "ngram"}) and not drafts.second_model({"model": "ngram"})
    assert drafts.second_model({"method": "eagle3", "model": "owner/draft"}) == "owner/draft"
    assert drafts.second_model({"method": "ngram", "model": "owner/draft"}) == "owner/draft"
    assert drafts.second_model({"method": "mtp"}) == "mtp"


def test_only_arguments_that_vllm_has_are_refused_by_name():
    """A misspelled one would let the real one pass."""
    assert engine_arguments.OWNED.keys() <= engine_arguments._known_args()


def test_vllms_own_arguments_take_the_place_of_defaults():
    """They are there to work round what the defaults do; all others have settings of their own."""
    values = {"model_name_or_path": "m", "stop_strings": ["x"], "vllm_tensor_parallel_size": 2}
    free = {"disable_log_stats", "moe_backend", "max_num_batched_tokens", "block_size", "enable_chunked_prefill"}
    free.add("compilation_config")
    for on_gpu in (False, True):
        given = {"block_size": 64, "max_num_batched_tokens": 100}
        args = engine_arguments.engine_args(
            from_values({**values, "vllm_extra_args": json.dumps(given)}), on_gpu=on_gpu
        )
        assert args | given == args
        assert args.keys() - free <= engine_arguments.OWNED.keys()
