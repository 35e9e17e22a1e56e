"""The part of an engine on one of its nodes: some copies of its attention, each with an engine core of its own.

The `EngineActor`, on the engine's first node, has vLLM's front end and that node's part. On each other node an `EnginePart` is headless,
in vLLM's term: its cores connect to the first node.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mgrpo.models.hf_files.hub import HubSnapshot, fetch_apart
from mgrpo.processes.address import own_interfaces
from mgrpo.rollout.drafts import reads_heads
from mgrpo.rollout.vllm.printed import print_into

PLACES = (
    *("data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_address"),
    *("data_parallel_rpc_port", "data_parallel_backend", "data_parallel_hybrid_lb", "data_parallel_external_lb"),
)
"""Arguments of vLLM for the places of an engine's copies of attention."""


def begin_parts(
    args: dict[str, Any], snapshots: Sequence[HubSnapshot], *, log: Path | None, interfaces: Mapping[str, str] | None
) -> list[Any]:
    """Begin to start the parts on the engine's other nodes, and change `args` into those of this node's part.

    Returns:
        Ray's references to their ends, each of which ends the engine; empty for an engine on one node.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()
    if group is None or group.bundle_count == 1:
        return []
    copies, address = args["data_parallel_size"] // group.bundle_count, ray.util.get_node_ip_address()
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    args |= {"data_parallel_size_local": copies, "data_parallel_address": address, "data_parallel_rpc_port": port}
    ends = []
    for number, bundle in enumerate(group.bundle_specs[1:], start=1):
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        part = ray.remote(EnginePart).options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=place
        )
        own_args = args | {"data_parallel_start_rank": number * copies}
        own_log = log and log.with_stem(f"{log.stem}_part_{number}")
        ends.append(part.remote().serve.remote(own_args, snapshots, log=own_log, interfaces=interfaces))
    return ends


class EnginePart:
    """The actor of a node after the first."""

    def serve(self, args: dict[str, Any], snapshots: Sequence[HubSnapshot], **others: Any) -> str:
        """Run engine cores until one of them ends; returns its name.

        Args:
            args: `data_parallel_start_rank` is the number of the first core.
        """
        prepare(args, snapshots, **others)
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.network_utils import get_tcp_uri
        from vllm.v1.engine.utils import CoreEngineProcManager
        from vllm.v1.executor import Executor

        asked = AsyncEngineArgs(**args, weight_transfer_config=WeightTransferConfig(backend="mgrpo"))
        config = asked.create_engine_config(headless=True)
        parallel = config.parallel_config
        cores = CoreEngineProcManager(
            local_engine_count=parallel.data_parallel_size_local,
            start_index=parallel.data_parallel_rank,
            local_start_index=0,
            vllm_config=config,
            local_client=False,
            handshake_address=get_tcp_uri(parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port),
            executor_class=Executor.get_class(config),
            log_stats=False,
        )
        cores.monitor_engine_liveness()
        return f"{cores.failed_proc_name or 'an engine core'} on {socket.gethostname()}"


def prepare(
    args: dict[str, Any], snapshots: Sequence[HubSnapshot], *, log: Path | None, interfaces: Mapping[str, str] | None
) -> None:
    """Prepare this process for vLLM, and replace folders in `args` by this node's; see `EngineActor.start`."""
    if log is not None:
        print_into(log)
    if interfaces is not None:
        _choose_interfaces(interfaces, spans_nodes=args.get("distributed_executor_backend") == "ray")
    if not os.environ.get("OMP_NUM_THREADS", "1"):
        # Ray's runtime environment can set a variable, but not remove it.
        del os.environ["OMP_NUM_THREADS"]
    own = {str(snapshot.folder): snapshot for snapshot in snapshots}
    for key in ("model", "tokenizer"):
        if snapshot := own.get(args.get(key, "")):
            part = "served" if args.get("load_format") == "dummy" and not reads_heads(args) else snapshot.part
            args[key] = fetch_apart(replace(snapshot, part=part))
    for folder in (args["model"], args.get("tokenizer", args["model"])):
        if not os.path.isdir(folder):  # vLLM would look for it on the Hub
            raise FileNotFoundError(
                f"{folder} is not a folder on {socket.gethostname()}, where this engine runs; every node that serves "
                "needs the model and its tokenizer at the same path"
            )


def _choose_interfaces(chosen: Mapping[str, str], *, spans_nodes: bool) -> None:
    """Set the variables of the network interfaces, unless this node's environment (that of `ray start`) has them."""
    import ray

    # vLLM passes NCCL's variables to workers on other nodes, whose interfaces may have other names.
    own = {} if spans_nodes else own_interfaces(ray.util.get_node_ip_address())
    for name, value in {**own, **chosen}.items():
        os.environ.setdefault(name, value)
