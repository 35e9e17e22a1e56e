"""The aliases for parallelism and memory: names of DeepSpeed, FSDP and OLMo-core in terms of Megatron's axes."""

from __future__ import annotations

import json
from pathlib import Path

from mgrpo.config.resolution import Resolution
from mgrpo.moving.foreign_names import table

OPEN_INSTRUCT_ZPG = 8
"""Open Instruct's default of deepspeed_zpg, which must not prevent a run on fewer ranks."""
SELECTIVE_BUDGET = 0.5
"""Smallest budget that selective recomputation of attention's core and the MLP always keeps within: of
4h + 3q + 3k + 3f elements per token (see `planner.activations`) it drops 3f, which leaves 0.3 to 0.45 in the usual shapes."""
FSDP_STAGES = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3}
"""zero_stage by TRL's name for it."""


def apply(r: Resolution) -> None:
    """Apply all translations below, each after those whose results it needs."""
    recomputation(r)
    deepspeed(r)
    fsdp(r)
    shards(r)
    ulysses(r)
    replicas(r)


def ulysses(r: Resolution) -> None:
    """Open Instruct's sequence parallelism is context parallelism; it needs ZeRO-3 there."""
    size = r.peer("sequence_parallel_size")
    if size is None:
        return
    r.put("context_parallel_size", size, "sequence_parallel_size")
    if size > 1:
        r.put("cp_comm_type", "a2a", "sequence_parallel_size", weak=True)
    if size > 1 and r.value("zero_stage") != 3:
        r.problems.append(
            f"sequence_parallel_size={size} needs deepspeed_stage=3, as in Open Instruct, got zero_stage="
            f"{r.value('zero_stage')}; context_parallel_size, its name here, has no such rule"
        )


def recomputation(r: Resolution) -> None:
    """Recomputation of whole layers, or within a memory budget; names that turn it off yield to the others."""
    name = "gradient_checkpointing" if r.peer("activation_checkpointing") is None else "activation_checkpointing"
    whole, budget = r.peer(name), r.peer("activation_memory_budget")
    mode = r.peer("activation_checkpointing_mode", "budget")
    if whole and budget is not None and 0 <= budget < 1:
        r.notes.append(f"{name} has no effect beside activation_memory_budget, as in Open Instruct")
    elif whole is not None:
        r.put("recompute_granularity", "full" if whole else "none", name, weak=not whole)
    if mode == "full":
        r.put("recompute_granularity", "full", "activation_checkpointing_mode")
    elif mode != "budget":
        r.problems.append(
            f"activation_checkpointing_mode={mode} is refused: OLMo-core's modules have no counterparts here; use "
            "recompute_granularity=selective with recompute_modules"
        )
    elif budget is not None and not 0 <= budget <= 1:
        r.problems.append(f"activation_memory_budget={budget:g} must be in [0, 1]")
    elif budget is not None:
        granularity = "none" if budget == 1 else "selective" if budget >= SELECTIVE_BUDGET else "full"
        r.put("recompute_granularity", granularity, "activation_memory_budget", weak=budget == 1)


def fsdp(r: Resolution) -> None:
    """TRL's names for the sharding among data-parallel ranks; in transformers 5 fsdp is true, and a JSON object has the rest."""
    words = " ".join(r.peer("fsdp", ())).lower().split()
    details = {key.removeprefix("fsdp_"): value for key, value in r.peer_object("fsdp_config").items()}
    if details and not set(words) - {"false"}:
        r.notes.append("fsdp_config has no effect without fsdp")
        details = {}
    strategy = {"true": "full_shard", "false": "shard_grad_op"}
    whether_whole = str(details.get("reshard_after_forward", True)).lower()
    words = [strategy.get(whether_whole, whether_whole) if word == "true" else word for word in words]
    if str(details.get("cpu_offload")).lower() == "true":
        words.append("offload")
    if str(details.get("activation_checkpointing")).lower() == "true":
        r.put("recompute_granularity", "full", "fsdp_config")
    for word in words:
        if word in FSDP_STAGES:
            r.put("zero_stage", FSDP_STAGES[word], "fsdp")
        elif word not in ("auto_wrap", "false"):
            r.problems.append(f"fsdp={word} is refused: choose from {', '.join(FSDP_STAGES)}{_instead_of(word)}")
    asks = {"fsdp_shard_degree", "fsdp_num_replicas"} & (r.given.keys() | r.peers.keys())
    if "hybrid_shard" in words and not asks:
        r.problems.append(
            "fsdp=hybrid_shard does not say how many ranks share each parameter; give --fsdp_shard_degree N, or "
            "fsdp=full_shard for all"
        )


