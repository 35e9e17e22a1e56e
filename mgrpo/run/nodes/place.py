"""This node's number, the number of nodes and the address of node 0: from flags, Slurm, mpirun or a Kubernetes Job."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mgrpo.config import ConfigError

PORT = 29400
"""The port of node 0 where the nodes meet, unless `--head` names another."""
_GROUP = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One node's place among the nodes of a run."""

    rank: int
    nodes: int
    head: str
    """Name or address of node 0."""
    port: int = PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheduler:
    """A scheduler's variables about this process."""

    name: str
    rank: str
    """Variable with this node's number."""
    nodes: str | None
    """Variable with the number of nodes; None: none."""
    one_a_node: str
    """Command that starts one process a node."""


def _schedulers(environ: Mapping[str, str]) -> Iterator[_Scheduler]:
    """The schedulers that have started this process, the innermost first."""
    if "OMPI_COMM_WORLD_RANK" in environ:
        yield _Scheduler(
            name="mpirun",
            rank="OMPI_COMM_WORLD_RANK",
            nodes="OMPI_COMM_WORLD_SIZE",
            one_a_node="mpirun --map-by ppr:1:node",
        )
    if "JOB_COMPLETION_INDEX" in environ:
        yield _Scheduler(
            name="Kubernetes", rank="JOB_COMPLETION_INDEX", nodes=None, one_a_node="a Job with one pod a node"
        )
    if "SLURM_PROCID" in environ:
        step = "SLURM_STEP_NUM_NODES"
        yield _Scheduler(
            name="Slurm",
            rank="SLURM_PROCID",
            nodes=step if step in environ else "SLURM_NNODES",
            one_a_node="srun --ntasks-per-node=1",
        )


def find_place(*, nodes: int | None, rank: int | None, head: str | None, environ: Mapping[str, str]) -> Place:
    """This node's place. Arguments are the flags; None: not given.

    Raises:
        ConfigError: every missing, contradictory or invalid value.
    """
    problems: list[str] = []
    scheduler = next(_schedulers(environ), None)
    if scheduler is not None:
        problems += _several_a_node(scheduler, environ)
        rank = _agreed("--node-rank", rank, scheduler.rank, environ, problems)
        if scheduler.nodes is not None:
            nodes = _agreed("--nodes", nodes, scheduler.nodes, environ, problems)
    if nodes is None:
        problems.append("--nodes is missing: expected the number of nodes, or to be started by srun or mpirun")
    elif nodes < 1:
        problems.append(f"--nodes={nodes}: expected 1 or more")
    if rank is None and nodes == 1:
        rank = 0
    if rank is None:
        problems.append(
            "--node-rank is missing: expected this node's number from 0, or to be started by srun, mpirun or an indexed "
            "Kubernetes Job"
        )
    elif nodes is not None and nodes >= 1 and not 0 <= rank < nodes:
        problems.append(f"--node-rank={rank}: expected 0 to {nodes - 1}, as there are {nodes} nodes")
    if head is None and scheduler is not None and scheduler.name == "Slurm":
        head = _first_of_list(environ, problems)
    elif head is None and nodes == 1:
        head = "127.0.0.1"
    elif head is None:
        problems.append(
            "--head is missing: expected the name or address of node 0, as all nodes reach it, such as --head node01"
        )
    host, port = _host_and_port(head or "", problems)
    if problems or nodes is None or rank is None:
        raise ConfigError(problems)
    return Place(rank=rank, nodes=nodes, head=host, port=port)


def expand(nodelist: str) -> list[str]:
    """The hosts of a Slurm list such as `node[01-03,7],gpu5`, in order.

    Raises:
        ValueError: it is not such a list.
    """
    parts = _GROUP.sub(lambda group: group[0].replace(",", "\0"), nodelist).split(",")
    return [host for part in parts for host in _expand_one(part.replace("\0", ","))]


def _expand_one(pattern: str) -> list[str]:
    fixed = _GROUP.split(pattern)[::2]
    if not pattern or any(bracket in part for part in fixed for bracket in "[]"):
        raise ValueError(f"not a list of hosts: {pattern!r}")
    choices = [[number for item in group.split(",") for number in _numbers(item)] for group in _GROUP.findall(pattern)]
    return [
        "".join(itertools.chain.from_iterable(zip(fixed, (*chosen, ""), strict=True)))
        for chosen in itertools.product(*choices)
    ]


def _numbers(item: str) -> list[str]:
    """`01-03` as 01, 02, 03."""
    found = _RANGE.fullmatch(item)
    if found is None:
        raise ValueError(f"not a range of numbers: {item!r}")
    first, last = found[1], found[2] or found[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _agreed(flag: str, given: int | None, name: str, environ: Mapping[str, str], problems: list[str]) -> int | None:
    """Value of a scheduler's variable, or of the flag without it; they must agree."""
    text = environ.get(name)
    if text is None:
        return given
    if not text.isdecimal():
        problems.append(f"{name}={text}: expected a number; give {flag} and unset {name}")
        return given
    if given is not None and given != int(text):
        problems.append(f"{flag}={given} contradicts {name}={text}; leave {flag} out, or unset {name}")
    return int(text)


def _several_a_node(scheduler: _Scheduler, environ: Mapping[str, str]) -> list[str]:
    tasks = {"Slurm": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_LOCAL_SIZE"}.get(scheduler.name, "")
    expected = environ.get(scheduler.nodes or "", "") if scheduler.name == "Slurm" else "1"
    found = environ.get(tasks, expected)
    if found == expected:
        return []
    return [f"{tasks}={found}: expected {expected}, one process a node; use {scheduler.one_a_node}"]


def _first_of_list(environ: Mapping[str, str], problems: list[str]) -> str | None:
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    try:
        return expand(environ.get(name, ""))[0]
    except ValueError as err:
        problems.append(f"{name}={environ.get(name, '')}: {err}; name node 0 with --head")
        return None


def _host_and_port(head: str, problems: list[str]) -> tuple[str, int]:
    host, colon, port = head.partition(":")
    if not colon:
        return host, PORT
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        problems.append(f"--head={head}: expected HOST or HOST:PORT, such as node01:{PORT}")
        return host, PORT
    return host, int(port)
