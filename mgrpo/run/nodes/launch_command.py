"""`mgrpo launch`: its flags, their problems, and its exit code."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from mgrpo.config import ConfigError
from mgrpo.config.errors import CommandParser
from mgrpo.run.nodes.agent import Follower, Leader
from mgrpo.run.nodes.job import NodeJob
from mgrpo.run.nodes.meeting import MeetingError
from mgrpo.run.nodes.place import PORT, find_place
from mgrpo.run.ranks import ending
from mgrpo.run.ranks.local_ranks import run_ranks

MEETING_S = 600.0


def launch_command(argv: Sequence[str]) -> int:
    """Run this node's part; returns the run's exit code."""
    ending.begin()
    try:
        return _launch(argv)
    except ConfigError as err:
        ending.report(str(err))
        return 2
    except (MeetingError, RuntimeError) as err:
        ending.report(str(err))
        return 1


def _launch(argv: Sequence[str]) -> int:
    own, words = list(argv), []
    if "--" in own:
        words = own[own.index("--") + 1 :]
        own = own[: own.index("--")]
    flags = parser().parse_args(own)
    if not words:
        raise ConfigError(
            ["arguments of the training are missing: expected them after --, such as -- --config FILE.yaml"]
        )
    place = find_place(nodes=flags.nodes, rank=flags.node_rank, head=flags.head, environ=os.environ)
    learner_nodes = place.nodes if flags.learner_nodes is None else flags.learner_nodes
    found = []
    if not 1 <= learner_nodes <= place.nodes:
        found.append(f"--learner-nodes={learner_nodes}: expected 1 to {place.nodes}, as there are {place.nodes} nodes")
    if flags.nproc_per_node is not None and flags.nproc_per_node < 1:
        found.append(f"--nproc-per-node={flags.nproc_per_node}: expected 1 or more")
    if flags.nproc_per_node is None and place.nodes == 1:
        found.append("--nproc-per-node is missing: expected the number of learners, as engines share the only node")
    if found:
        raise ConfigError(found)
    if place.nodes == 1:
        return run_ranks(flags.nproc_per_node, words)
    job = NodeJob(
        nodes=place.nodes,
        learner_nodes=learner_nodes,
        ranks_a_node=flags.nproc_per_node,
        words=words,
        timeout_s=flags.timeout,
    )
    return (Leader if place.rank == 0 else Follower)(place, job).run()


def parser() -> argparse.ArgumentParser:
    """The command's own flags, which come before `--`."""
    found = CommandParser(
        prog="mgrpo launch",
        usage="mgrpo launch [flags] -- ARGUMENTS OF mgrpo train",
        description="Trains on many nodes: run it once on each of them, by srun, mpirun, as the pods of an indexed "
        "Kubernetes Job, by ssh or by hand. The first --learner-nodes run learners, the others engines; learners' nodes also "
        "offer the GPUs that their learners leave. docs/cluster.md shows complete examples.",
        allow_abbrev=False,
    )
    found.add_argument("--nodes", type=int, metavar="N", help="nodes; by default those of Slurm or mpirun")
    found.add_argument("--learner-nodes", type=int, metavar="L", help="those that train, the first L; by default all")
    found.add_argument(
        "--node-rank",
        type=int,
        metavar="I",
        help="this node, 0 to N - 1; by default as Slurm, mpirun or Kubernetes says",
    )
    found.add_argument(
        "--head", metavar="HOST[:PORT]", help=f"node 0, as all reach it; by default Slurm's first; port {PORT}"
    )
    found.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="K",
        help="learners on each of the L nodes; by default one a GPU of node 0",
    )
    found.add_argument(
        "--timeout", type=float, metavar="S", default=MEETING_S, help=f"within which all nodes come, {MEETING_S:g} s"
    )
    return found
