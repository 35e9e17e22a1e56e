"""Learners and engines that take turns on two nodes: two network namespaces, each with a learner, its Ray and its engine."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.interrupted import assert_equal, metrics, origins
from tests.e2e.launching import Run, survivors
from tests.e2e.nodes import Machines, Nodes, cabled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 40
FLAGS = (
    *("--vllm_mode", "colocate", "--vllm_enable_sleep_mode", "true", "--vllm_kv_cache_mb", "64"),
    *("--total_episodes", str(256 * STEPS), "--warm_up_steps", "1", "--weight_sync_check_every", "1"),
    *("--checkpoint_state_freq", "3"),
)
START_S, LIMIT_S = 300, 300


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with cabled() as made:
        yield made


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Run:
    """The same run on one machine."""
    run = Run(
        tmp_path_factory.mktemp("one"),
        [*FLAGS, "--tensor_model_parallel_size", "2", "--vllm_num_engines", "2"],
        program=None,
    )
    try:
        assert run.wait(LIMIT_S) == 0, run.text()[-3000:]
    finally:
        run.end()
    return run


@pytest.fixture
def start(machines, tmp_path):
    started = []

    def go(*flags: str) -> Nodes:
        started.append(Nodes(tmp_path, *FLAGS, *flags, machines=machines))
        return started[-1]

    yield go
    for nodes in started:
        nodes.end()


def test_a_colocated_run_on_two_nodes_learns_the_same_as_on_one(start, one):
    """Nothing but the network joins the nodes: what a learner there holds comes through the one here, or not at all."""
    nodes = start()
    assert nodes.wait(START_S + LIMIT_S) == [0, 0], nodes.ends()
    assert sum("reward" in line for line in metrics(nodes)) == STEPS
    assert_equal(nodes, one)
    assert "slower way over gloo" not in nodes.text(0) + nodes.text(1)


def test_a_colocated_run_on_two_nodes_that_is_killed_goes_on_as_if_it_had_not_been(start, one):
    """Power fails at a random moment: half of what was saved or sent lies on the other node, and counts there as here."""
    rng = random.Random(5)
    nodes = start()
    saved = 3 * rng.randrange(1, 9)
    nodes.wait_for(f"state of step {saved}: ", START_S)
    time.sleep(rng.random())
    family = [*nodes.family(0), *nodes.family(1)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert nodes.wait(60) == [-9, -9]
    assert survivors(family, 40) == []
    again = start()
    assert again.wait(START_S + LIMIT_S) == [0, 0], again.ends()
    assert saved - 3 <= origins(again)[0] < STEPS - 3
    assert_equal(again, one)


# With 20 almost all of a step is training: the engine is missed in the sync that follows, by the learner that shares its device.
@pytest.mark.parametrize("epochs", ["1", "20"])
def test_an_engine_that_hangs_on_the_other_node_is_given_up_within_its_time(start, epochs):
    """Its learner is on the same devices: the run goes on with the other engine, or nothing moves any more."""
    flags = ("--engine_heartbeat_timeout", "20", "--weight_sync_timeout", "20", "--num_epochs", epochs)
    nodes = start(*flags)
    nodes.wait_for("state of step 3: ", START_S)
    time.sleep(1)
    engine = nodes.engine(1)
    engine.suspend()
    nodes.wait_for("mgrpo: engine 1 is dead and is given up: ", 90)
    assert survivors([engine], 20) == []
    assert nodes.wait(LIMIT_S) == [0, 0], nodes.ends()
    limits = "no answer within engine_heartbeat_timeout=20 s|could not .* within weight_sync_timeout=20 s"
    assert re.search(f"engine 1 is dead and is given up: ({limits})", nodes.text()), nodes.ends()
    assert sum("reward" in line for line in metrics(nodes)) == STEPS
