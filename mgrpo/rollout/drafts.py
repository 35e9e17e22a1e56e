"""Speculative decoding: an engine drafts several tokens from those so far, and the model verifies them at once.

Accepted tokens have the model's distribution (Leviathan et al., arXiv:2211.17192) and its log-probabilities. The methods have no
weights, or those of the model's own heads in its checkpoint, which are not trained: a weight sync writes only the embedding and LM
head that they share with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mgrpo.config.schema import Config
from mgrpo.models.adapters import are_apart
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.hf_files.weight_files import head_files

ARGUMENTS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Arguments of vLLM that turn on speculative decoding."""
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""vLLM's names of methods that draft from the tokens so far."""
PACKAGES = {
    "ngram": ("numba", "pip install numba==0.65.0"),
    "suffix": (
        "arctic_inference",
        "pip install nanobind==2.9.2 && pip install --no-deps --no-build-isolation -r requirements/suffix.txt",
    ),
}
"""Module that a method needs besides vLLM, and the command that installs its version for vLLM 0.32."""
NGRAMS = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Lengths of the n-grams that are searched in the tokens so far. vLLM's defaults, 5 and 5, rarely match in an answer."""
HEADS_WORKER = "mgrpo.sync.vllm_plugin.draft_heads.DraftingWorker"
"""Base class of vLLM's workers of an engine with method mtp."""
ANSWER_TOKENS = 1 << 24
"""Most tokens of the earlier answers that `suffix` searches; it keeps them in the host's memory, at 280 bytes a token. vLLM's default
limit is 10,000 answers of any length."""


def draft_args(config: Config) -> dict[str, Any]:
    """Arguments of vLLM for speculative decoding."""
    method = config.engine.vllm_speculative_method
    if method == "none":
        return {}
    drafts = {"method": method, "num_speculative_tokens": config.engine.vllm_num_speculative_tokens}
    if method == "mtp":
        return {"speculative_config": drafts, "worker_extension_cls": HEADS_WORKER}
    if method == "ngram":
        drafts |= NGRAMS
    else:
        drafts["suffix_decoding_max_cached_requests"] = max(
            config.engine.vllm_max_num_seqs, ANSWER_TOKENS // config.rollout.response_length
        )
    return {"speculative_config": drafts}


def draft_problems(config: Config, *, on_gpu: bool, has_states: bool) -> Iterator[str]:
    """Problems of speculative decoding in engines that a run starts on this machine.

    Args:
        has_states: the model has gated delta nets.
    """
    method, rollout = config.engine.vllm_speculative_method, config.rollout
    if method == "none":
        return
    name = f"vllm_speculative_method={method}"
    module, command = PACKAGES.get(method, (None, None))
    if module and find_spec(module) is None:
        yield f"{name} needs a package that is not installed: {command}, on every node with engines"
    if rollout.is_cut:
        yield (
            f"{name} with top_k={rollout.top_k}: what the engine samples from is known of tokens that it samples one by one; leave one of "
            "them out"
        )
    if config.parallel.routing_replay == "rollout":
        yield (
            f"{name} with routing_replay=rollout: engines say which experts they chose for tokens that they sample one by one; use "
            "routing_replay=learner, or leave drafts out"
        )
    if has_states and not on_gpu:
        yield (
            f"{name}: on a CPU the state of a gated delta net cannot go back to the last accepted token; use none, or engines on GPUs"
        )
    if method == "mtp":
        yield from (f"{name} {reason}" for reason in _head_problems(config))


def _head_problems(config: Config) -> Iterator[str]:
    """Problems of the model's own draft heads."""
    folder, engine = Path(config.model_path), config.engine
    shape = shape_of(read_hf_config(folder))
    try:
        has_heads = bool(head_files(folder, shape))
    except ValueError:
        has_heads = False  # in Megatron's layout
    if not has_heads:
        yield f"needs heads that draft (MTP), and {folder} has none: neither do models that mgrpo has written; use ngram or suffix"
    elif (tokens := engine.vllm_num_speculative_tokens) > shape.draft_layers and tokens % shape.draft_layers:
        yield f"with vllm_num_speculative_tokens={tokens}: the model has {shape.draft_layers} heads; use a multiple of them, or fewer"
    if engine.vllm_enable_sleep_mode:
        yield "with vllm_enable_sleep_mode: an engine that sleeps gives up its heads, which no weight sync writes; leave one of them out"
    if are_apart(config.adapter.lora):
        yield "with lora_sync=adapter has not been tried; use lora_sync=merged"
    if engine.vllm_data_parallel_size > 1 and engine.vllm_enable_expert_parallel:
        yield "with copies of an engine's attention (vllm_data_parallel_size) has not been tried; use ngram or suffix"


def reads_heads(args: Mapping[str, Any]) -> bool:
    """True if an engine with these arguments of vLLM reads only the draft heads from the model's files."""
    return args.get("load_format") == "dummy" and args.get("speculative_config", {}).get("method") == "mtp"


def second_model(drafts: Mapping[str, Any]) -> str:
    """Draft model or method with weights of its own, from vLLM's speculative_config; "": drafts come from the tokens so far."""
    model = drafts.get("model")
    method = drafts.get("method") or model
    return "" if method in WITHOUT_WEIGHTS and model in (None, method) else str(model or method)
