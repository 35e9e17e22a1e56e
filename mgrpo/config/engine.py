"""The engine section: how many engines sample, where they come from, their memory, their failures, and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mgrpo.config.annotations import (
    NO_ENTRIES,
    NOT_NEGATIVE,
    ONE_OR_MORE,
    OPEN_INSTRUCT,
    POSITIVE,
    SHARE,
    TRL,
    JSONObject,
    Needs,
    Rule,
)

COLOCATED = Needs("vllm_mode=colocate", lambda vllm_mode: vllm_mode == "colocate")
STARTED = Needs(
    "engines that the run starts (vllm_mode=ray or colocate); a server has its own command line",
    lambda vllm_mode: vllm_mode != "server",
)
DRAFTING = Needs("vllm_speculative_method", lambda vllm_speculative_method: vllm_speculative_method != "none")
SERVERS = Needs(
    "vllm_mode=server or teacher_mode=server", lambda vllm_mode, teacher_mode: "server" in (vllm_mode, teacher_mode)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    vllm_num_engines: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT] = 1
    """Number of vLLM engines."""
    vllm_tensor_parallel_size: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT, TRL] = 1
    """Workers of each engine that cut its weights among them."""
    vllm_enable_expert_parallel: bool = False
    """Workers of an engine share out the experts of a mixture, each whole; false: every worker has a part of every expert."""
    vllm_data_parallel_size: Annotated[int, ONE_OR_MORE, OPEN_INSTRUCT, TRL] = 1
    """With vllm_enable_expert_parallel: copies of an engine's attention, of vllm_tensor_parallel_size workers each and with completions
    of their own; all workers together share out the experts. Without it a copy of the model is an engine of its own: this many times
    vllm_num_engines."""
    vllm_mode: Annotated[Literal["ray", "server", "colocate"], TRL] = "ray"
    """Where engines come from: ray: the run starts them, on devices of their own; colocate: it starts them on the learners' GPUs,
    a worker on each; server: they are vLLM servers that run already."""
    vllm_enable_sleep_mode: Annotated[bool, TRL, COLOCATED] = False
    """With vllm_mode=colocate: learners and engines take turns, and only those whose turn it is have their weights and states
    in the device's memory; false: all is there all the time."""
    vllm_gpu_memory_utilization: Annotated[float, SHARE, OPEN_INSTRUCT, TRL, STARTED] = 0.9
    """Share of a GPU's memory that an engine may use; ignored on CPU."""
    vllm_kv_cache_mb: Annotated[int, ONE_OR_MORE, STARTED] = 64
    """KV cache of an engine's worker in MiB on CPU, and on GPU with vllm_mode=colocate; otherwise
    vllm_gpu_memory_utilization decides."""
    vllm_kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"] = "auto"
    """Type of the engines' keys and values: auto: model_dtype; fp8 (fp8_e4m3) and fp8_e5m2: rounded to 8 bits without a scale;
    fp8_per_token_head: on GPUs, with a scale for each token and head. All but auto need a correction, use_rho_correction."""
    vllm_max_num_seqs: Annotated[int, ONE_OR_MORE] = 256
    """Completions that an engine generates at once, each of the copies of vllm_data_parallel_size."""
    vllm_enforce_eager: Annotated[bool, OPEN_INSTRUCT, STARTED] = False
    """Run without CUDA graphs; always on CPU."""
    vllm_enable_prefix_caching: Annotated[bool, OPEN_INSTRUCT, STARTED] = True
    """Read a prompt once for all samples of its group, in whole blocks of the KV cache (32 tokens on a CPU).

    Models with gated delta nets have no such cache on a CPU."""
    vllm_speculative_method: Annotated[Literal["none", "ngram", "suffix", "mtp"], STARTED] = "none"
    """What engines draft tokens from, which the model then judges several at a time: ngram: earlier occurrences of the last tokens in prompt
    and answer; suffix: the same in earlier answers too, as many tokens as are likely; mtp: heads of the model's own, as its checkpoint has them,
    which are not trained. The distribution and its log-probabilities stay."""
    vllm_num_speculative_tokens: Annotated[int, ONE_OR_MORE, DRAFTING] = 3
    """Tokens that are drafted at a time; with suffix the most."""
    vllm_extra_args: Annotated[JSONObject, OPEN_INSTRUCT, STARTED] = NO_ENTRIES
    """Further arguments of vLLM's AsyncEngineArgs, as a JSON object, for example {"max_num_batched_tokens": 8192}; untested
    ones may change the log-probabilities, which vllm_vs_local_logprob_diff shows."""
    vllm_server_base_url: Annotated[tuple[str, ...], TRL] = ()
    """Addresses of the servers, http://HOST:PORT, each of which is an engine; with vllm_mode=server."""
    vllm_server_timeout: Annotated[float, POSITIVE, TRL, SERVERS] = 240.0
    """Seconds that a server may take to answer at the start of the run."""
    vllm_server_allow_public: Annotated[bool, SERVERS] = False
    """Also connect to servers at public addresses, where anyone may control them unless a proxy stands before them; also to teachers'."""
    ray_address: Annotated[str | None, STARTED] = None
    """HOST:PORT of a Ray cluster to join, of which rank 0's machine must be a node, without the GPUs of learners; none: start
    one on this machine, on the loopback interface."""
    engine_start_timeout: Annotated[int, ONE_OR_MORE, STARTED] = 600
    """Seconds that an engine may take to start."""
    engine_heartbeat_timeout: Annotated[int, ONE_OR_MORE] = 30
    """Seconds without an answer after which an engine counts as dead; after half of them it is given no more groups."""
    engine_max_restarts: Annotated[int, NOT_NEGATIVE] = 3
    """How many times an engine that has died is started again within 20 weight syncs, before it is given up."""
    min_engines: Annotated[int, ONE_OR_MORE] = 1
    """A run with fewer engines waits for those that are starting; without any that could start it ends."""
    weight_sync_bucket_mb: Annotated[int, ONE_OR_MORE] = 256
    """MiB of weights that travel to an engine's worker at once; it holds as many again, as do together the ranks that send to it."""
    weight_sync_steps: Annotated[int, ONE_OR_MORE, TRL] = 1
    """Training steps between weight syncs; engines also receive the weights before each evaluation. Above 1 steps train on tokens of
    weights that are up to this many steps less one older, which adds to async_steps and needs the same correction."""
    weight_sync_timeout: Annotated[int, ONE_OR_MORE] = 120
    """Seconds that one weight sync may take; an engine that has not answered by then counts as dead."""
    weight_sync_check_every: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between comparisons of the weights in trainer and engines by digest, at the next weight sync; 0: only before the first
    step."""
    max_initial_mismatch: Annotated[float | Literal["auto"] | None, POSITIVE] = "auto"
    """Mean difference between the log-probabilities of learner and engines, in nats, that ends the run before its first update; auto: ten
    times what rounding explains (1e-3 in float32, 1 in bfloat16); none: no limit. What rounding does not explain is a warning."""

    @property
    def num_workers(self) -> int:
        """Workers of each engine."""
        return self.vllm_tensor_parallel_size * self.vllm_data_parallel_size

    @property
    def workers_asked(self) -> str:
        """The settings that make up the workers of all engines, for an error."""
        copies = (
            f" x vllm_data_parallel_size={self.vllm_data_parallel_size}" if self.vllm_data_parallel_size > 1 else ""
        )
        return f"vllm_num_engines={self.vllm_num_engines} x vllm_tensor_parallel_size={self.vllm_tensor_parallel_size}{copies}"

    @property
    def shares_gpus(self) -> bool:
        """Whether its workers are on the learners' GPUs."""
        return self.vllm_mode == "colocate"

    @property
    def takes_turns(self) -> bool:
        """Whether learners and engines give up their memory for each other."""
        return self.shares_gpus and self.vllm_enable_sleep_mode


