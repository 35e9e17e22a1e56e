"""A teacher's engine: its arguments, its GPUs, and its extension of vLLM's workers.

It only reads sequences, so it needs room for those of a step, no CUDA graphs, and no prefix cache, which vLLM would not use with
prompt log-probabilities.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mgrpo.config.derived import most_tokens
from mgrpo.config.schema import Config
from mgrpo.models.cuts import size_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.rollout.vllm.engine_arguments import (
    CPU_HEAD_DIMS,
    SHARED_GPU,
    environment_of,
    has_local_core,
    serving_gpus,
    worker_threads,
)
from mgrpo.rollout.vllm.engine_set import EngineKind

STEP_TOKENS = 2048
"""Tokens that an engine reads in a step. vLLM computes the logits of all of them at once."""
SEQUENCES = 64
"""Sequences that an engine reads at a time."""
ELEMENT_BYTES = {"float32": 4}
"""Bytes of an element of keys and values; 2 for other types."""


class TeacherWorker:
    """A base class of vLLM's workers in a teacher's engine (`worker_extension_cls`)."""

    def divide_logits(self, temperature: float) -> None:
        """Divide all logits from here on, in float32: vLLM applies temperatures only to sampled tokens, not to the prompt's."""
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        def divide(module: Any, args: Any, logits: Any) -> Any:
            return None if logits is None else logits.float() / temperature

        worker: Any = self
        heads = [module for module in worker.get_model().modules() if isinstance(module, LogitsProcessor)]
        if not heads:
            raise RuntimeError("teacher_temperature: this model's logits are not those of vLLM's LogitsProcessor")
        for head in heads:
            head.register_forward_hook(divide)


def teacher_kinds(config: Config, *, on_gpu: bool, num_gpus: int, num_local_learners: int) -> list[EngineKind]:
    """Start parameters of each teacher's engines.

    Args:
        num_gpus: GPUs of the cluster, without the learners'.
    Raises:
        RuntimeError: there are too few GPUs.
    """
    own, engine = config.distillation, config.engine
    is_local, workers = engine.ray_address is None, own.teacher_tensor_parallel_size
    shared = serving_gpus()[:num_local_learners] if engine.shares_gpus else []
    num_free = num_gpus - _policy_workers(config)
    share = gpu_share(config, num_free=num_free) if on_gpu and not shared else 1.0
    if share is None:
        raise RuntimeError(f"{_needs(config)}, and Ray has {max(num_free, 0)} left for them; {_REMEDY}")
    gpus = [shared[number % len(shared)] for number in range(own.num_engines * workers)] if shared else []
    kinds = []
    for place, teacher in enumerate(own.teachers):
        folder = config.teacher_path(teacher)
        threads = worker_threads(
            config,
            folder,
            workers=own.num_engines * workers,
            num_cores=len(os.sched_getaffinity(0)) if is_local else 1,
            num_local_learners=num_local_learners,
        )
        per_teacher = own.teacher_num_engines * workers
        kinds.append(
            EngineKind(
                count=own.teacher_num_engines,
                workers=workers,
                args=partial(teacher_args, config, folder, on_gpu, bool(shared) or share < 1),
                environment={
                    **environment_of(workers=workers, threads=threads, on_gpu=on_gpu, is_local=is_local),
                    # Room for the token that vLLM samples, which is discarded.
                    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
                },
                has_local_core=has_local_core(workers, on_gpu=on_gpu),
                log=f"teacher_{own.teacher_names[place]}" if teacher.name else "teacher",
                remedy=_REMEDY,
                gpus=gpus[place * per_teacher :][:per_teacher],
                gpu_share=share,
                snapshots=tuple(config.provenance.snapshots.values()),
                teacher_temperature=own.teacher_temperature,
            )
        )
    return kinds


