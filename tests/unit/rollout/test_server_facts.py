"""What a server says of itself, and what a run needs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mgrpo.moving import from_values
from mgrpo.rollout.vllm.server import server_facts
from mgrpo.rollout.vllm.server.server_facts import address_problems, config_problems, meeting_host

INFO: dict[str, Any] = {
    "vllm_config": {
        "model_config": {
            "model": "/models/small",
            "dtype": "torch.float32",
            "max_model_len": 512,
            "logprobs_mode": "processed_logprobs",
            "quantization": None,
            "skip_tokenizer_init": True,
            "max_logprobs": 20,
            "return_sampling_mask": False,
            "hf_overrides": {},
        },
        "cache_config": {"cache_dtype": "auto"},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "enable_expert_parallel": False,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "_api_process_count": 1,
        },
        "scheduler_config": {"max_num_seqs": 64, "enable_chunked_prefill": False},
        "device_config": {"device": "cpu"},
        "speculative_config": None,
        "weight_transfer_config": {"backend": "mgrpo"},
    }
}
"""Of `/server_info?config_format=json` of vLLM 0.32.0, what is looked at."""
CONFIG = {"model_dtype": "float32", "max_prompt_token_length": 256, "response_length": 256, "vllm_mode": "server"}


def problems(changed: dict[str, Any], **values: object) -> list[str]:
    """About a server that differs in these `part.name`, and a run with these settings."""
    info = copy.deepcopy(INFO)
    for name, value in changed.items():
        *parts, last = name.split("/")
        place = info["vllm_config"]
        for part in parts:
            place = place[part]
        place[last] = value
    return config_problems(info, from_values({**CONFIG, "vllm_server_base_url": ["http://127.0.0.1:1"], **values}))


def test_a_server_as_it_should_be_has_no_problem():
    assert problems({}) == []


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("model_config/logprobs_mode", "raw_logprobs", "logprobs_mode is raw_logprobs, expected processed_logprobs"),
        ("model_config/dtype", "torch.bfloat16", "computes in bfloat16, expected model_dtype=float32"),
        ("model_config/max_model_len", 511, "max_model_len is 511, expected at least max_prompt_token_length"),
        ("parallel_config/tensor_parallel_size", 4, "tensor_parallel_size is 4, expected vllm_tensor_parallel_size=1"),
        ("parallel_config/enable_expert_parallel", True, "enable_expert_parallel is true, expected vllm_enable_expert_parallel=false"),
        ("parallel_config/pipeline_parallel_size", 2, "runs with --pipeline-parallel-size 2, expected 1"),
        ("parallel_config/data_parallel_size", 2, "data_parallel_size is 2, expected vllm_data_parallel_size=1; start it with"),
        ("parallel_config/_api_process_count", 2, "runs with --api-server-count 2, expected 1"),
        ("model_config/quantization", "fp8", "quantizes weights (fp8)"),
        ("model_config/hf_overrides", {"head_dtype": "bfloat16"}, "computes logits in bfloat16, expected float32"),
        ("cache_config/cache_dtype", "fp8", "keeps keys and values in fp8, expected vllm_kv_cache_dtype=auto; start it with --kv"),
        ("speculative_config", {"method": "eagle", "model": "a/b"}, "with weights of their own (a/b), which get no updates; leave"),
        ("scheduler_config/max_num_seqs", 3, "max_num_seqs is 3, expected at least the 16 samples of a prompt"),
        ("scheduler_config/enable_chunked_prefill", True, "start it with --no-enable-chunked-prefill"),
        ("weight_transfer_config", None, "weight-transfer backend is not set, expected mgrpo; start it with MGRPO_ENGINE=1"),
        ("weight_transfer_config", {"backend": "nccl"}, "weight-transfer backend is nccl, expected mgrpo"),
    ],
)  # fmt: skip
def test_each_difference_is_one_sentence_with_a_remedy(name, value, sentence):
    """Without it the run would fail steps later, or train on log-probabilities that are not the trainer's."""
    (found,) = problems({name: value}, num_samples_per_prompt_rollout=16)
    assert sentence in found and ("start" in found or "leave" in found)


def test_a_server_on_a_gpu_may_draft_without_weights():
    drafts = {"speculative_config": {"method": "ngram", "model": "ngram"}, "device_config/device": "cuda"}
    assert problems(drafts) == []
    (found,) = problems(drafts | {"model_config/return_sampling_mask": True}, top_k=512)
    assert "known of tokens that it samples one by one" in found


def test_a_server_rounds_as_the_run_expects():
    """An 8-bit cache that the run does not know of is not corrected; logits of another type are another policy."""
    half = {"model_config/dtype": "torch.bfloat16"}
    wide = half | {"model_config/hf_overrides": {"head_dtype": "float32"}}
    cast = {"model_dtype": "bfloat16", "cast_lm_head_to_fp32": True}
    assert problems(wide, **cast) == problems(half, model_dtype="bfloat16") == []
    (found,) = problems(half, **cast)
    assert "computes logits in bfloat16, expected float32; start it with --hf-overrides" in found
    (found,) = problems(wide, model_dtype="bfloat16")
    assert "start it without head_dtype in --hf-overrides, or set cast_lm_head_to_fp32 true" in found
    for cache in ("fp8", "fp8_e4m3"):
        assert problems({"cache_config/cache_dtype": cache}, vllm_kv_cache_dtype="fp8") == []
    (found,) = problems({"cache_config/cache_dtype": "fp8_e5m2"}, vllm_kv_cache_dtype="fp8")
    assert (
        "keeps keys and values in fp8_e5m2, expected vllm_kv_cache_dtype=fp8; start it with --kv-cache-dtype fp8"
        in found
    )


