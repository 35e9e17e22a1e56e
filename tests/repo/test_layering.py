"""The rooms may import only what the tables allow, and heavy packages only where they belong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.repo import walls
from tests.repo.allowed import APPLICATION, INNER, ROOMS
from tests.repo.sources import PACKAGE, files, source

HEAVY = {
    "megatron": {"parallel", "policy", "rehearsal"},
    "ray": {
        *("rollout/vllm/cluster.py", "rollout/vllm/engine_set.py", "rollout/vllm/ray_engine.py"),
        *("rollout/vllm/actor.py", "rollout/vllm/ray_processes/engine_part.py"),
    },
    "vllm": {
        *("rollout/vllm/actor.py", "rollout/vllm/local_core.py", "rollout/vllm/teacher_engine.py"),
        "rollout/vllm/ray_processes/engine_part.py",
        *("sync/vllm_plugin/transfer_engine.py", "sync/vllm_plugin/delta_core.py", "sync/vllm_plugin/live_weights.py"),
        *("sync/vllm_plugin/rebound.py", "sync/vllm_plugin/routed_experts.py"),
        "environments/formats/vllm_door.py",
    },
}
"""The rooms and files that may import it."""


def differences(found: dict[str, set[str]], rows: dict[str, set[str]]) -> list[str]:
    """Imports that a row lacks, rows that allow more than is used, and places without a row: doors that nobody decided."""
    said = []
    for name in sorted(found.keys() | rows.keys()):
        if name not in found or name not in rows:
            said.append(f"{name} is gone: it needs no row" if name in rows else f"{name} has no row")
            continue
        said += [f"{name} imports {other}, which its row lacks" for other in sorted(found[name] - rows[name])]
        said += [f"{name} does not import {other} of its row" for other in sorted(rows[name] - found[name])]
    return said


def test_rooms_import_what_the_table_says():
    """A room that knows its neighbours can no longer be read, tested or replaced alone."""
    found = {name: used for name, used in walls.outer().items() if name not in APPLICATION}
    said = differences(found, ROOMS)
    assert not said, "\n".join(said)


def test_folders_inside_a_room_import_what_the_table_says():
    """A big room without inner walls is one drawer; those of `run` hold half of the application each."""
    found = walls.inner(walls.folders())
    said = differences(found, INNER)
    assert not said, "\n".join(said)


def test_differences_are_found():
    """In both directions, and where a whole row is missing."""
    assert differences({"a": {"b"}}, {"a": {"b"}}) == []
    assert differences({"a": {"b", "c"}, "d": {"a"}}, {"a": {"b", "e"}, "f": set()}) == [
        "a imports c, which its row lacks",
        "a does not import e of its row",
        "d has no row",
        "f is gone: it needs no row",
    ]


def test_heavy_packages_stay_in_their_room():
    """An engine process that loads Megatron, or a learner that loads vLLM, costs seconds and gigabytes."""
    strays = []
    for path in files():
        place, packages = str(path.relative_to(PACKAGE)), {each.module.split(".")[0] for each in source(path).imports}
        strays += [
            f"{place} imports {package}"
            for package in sorted(packages & HEAVY.keys())
            if not {place, place.split("/")[0]} & HEAVY[package]
        ]
    assert not strays, "\n".join(strays)


def test_only_the_start_of_the_engines_knows_what_they_are():
    """Other engines are started in one place; everything else talks to the protocol."""
    allowed = {"rollout/start.py"}
    strays = []
    for path in files():
        names = {f"{name}." for each in source(path).imports for name in each.names()}
        place = str(path.relative_to(PACKAGE))
        if any(name.startswith("mgrpo.rollout.vllm.") for name in names) and not place.startswith("rollout/vllm/"):
            strays.append(place)
    assert set(strays) == allowed


def test_only_the_backend_asks_for_the_device():
    """CPU and GPU differ in a handful of files; a check elsewhere is a second code path that no test runs."""
    allowed = {"parallel/backend.py", "parallel/stand_in.py", "rehearsal/cuda.py"}
    allowed |= {"sync/vllm_plugin/transfer_engine.py", "sync/device_memory.py"}
    asking = {str(path.relative_to(PACKAGE)) for path in files() if "torch.cuda" in path.read_text()}
    assert asking - allowed == set()


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("mgrpo", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.cli", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.planner.plan_command", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.run.produce.production", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.run.start.launch", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.rewards.verifier_worker", {"torch", "ray", "vllm", "megatron", "numpy"}),
        ("mgrpo.rollout.vllm.actor", {"torch", "ray", "vllm", "megatron"}),
        ("mgrpo.environments.formats", {"torch", "ray", "vllm", "megatron", "numpy", "transformers"}),
        ("mgrpo.sync.vllm_plugin", {"ray", "megatron"}),
        (
            "mgrpo.environments.workers.worker",
            {"torch", "ray", "vllm", "megatron", "numpy", "transformers", "pydantic"},
        ),
        ("mgrpo.environments.tools.indexing", {"torch", "aiohttp", "numpy"}),
        ("mgrpo.environments.adaptors.openenv", {"torch", "aiohttp", "numpy", "mcp", "openenv"}),
        ("mgrpo.environments.adaptors.gymnasium", {"torch", "aiohttp", "numpy", "gymnasium"}),
    ],
)
def test_import_stays_light(module, forbidden):
    """These are imported before the engines start, or in every verifier and engine process."""
    code = f"import sys, {module}; print(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not forbidden & set(loaded)
