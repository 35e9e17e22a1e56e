"""Checks of a server for a run: the arguments that it was started with, and its address."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mgrpo.config.schema import MOST_KEPT, Config
from mgrpo.models.cuts import num_experts
from mgrpo.models.hf_config import read_hf_config
from mgrpo.processes.address import own_address
from mgrpo.rollout.drafts import second_model
from mgrpo.rollout.vllm.kept_sets import num_logprobs

_SAME_CACHE = {"fp8_e4m3": "fp8"}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class TextSample(NamedTuple):
    """A text, and the policy's tokens of it."""

    text: str
    tokens: Sequence[int]


def config_problems(info: Mapping[str, Any], config: Config) -> list[str]:
    """Problems of the server's arguments for the run.

    Args:
        info: the answer to `/server_info?config_format=json`.
    """
    try:
        return list(_differences(info["vllm_config"], config))
    except (KeyError, TypeError, AttributeError) as err:
        return [f"the server does not say {err} in /server_info; this version of vLLM is not supported"]


def _differences(found: Mapping[str, Any], config: Config) -> Iterator[str]:
    model, parallel, scheduler = found["model_config"], found["parallel_config"], found["scheduler_config"]
    backend = (found["weight_transfer_config"] or {}).get("backend")
    if backend != "mgrpo":
        yield (
            f"the server's weight-transfer backend is {backend or 'not set'}, expected mgrpo; start it with MGRPO_ENGINE=1 and "
            """--weight-transfer-config '{"backend": "mgrpo"}', from an environment that has mgrpo"""
        )
    if model["logprobs_mode"] != "processed_logprobs":
        yield (
            f"the server's logprobs_mode is {model['logprobs_mode']}, expected processed_logprobs, which take the temperature "
            "into account as the trainer does; start it with --logprobs-mode processed_logprobs"
        )
    dtype, wanted = str(model["dtype"]).removeprefix("torch."), config.model.model_dtype
    if dtype != wanted:
        yield f"the server computes in {dtype}, expected model_dtype={wanted}; start it with --dtype {wanted}, or change model_dtype"
    yield from _rounding(found, config)
    if model["max_model_len"] < config.max_model_length:
        yield (
            f"the server's max_model_len is {model['max_model_len']}, expected at least max_prompt_token_length + response_length "
            f"= {config.max_model_length}; start it with --max-model-len {config.max_model_length}, or lower them"
        )
    workers = config.engine.vllm_tensor_parallel_size
    if parallel["tensor_parallel_size"] != workers:
        yield (
            f"the server's tensor_parallel_size is {parallel['tensor_parallel_size']}, expected vllm_tensor_parallel_size="
            f"{workers}; start it with --tensor-parallel-size {workers}, or change vllm_tensor_parallel_size"
        )
    is_shared_out = config.engine.vllm_enable_expert_parallel
    if parallel["enable_expert_parallel"] != is_shared_out:
        yield (
            f"the server's enable_expert_parallel is {str(not is_shared_out).lower()}, expected vllm_enable_expert_parallel="
            f"{str(is_shared_out).lower()}; start it with{'' if is_shared_out else 'out'} --enable-expert-parallel, or change it"
        )
    copies = config.engine.vllm_data_parallel_size
    if parallel["data_parallel_size"] != copies:
        yield (
            f"the server's data_parallel_size is {parallel['data_parallel_size']}, expected vllm_data_parallel_size={copies}; start it "
            f"with --data-parallel-size {copies}, or change vllm_data_parallel_size; a server for each copy of the whole model has 1"
        )
    if parallel["pipeline_parallel_size"] != 1:
        yield f"the server runs with --pipeline-parallel-size {parallel['pipeline_parallel_size']}, expected 1; start it without"
    if parallel["_api_process_count"] != 1:
        yield (
            f"the server runs with --api-server-count {parallel['_api_process_count']}, expected 1; start it with "
            "--api-server-count 1, because one process must tell all cores of the engine to pause"
        )
    if model["quantization"] is not None:
        yield f"the server quantizes weights ({model['quantization']}), but receives them in {wanted}; leave --quantization out"
    yield from _drafts(found, config)
    samples = max(config.rollout.num_samples_per_prompt_rollout, config.rollout.eval_pass_at_k)
    if scheduler["max_num_seqs"] < samples:
        yield (
            f"the server's max_num_seqs is {scheduler['max_num_seqs']}, expected at least the {samples} samples of a prompt; "
            f"start it with --max-num-seqs {config.engine.vllm_max_num_seqs}"
        )
    readers = {
        "stop_strings": config.rollout.stop_strings,
        "vllm_guided_decoding_regex": config.rollout.vllm_guided_decoding_regex,
        "agent": config.agent.agent,
    }
    for name, value in readers.items():
        if value and model["skip_tokenizer_init"]:
            yield f"the server has no tokenizer, needed for {name}; start it without --skip-tokenizer-init"
    if config.rollout.is_cut and 0 <= model["max_logprobs"] < (least := num_logprobs(config)):
        yield (
            f"the server's max_logprobs is {model['max_logprobs']}, expected at least {least} for top_k={config.rollout.top_k}, "
            f"so that it can say what it samples from; start it with --max-logprobs {least}, or lower top_k"
        )
    replays = config.parallel.routing_replay == "rollout" and num_experts(read_hf_config(config.model_path))
    if replays and not found["aux_output_config"]["enable_return_routed_experts"]:
        yield (
            "the server does not say which experts it has chosen, which routing_replay=rollout needs; start it with "
            "--enable-return-routed-experts, or use routing_replay=none"
        )
    if model["return_sampling_mask"] != config.rollout.needs_masks:
        yield (
            f"the server returns no sampling masks, which say what it samples from, and top_k={config.rollout.top_k} needs them; "
            f"start it with --return-sampling-mask, on GPUs, or use top_k <= {MOST_KEPT}"
            if config.rollout.needs_masks
            else "the server returns sampling masks, and refuses what is sampled without top_k or greedily; start it without "
            "--return-sampling-mask"
        )
    if found["device_config"]["device"] == "cpu" and scheduler["enable_chunked_prefill"]:
        yield (
            "the server reads prompts in parts, after which vLLM cannot seed a request on a CPU; start it with "
            f"--no-enable-chunked-prefill --max-num-batched-tokens {max(4096, model['max_model_len'])}"
        )