def teacher_args(
    config: Config, folder: str, on_gpu: bool, shares_gpu: bool = False, spans_nodes: bool = False
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs.

    Args:
        shares_gpu: the GPU is shared with other engines or a learner, whose memory changes while vLLM would measure free memory.
        spans_nodes: see `engine_args`.
    """
    own, model = config.distillation, config.model
    longest = most_tokens(config, folder) + 1
    args: dict[str, Any] = {
        "model": str(Path(folder).absolute()),
        "dtype": model.model_dtype,
        "max_model_len": longest,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": STEP_TOKENS,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "tensor_parallel_size": own.teacher_tensor_parallel_size,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "seed": 0,
        "worker_extension_cls": f"{TeacherWorker.__module__}.{TeacherWorker.__qualname__}",
    }
    if own.num_likeliest:
        args["max_logprobs"] = own.num_likeliest
    if model.cast_lm_head_to_fp32:
        args["hf_overrides"] = {"head_dtype": "float32"}
    if own.teacher_tensor_parallel_size > 1:
        args["distributed_executor_backend"] = "ray" if spans_nodes else "mp"
    if on_gpu:
        args["gpu_memory_utilization"] = own.teacher_gpu_memory_utilization
    else:
        args["block_size"] = 32
    if shares_gpu or not on_gpu:
        args["kv_cache_memory_bytes"] = _cache_bytes(config, folder, longest)
    return args


def _cache_bytes(config: Config, folder: str, longest: int) -> int:
    """Bytes of keys and values of twice the tokens that can be under way: sequences do not wait for room longer than for a step."""
    hf = read_hf_config(folder)
    heads = size_of(hf, "num_attention_heads")
    layers, kv_heads = size_of(hf, "num_hidden_layers"), size_of(hf, "num_key_value_heads") or heads
    hidden = size_of(hf, "hidden_size")
    head_dim = size_of(hf, "head_dim") or (hidden // heads if hidden and heads else None)
    if not (layers and kv_heads and head_dim):
        return config.engine.vllm_kv_cache_mb << 20
    here = max(kv_heads // config.distillation.teacher_tensor_parallel_size, 1)
    token = 2 * layers * here * head_dim * ELEMENT_BYTES.get(config.model.model_dtype, 2)
    # A sequence takes whole blocks, the last of which is not full.
    return 2 * token * (longest + STEP_TOKENS + 32 * SEQUENCES)


def gpu_share(config: Config, *, num_free: int) -> float | None:
    """Share of a GPU for each worker of the teachers' engines: 1, or, if too few GPUs are free, as many workers on one as fit.

    None: they do not fit.

    Args:
        num_free: GPUs without learners and the policy's engines.
    """
    own = config.distillation
    workers = own.num_engines * own.teacher_tensor_parallel_size
    if workers <= num_free:
        return 1.0
    if own.teacher_tensor_parallel_size == 1 and workers <= num_free * own.engines_per_gpu:
        return own.teacher_gpu_memory_utilization
    return None


def teacher_machine_problems(config: Config, *, num_local_learners: int) -> Iterator[str]:
    """All problems of teachers' engines on this machine, rank 0's."""
    own, engine, gpus = config.distillation, config.engine, serving_gpus()
    if not own.num_engines:
        return
    if not gpus:
        for teacher in own.teachers:
            yield from _head_problems(config.teacher_path(teacher))
        return
    if engine.shares_gpus and num_local_learners:
        yield from _sharing_problems(config, num_local_learners)
        return
    policy = _policy_workers(config)
    left = max(len(gpus) - num_local_learners - policy, 0)
    if engine.ray_address is None and gpu_share(config, num_free=left) is None:
        taken = [f"{num_local_learners} belong to learners"] * bool(num_local_learners)
        taken += [f"{policy} to the policy's engines"] * bool(policy)
        yield f"{_needs(config)}, but of {len(gpus)} on this machine {' and '.join(taken) or 'none is taken'}: {left} left; {_REMEDY}"


def _head_problems(folder: str) -> Iterator[str]:
    try:
        hf = read_hf_config(folder)
    except ValueError:
        return  # reported by the rules
    heads, hidden = size_of(hf, "num_attention_heads"), size_of(hf, "hidden_size")
    head_dim = size_of(hf, "head_dim") or (hidden // heads if hidden and heads else None)
    if head_dim and head_dim not in CPU_HEAD_DIMS:
        known = ", ".join(map(str, CPU_HEAD_DIMS))
        yield (
            f"teacher_model_name_or_path={folder} has head_dim={head_dim}, which is not served by vLLM on a CPU, which supports {known}; "
            "use teacher_mode=learner"
        )


def _sharing_problems(config: Config, learners: int) -> Iterator[str]:
    own = config.distillation
    workers = own.num_engines * own.teacher_tensor_parallel_size
    on_each = -(-workers // learners)
    if own.teacher_tensor_parallel_size > learners:
        yield f"teacher_tensor_parallel_size={own.teacher_tensor_parallel_size} needs as many GPUs, and vllm_mode=colocate has {learners}; lower it"
    elif on_each * own.teacher_gpu_memory_utilization > 1 - SHARED_GPU + 1e-9:
        yield (
            f"vllm_mode=colocate puts {on_each} of the teachers' {workers} workers on a learner's GPU, and "
            f"teacher_gpu_memory_utilization={own.teacher_gpu_memory_utilization:g} of each are more than the {1 - SHARED_GPU:g} that the policy's "
            f"engine leaves; set it to at most {(1 - SHARED_GPU) / on_each:.2g}"
        )


def _policy_workers(config: Config) -> int:
    """Number of GPUs that the policy's engines have for themselves."""
    engine = config.engine
    return engine.vllm_num_engines * engine.num_workers if engine.vllm_mode == "ray" else 0


def _needs(config: Config) -> str:
    own = config.distillation
    workers = own.num_engines * own.teacher_tensor_parallel_size
    count = f"{len(own.teachers)} x " if len(own.teachers) > 1 else ""
    share = f", or {own.engines_per_gpu} of them one" if own.engines_per_gpu > 1 else ""
    return (
        f"no GPU is left for the teachers' engines: {count}teacher_num_engines={own.teacher_num_engines} x "
        f"teacher_tensor_parallel_size={own.teacher_tensor_parallel_size} need {workers} GPUs{share}"
    )


_REMEDY = "start fewer learners or engines, lower teacher_gpu_memory_utilization so that several fit on one GPU, or use teacher_mode=learner"