def deepspeed(r: Resolution) -> None:
    """Sharding and CPU offload of a configuration of DeepSpeed; in TRL it is an object or the path of one."""
    text = str(r.peer("deepspeed", "")).strip()
    if not text:
        return
    try:
        found = json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8"))
        zero = found.get("zero_optimization", {})
        devices = {name: zero.get(name, {}).get("device", "none") for name in ("offload_optimizer", "offload_param")}
    except (OSError, ValueError, AttributeError):
        r.problems.append(
            f"deepspeed={text} must be a JSON object, or the path of a file of one; or leave it out and give zero_stage, which has "
            "DeepSpeed's numbers"
        )
        return
    if zero.get("stage", 0) not in (0, 1, 2, 3):
        r.problems.append(f"deepspeed: zero_optimization.stage={zero['stage']} must be 0, 1, 2 or 3")
    else:
        r.put("zero_stage", zero.get("stage", 0), "deepspeed")
    if devices["offload_param"] != "none":
        r.problems.append(f"deepspeed: offload_param is refused: {table()['deepspeed_offload_param'].sentence}")
    if devices["offload_optimizer"] not in ("none", "cpu"):
        r.problems.append(
            f"deepspeed: offload_optimizer to {devices['offload_optimizer']} is refused; the optimizer's states can be on the cpu"
        )
    elif devices["offload_optimizer"] == "cpu":
        r.put("optimizer_cpu_offload", True, "deepspeed")


def shards(r: Resolution) -> None:
    """A number of ranks that share each parameter, as OLMo-core's trainer has it, implies stage 3."""
    names = ("fsdp_shard_degree", "fsdp_num_replicas")
    is_asked = any(r.value(name) if name in r.given else r.peer(name) for name in names if r.rank(name))
    if is_asked and not r.rank("zero_stage", "deepspeed_stage", "deepspeed", "fsdp"):
        r.derive("zero_stage", 3, "zero_stage is 3, because fsdp_shard_degree ranks share each parameter")


def _instead_of(word: str) -> str:
    advice = {
        "offload": "weights stay on the GPU; optimizer_cpu_offload moves the optimizer's states, with zero_stage=1",
        "no_shard": "use zero_stage=0, which shards nothing",
        "hybrid_shard_zero2": "replicas exist only with hybrid_shard",
    }
    return f"; {advice[word]}" if word in advice else ""


def replicas(r: Resolution) -> None:
    """Groups of ranks that share each parameter, by their size (ZeRO++) or by their number (OLMo-core)."""
    size, count, ranks = r.peer("deepspeed_zpg"), r.peer("fsdp_num_replicas"), r.sharing_ranks
    if ranks is None:
        return  # validate reports the layout
    all_ranks = f"the {ranks} data- and context-parallel ranks"
    if size is not None and r.value("zero_stage") != 3:
        if size not in (1, OPEN_INSTRUCT_ZPG):
            r.notes.append("deepspeed_zpg has no effect without deepspeed_stage=3")
    elif size == OPEN_INSTRUCT_ZPG > ranks:
        r.notes.append(f"deepspeed_zpg={size} is more than {all_ranks}, so all of them share each parameter")
    elif size is not None:
        r.put("fsdp_shard_degree", None if size == 1 else size, "deepspeed_zpg")
    if count is None:
        return
    r.expected.setdefault("world_size", r.world_size)
    degree = r.value("fsdp_shard_degree")
    is_given = degree is not None and r.rank("fsdp_shard_degree") == r.rank("fsdp_num_replicas")
    if count < 1 or ranks % count:
        choices = ", ".join(str(number) for number in range(1, min(ranks, 256) + 1) if ranks % number == 0)
        r.problems.append(f"fsdp_num_replicas={count} does not divide {all_ranks}; choose from {{{choices}}}")
    elif is_given and degree * count != ranks:
        r.problems.append(
            f"fsdp_shard_degree={degree} x fsdp_num_replicas={count} must be {all_ranks}; leave one of the two out"
        )
    else:
        r.put("fsdp_shard_degree", ranks // count if ranks > 1 else None, "fsdp_num_replicas")