def _drafts(found: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Problems of speculative decoding."""
    drafts = found["speculative_config"]
    if drafts is None:
        return
    if model := second_model(drafts):
        yield (
            f"the server drafts tokens with weights of their own ({model}), which get no updates; leave --speculative-config out, or use "
            "its method ngram or suffix"
        )
    elif config.rollout.is_cut:
        yield (
            f"the server drafts tokens, and what it samples from with top_k={config.rollout.top_k} is known of tokens that it samples one by "
            "one; leave --speculative-config or top_k out"
        )


def _rounding(found: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Problems of the precision of logits, keys and values."""
    overrides, dtype = found["model_config"]["hf_overrides"], config.model.model_dtype
    head = overrides.get("head_dtype") if isinstance(overrides, dict) else None
    if head in (None, "model"):
        head = dtype
    wanted = "float32" if config.model.cast_lm_head_to_fp32 else dtype
    if head != wanted:
        is_wide = wanted != dtype
        yield (
            f"the server computes logits in {head}, expected {wanted}; start it "
            + (
                """with --hf-overrides '{"head_dtype": "float32"}'"""
                if is_wide
                else "without head_dtype in --hf-overrides"
            )
            + f", or set cast_lm_head_to_fp32 {str(not is_wide).lower()}"
        )
    cache, asked = found["cache_config"]["cache_dtype"], config.engine.vllm_kv_cache_dtype
    if _SAME_CACHE.get(cache, cache) != _SAME_CACHE.get(asked, asked):
        yield (
            f"the server keeps keys and values in {cache}, expected vllm_kv_cache_dtype={asked}; start it with "
            f"--kv-cache-dtype {asked}, or change vllm_kv_cache_dtype"
        )


def address_problems(config: Config) -> list[str]:
    """Problems of the servers' addresses; sends them nothing."""
    allow_public = config.engine.vllm_server_allow_public
    policy, teachers = config.engine.vllm_server_base_url, config.distillation.teacher_server_base_url
    return [
        *(
            f"vllm_server_base_url={url}: {problem}"
            for url in policy
            for problem in _address_problems(url, "MGRPO_VLLM_SERVER_TOKEN", None if allow_public else _IN_PUBLIC)
        ),
        *(
            f"teacher_server_base_url={url}: {problem}"
            for url in teachers
            for problem in _address_problems(
                url, "MGRPO_TEACHER_SERVER_TOKEN", None if allow_public else _READ_IN_PUBLIC
            )
        ),
    ]


_IN_PUBLIC = (
    "is a public address, and who reaches it can replace the model and run code on the server, which asks nobody for a password there; put "
    "the server into a private network, or, behind a proxy that asks for one (docs/servers.md), set vllm_server_allow_public true"
)
_READ_IN_PUBLIC = (
    "is a public address, and whoever answers there decides what is learned, and reads all prompts and completions; put the server into a "
    "private network, or, if it is meant, set vllm_server_allow_public true"
)


def _address_problems(url: str, token: str, in_public: str | None) -> Iterator[str]:
    """
    Args:
        in_public: the problem of a public address; None: public addresses are allowed.
    """
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        is_whole = is_whole and (parts.port is None or parts.port > 0)
    except ValueError:
        is_whole = False
    if not is_whole:
        yield "expected http://HOST:PORT or https://HOST:PORT"
    elif parts.username is not None:
        yield f"an address must not hold a password, which would be printed; set {token} instead"
    else:
        try:
            public = [address for address in _addresses(_host(url)) if address.is_global]
        except OSError as err:
            yield f"the name {parts.hostname} is not known here ({err}); correct it"
            return
        if public and in_public:
            yield f"{public[0]} {in_public}"


def _addresses(host: str) -> list[Address]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    read = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    return [getattr(address, "ipv4_mapped", None) or address for address in read]


def meeting_host(config: Config) -> str | None:
    """This machine's address for the servers; None: all of them run on this machine.

    Raises:
        OSError: the servers cannot be reached from here.
    """
    elsewhere = host_elsewhere(config)
    return None if elsewhere is None else own_address(elsewhere)


def host_elsewhere(config: Config) -> str | None:
    """The first host of a server that may be another machine than this one."""
    return next((host for url in config.engine.vllm_server_base_url if not _is_here(host := _host(url))), None)


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def _is_here(host: str) -> bool:
    try:
        return all(address.is_loopback for address in _addresses(host))
    except OSError:
        return False
