"""Which node this is: what schedulers say, and what is said where they say too little."""

from __future__ import annotations

import pytest

from mgrpo.config import ConfigError
from mgrpo.run.nodes.place import PORT, Place, expand, find_place

SLURM = {"SLURM_PROCID": "2", "SLURM_NNODES": "5", "SLURM_JOB_NODELIST": "gpu-[07-09,12],big1"}
STEP = {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "gpu-[08-09],big1"}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
POD = {"JOB_COMPLETION_INDEX": "3"}


def place(environ, *, nodes=None, rank=None, head=None) -> Place:
    return find_place(nodes=nodes, rank=rank, head=head, environ=environ)


def problems(environ, **flags) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        place(environ, **flags)
    return raised.value.problems


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a,b[9-11],c-0", ["a", "b9", "b10", "b11", "c-0"]),
        ("r[1-2]n[3,05].x", ["r1n3.x", "r1n05.x", "r2n3.x", "r2n05.x"]),
    ],
)
def test_slurms_lists_are_expanded(text, hosts):
    """The first is node 0: a wrong one is a run that waits for nobody."""
    assert expand(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a[1", "a]1", "a[]", "a[1-]", "a[x]"])
def test_what_is_no_list_is_refused(text):
    with pytest.raises(ValueError, match="not a"):
        expand(text)


def test_each_scheduler_is_read():
    assert place(SLURM) == Place(rank=2, nodes=5, head="gpu-07")
    assert place(SLURM | STEP) == Place(rank=2, nodes=3, head="gpu-08")
    assert place(MPI, head="n0:1234") == Place(rank=1, nodes=4, head="n0", port=1234)
    assert place(POD, nodes=4, head="job-0.job") == Place(rank=3, nodes=4, head="job-0.job", port=PORT)
    assert place({}, nodes=2, rank=1, head="10.0.0.1") == Place(rank=1, nodes=2, head="10.0.0.1")
    assert place({}, nodes=1) == Place(rank=0, nodes=1, head="127.0.0.1")


def test_mpirun_within_slurm_counts():
    """Its processes inherit what Slurm says of mpirun's own."""
    assert place(SLURM | MPI, head="a") == Place(rank=1, nodes=4, head="a")


def test_a_flag_may_repeat_what_the_scheduler_says_and_name_another_interface():
    assert place(SLURM, nodes=5, rank=2, head="gpu-07-ib").head == "gpu-07-ib"


def test_everything_that_is_missing_is_named_at_once():
    assert [problem.split(" is missing")[0] for problem in problems({})] == ["--nodes", "--node-rank", "--head"]
    assert [problem.split(" is missing")[0] for problem in problems(POD)] == ["--nodes", "--head"]
    assert [problem.split(" is missing")[0] for problem in problems(MPI)] == ["--head"]


@pytest.mark.parametrize(
    ("environ", "flags", "words"),
    [
        (SLURM, {"rank": 1}, "--node-rank=1 contradicts SLURM_PROCID=2; leave --node-rank out"),
        (SLURM, {"nodes": 4}, "--nodes=4 contradicts SLURM_NNODES=5"),
        (MPI, {"nodes": 2, "head": "a"}, "--nodes=2 contradicts OMPI_COMM_WORLD_SIZE=4"),
        (POD, {"nodes": 3, "head": "a"}, "--node-rank=3: expected 0 to 2, as there are 3 nodes"),
        (SLURM | STEP | {"SLURM_STEP_NUM_TASKS": "24"}, {}, "expected 3, one process a node; use srun --ntasks-per-node=1"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, {"head": "a"}, "use mpirun --map-by ppr:1:node"),
        (SLURM | {"SLURM_JOB_NODELIST": "a[1"}, {}, "SLURM_JOB_NODELIST=a[1: not a list of hosts"),
        (SLURM | {"SLURM_PROCID": "x"}, {"rank": 1}, "SLURM_PROCID=x: expected a number"),
        ({}, {"nodes": 0, "rank": 0, "head": "a"}, "--nodes=0: expected 1 or more"),
        ({}, {"nodes": 2, "rank": 0, "head": "a:b"}, "--head=a:b: expected HOST or HOST:PORT"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_a_remedy(environ, flags, words):
    """Two answers to one question: whichever is taken, some node waits for another that never comes."""
    found = problems(environ, **flags)
    assert len(found) == 1 and words in found[0]