def test_a_gpu_reads_prompts_in_parts():
    """Only vLLM's generator on the CPU cannot go back."""
    changed = {"scheduler_config/enable_chunked_prefill": True, "device_config/device": "cuda"}
    assert problems(changed) == []


def test_another_version_of_vllm_is_named():
    """Its names may have changed; a KeyError would be a riddle."""
    assert config_problems({"vllm_config": {"model_config": {}}}, from_values({})) == [
        "the server does not say 'parallel_config' in /server_info; this version of vLLM is not supported"
    ]


def at(*urls: str, allow_public: bool = False):
    values = {"vllm_mode": "server", "vllm_server_base_url": list(urls), "vllm_server_allow_public": allow_public}
    return from_values(values)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("10.0.0.1:8000", "expected http://HOST:PORT"),
        ("http://", "expected http://HOST:PORT"),
        ("http://host:port", "expected http://HOST:PORT"),
        ("http://127.0.0.1:8000?x=1", "expected http://HOST:PORT"),
        ("http://me:secret@127.0.0.1:8000", "must not hold a password"),
        ("http://8.8.8.8:8000", "8.8.8.8 is a public address, and who reaches it can replace the model"),
        ("https://[2001:4860:4860::8888]:8000", "is a public address"),
        ("http://[::ffff:8.8.8.8]:8000", "8.8.8.8 is a public address"),
        ("http://no-such-host.invalid:8000", "the name no-such-host.invalid is not known here"),
    ],
)
def test_an_address_that_is_wrong_or_public_is_refused(url, words):
    """vLLM's control endpoints ask for no token: a public server belongs to everyone."""
    (found,) = address_problems(at(url))
    assert found.startswith(f"vllm_server_base_url={url}: ") and words in found


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "10.1.2.3", "192.168.0.9", "100.64.1.1", "[::1]", "[fd00::1]"]
)
def test_private_addresses_are_accepted(host):
    """Among them those that clouds and overlays share between customers' machines."""
    assert address_problems(at(f"http://{host}:8000")) == []


def test_a_public_address_is_accepted_when_the_user_says_so():
    assert address_problems(at("https://8.8.8.8", allow_public=True)) == []


def test_a_name_is_judged_by_all_its_addresses(monkeypatch):
    """One public address is enough to be reached by everyone."""
    answers = [(2, 1, 6, "", ("10.0.0.1", 80)), (2, 1, 6, "", ("8.8.8.8", 80))]
    monkeypatch.setattr(server_facts.socket, "getaddrinfo", lambda *args, **kwargs: answers)
    assert "8.8.8.8 is a public address" in address_problems(at("http://engine:8000"))[0]


def test_learners_and_servers_meet_on_the_way_between_them(monkeypatch):
    """At the loopback address only where all servers are here: the others would look for rank 0 on their own machine."""
    monkeypatch.setattr(server_facts, "own_address", lambda host: f"towards {host}")
    assert meeting_host(at("http://127.0.0.1:1", "http://localhost:2")) is None
    assert meeting_host(at("http://127.0.0.1:1", "http://10.0.0.7:2")) == "towards 10.0.0.7"


def test_a_server_must_say_what_it_samples_from(tmp_path):
    """It would refuse the first prompt: its limit of 20 is vLLM's own."""
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    cut = {"model_name_or_path": str(tmp_path), "top_k": 20}
    (found,) = problems({}, **cut)
    assert "max_logprobs is 20, expected at least 36 for top_k=20" in found and "--max-logprobs 36" in found
    for enough in (36, -1):
        assert problems({"model_config/max_logprobs": enough}, **cut) == []


def test_a_server_must_return_masks_exactly_where_they_are_read(tmp_path):
    """One that does so refuses evaluations without top_k, one by one."""
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    model = {"model_name_or_path": str(tmp_path)}
    has_masks = {"model_config/return_sampling_mask": True}
    assert problems(has_masks, top_k=512, **model) == problems({}, top_k=4, **model) == []
    (found,) = problems({}, top_k=512, **model)
    assert "no sampling masks" in found and "top_k=512 needs them; start it with --return-sampling-mask" in found
    for values in ({}, {"top_k": 4}):
        (found,) = problems(has_masks, **values, **model)
        assert "start it without --return-sampling-mask" in found


@pytest.mark.parametrize(
    ("name", "value"), [("stop_strings", ["x"]), ("vllm_guided_decoding_regex", "[0-9]+")]
)  # fmt: skip
def test_a_server_that_reads_text_has_a_tokenizer(name, value):
    (found,) = problems({}, **{name: value})
    assert f"no tokenizer, needed for {name}" in found
    assert problems({"model_config/skip_tokenizer_init": False}, **{name: value}) == []
