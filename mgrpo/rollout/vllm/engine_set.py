"""The engines of one model in a Ray cluster: their placement groups, and the start of each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mgrpo.models.hf_files.hub import HubSnapshot
from mgrpo.rollout.vllm.ray_engine import RayEngine
from mgrpo.rollout.vllm.ray_processes.cluster_keeper import ClusterKeeper
from mgrpo.rollout.vllm.ray_processes.node import NODE_SHARE, learners_node
from mgrpo.rollout.vllm.ray_processes.reaper import end_engine

ROOM_S = 60.0
"""Seconds that Ray may take to find room for an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Start parameters of the engines of one model."""

    count: int
    workers: int
    """Workers of each engine."""
    copies: int = 1
    """Data-parallel copies of an engine's attention, each on one node."""
    args: Callable[[bool], dict[str, Any]]
    """vLLM's arguments; called with True if an engine's workers are on several nodes."""
    environment: Mapping[str, str]
    """Variables of its processes, in addition to their node's."""
    has_local_core: bool
    log: str
    """Prefix of the names of their log files."""
    remedy: str
    """Advice if the cluster has no room for them."""
    gpus: Sequence[str] = ()
    """GPU of each worker of all engines, none of which Ray counts; empty: Ray chooses, or there are none."""
    nodes: Sequence[int] = ()
    """For each engine, the number of its learners' node; empty: Ray chooses, or there is one node."""
    gpu_share: float = 1.0
    """Share of a GPU for each worker, if Ray chooses GPUs."""
    snapshots: Sequence[HubSnapshot] = ()
    """See `EngineActor.start`."""
    teacher_temperature: float | None = None
    """See `EngineActor.start`."""


class RayPlace(NamedTuple):
    """A cluster for engines."""

    ray: Any
    on_gpu: bool
    keeper: ClusterKeeper | None
    """None: a cluster that was joined."""
    interfaces: Mapping[str, str]
    """The network interfaces that the user has chosen."""
    logs: Path
    """The folder of the engines' output."""
    is_closing: Callable[[], bool]