def _servers(vllm_mode: str, vllm_server_base_url: tuple[str, ...]) -> Iterator[str]:
    urls = vllm_server_base_url
    if vllm_mode == "server" and not urls:
        yield "vllm_mode=server needs vllm_server_base_url, the addresses of vLLM servers: http://HOST:PORT; docs/servers.md starts one"
    elif urls and vllm_mode != "server":
        yield (
            f"vllm_server_base_url={' '.join(urls)} is used with vllm_mode=server, but it is {vllm_mode}; change it, or leave "
            "the addresses out"
        )
    elif len({url.rstrip("/") for url in urls}) < len(urls):
        yield f"vllm_server_base_url={' '.join(urls)} names a server twice; each of them is one engine"


def _fewest_engines(min_engines: int, vllm_num_engines: int) -> Iterator[str]:
    if min_engines > vllm_num_engines:
        yield (
            f"min_engines={min_engines} is more than vllm_num_engines={vllm_num_engines}, and the run would wait "
            "for ever; lower it, or start more engines"
        )


def _colocation(
    vllm_mode: str,
    async_steps: int,
    num_learners_per_node: tuple[int, ...],
    vllm_tensor_parallel_size: int,
    vllm_data_parallel_size: int,
) -> Iterator[str]:
    if vllm_mode != "colocate":
        return
    if async_steps:
        yield (
            f"vllm_mode=colocate with async_steps={async_steps}: learners and engines of the same GPUs cannot "
            "work at the same time; set async_steps=0, or vllm_mode=ray with GPUs for each"
        )
    if len(set(num_learners_per_node)) > 1:
        yield (
            f"vllm_mode=colocate with num_learners_per_node={' '.join(map(str, num_learners_per_node))}: expected equally "
            "many learners on all nodes, each with a worker of an engine"
        )
    elif len(num_learners_per_node) > 1 and num_learners_per_node[0] % (
        vllm_tensor_parallel_size * vllm_data_parallel_size
    ):
        yield (
            f"vllm_mode=colocate with vllm_tensor_parallel_size={vllm_tensor_parallel_size} and num_learners_per_node="
            f"{' '.join(map(str, num_learners_per_node))}: an engine gets its weights through the memory of one node; use a size "
            "that divides the learners of a node"
        )


def _weight_syncs(weight_sync_steps: int, takes_turns: bool, checkpoint_state_freq: int) -> Iterator[str]:
    if weight_sync_steps > 1 and takes_turns:
        yield (
            f"weight_sync_steps={weight_sync_steps} with vllm_enable_sleep_mode=true: engines that sleep drop their weights and are given "
            "the newest in every step; leave one of them out"
        )
    elif checkpoint_state_freq > 0 and checkpoint_state_freq % weight_sync_steps:
        least = -(-checkpoint_state_freq // weight_sync_steps) * weight_sync_steps
        yield (
            f"checkpoint_state_freq={checkpoint_state_freq} must be a multiple of weight_sync_steps={weight_sync_steps}: from a state "
            "between two weight syncs a run would go on with other weights in its engines than it had; use "
            f"checkpoint_state_freq={least}"
        )


RULES: tuple[Rule, ...] = (_servers, _fewest_engines, _weight_syncs)
COLOCATION: tuple[Rule, ...] = (_colocation,)