class EngineSet:
    """The engines of one model. Call it on rank 0's main thread."""

    def __init__(self, place: RayPlace, kind: EngineKind) -> None:
        """Begin to start the engines; each has a `ready` to wait for.

        Raises:
            RuntimeError: the cluster has no room for them.
        """
        self.place, self.kind = place, kind
        self.engines: list[RayEngine] = []
        """The present engine of each number."""
        self.groups: list[Any] = []
        """The placement group of each number."""
        self._check_nodes()
        groups = [self._reserve(number) for number in range(kind.count)]
        if not all(group.wait(ROOM_S) for group in groups):
            raise RuntimeError(
                f"{len(groups)} engines need {len(groups)} x {self._bundles()}, and Ray has only "
                f"{place.ray.available_resources()} left; {kind.remedy}"
            )
        for group in groups:
            self.groups.append(group)
            self.start(len(self.groups) - 1)

    def start(self, number: int) -> RayEngine:
        """Begin to start an engine, an additional one or a restarted one in its place, which Ray moves if the node is gone.

        Raises:
            RuntimeError: the cluster has no room for one more.
        """
        if number == len(self.groups):
            if self.kind.gpus or self.kind.nodes:
                raise RuntimeError("with vllm_mode=colocate engines are on the learners' GPUs, of which each has one")
            group = self._reserve(number)
            if not group.wait(ROOM_S):
                from ray.util import remove_placement_group

                remove_placement_group(group)
                left = self.place.ray.available_resources()
                raise RuntimeError(f"it needs {self._bundles()}, and Ray has only {left} left")
            self.groups.append(group)
        engine = self._start(number)
        self.engines[number:] = [engine, *self.engines[number + 1 :]]
        return engine

    @property
    def _takes_gpus(self) -> bool:
        return self.place.on_gpu and not self.kind.gpus

    def _bundles(self) -> list[dict[str, float]]:
        if not self._takes_gpus:
            return engine_bundles(self.kind.workers, gpus_a_node=None)
        nodes = [node for node in self.place.ray.nodes() if node["Alive"]]
        most = max(int(node["Resources"].get("GPU", 0)) for node in nodes)
        return engine_bundles(self.kind.workers, gpus_a_node=most, share=self.kind.gpu_share, copies=self.kind.copies)

    def _reserve(self, number: int) -> Any:
        from ray.util.placement_group import placement_group

        bundles = self._bundles()
        if self.kind.nodes:
            bundles[0][learners_node(self.kind.nodes[number])] = NODE_SHARE
        return placement_group(bundles, strategy="PACK")

    def _check_nodes(self) -> None:
        known = self.place.ray.cluster_resources() if self.kind.nodes else {}
        if missing := [node for node in dict.fromkeys(self.kind.nodes) if learners_node(node) not in known]:
            raise RuntimeError(
                f"vllm_mode=colocate: Ray does not know the learners' nodes {', '.join(map(str, missing))}, on which engines are to "
                "start; start the run with `mgrpo launch`"
            )

    def _start(self, number: int) -> RayEngine:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from mgrpo.rollout.vllm.actor import EngineActor

        kind, keeper, group = self.kind, self.place.keeper, self.groups[number]
        spans_nodes = group.bundle_count > 1
        has_ray_workers = spans_nodes and kind.copies == 1
        environment = dict(kind.environment)
        runtime_env: dict[str, Any] = {"env_vars": environment}
        if keeper:
            environment["TMPDIR"] = keeper.scratch
            # Ray passes it to a shell unquoted; its path may have spaces.
            runtime_env["py_executable"] = shlex.quote(sys.executable)
        if kind.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(kind.gpus[number * kind.workers :][: kind.workers])
        actor = (
            self.place.ray.remote(EngineActor)
            .options(
                num_cpus=1,
                # Workers on several nodes are actors of their own, which vLLM starts in the group's bundles.
                num_gpus=group.bundle_specs[0]["GPU"] if self._takes_gpus and not has_ray_workers else 0,
                max_concurrency=1000,
                runtime_env=runtime_env,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote()
        )
        process = actor.process.remote().future()
        return RayEngine(
            actor,
            actor.start.remote(
                kind.args(spans_nodes),
                () if keeper else tuple(kind.snapshots),
                log=self.place.logs / f"{kind.log}_{number}.txt",
                interfaces=None if keeper else self.place.interfaces,
                has_local_core=kind.has_local_core,
                teacher_temperature=kind.teacher_temperature,
            ),
            cluster_failure=keeper.failure if keeper else lambda: None,
            end_process=partial(self._end_process, process),
        )

    def _end_process(self, process: Future[tuple[str, int]]) -> None:
        """Kill an engine, since a stopped process would not react to Ray."""
        if not process.done() or process.exception() is not None:
            return
        ray, (node, pid) = self.place.ray, process.result()
        if node == ray.get_runtime_context().get_node_id():
            end_engine(pid)
        elif not self.place.is_closing():
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            there = NodeAffinitySchedulingStrategy(node, soft=False)
            ray.remote(end_engine).options(num_cpus=0, scheduling_strategy=there).remote(pid)


def engine_bundles(
    workers: int, *, gpus_a_node: int | None, share: float = 1.0, copies: int = 1
) -> list[dict[str, float]]:
    """Bundles that Ray reserves for an engine: one if a node has enough GPUs, else one for each GPU, or for equal numbers of whole
    copies of attention.

    Args:
        gpus_a_node: None for engines on CPUs.
        share: share of a GPU for each worker; below 1 the engine has one worker.
        copies: data-parallel copies of the engine's attention, which share its workers.
    Raises:
        RuntimeError: no node has enough GPUs for one of several copies.
    """
    if gpus_a_node is None:
        return [{"CPU": 1}]
    if workers <= gpus_a_node:
        return [{"GPU": workers * share, "CPU": 1}]
    if copies > 1:
        tensor = workers // copies
        if tensor > gpus_a_node:
            raise RuntimeError(
                f"each of the engine's {copies} copies of attention has vllm_tensor_parallel_size={tensor} workers, and no node of the "
                f"cluster has more than {gpus_a_node} GPUs; lower vllm_tensor_parallel_size"
            )
        part = max(size for size in range(1, copies) if copies % size == 0 and size * tensor <= gpus_a_node)
        return [{"GPU": part * tensor, "CPU": 1}] * (copies // part)
    others: list[dict[str, float]] = [{"GPU": 1}] * (workers - 1)
    return [{"GPU": 1, "CPU": 1}, *others]
