"""The rooms may import only what the table allows, and heavy packages only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {
    "types": set(),
    "layout": set(),
    "processes": set(),
    "ops": {"_C"},
    "models": {"layout"},
    "packing": {"types"},
    "parallel": {"layout"},
    "telemetry": {"processes", "types"},
    "sandbox": {"processes"},
    "config": {"models", "layout"},
    "moving": {"config"},
    "sync": {"processes", "models", "layout"},
    "algo": {"ops", "config", "types"},
    "data": {"config", "types"},
    "rewards": {"sandbox", "config", "processes", "types"},
    "rollout": {"environments", "models", "config", "processes", "types"},
    "environments": {"sandbox", "data", "processes", "types"},
    "planner": {"models", "moving", "config", "layout"},
    "policy": {"parallel", "models", "ops", "config", "layout", "types"},
    "checkpoint": {"policy", "parallel", "models", "layout"},
    "model_io": {"checkpoint", "policy", "parallel", "packing", "models", "layout", "types"},
}
"""What each room imports of the others; an import that is missing here is a decision, not an accident."""
APPLICATION = {"run", "cli", "__init__", "__main__", "rehearsal", "trl"}
"""May import every room. A rehearsal is the application itself, in a process of its own."""
HEAVY = {
    "megatron": {"parallel", "policy", "rehearsal"},
    "ray": {"rollout/vllm/cluster.py", "rollout/vllm/ray_engine.py", "rollout/vllm/actor.py"},
    "vllm": {
        *("rollout/vllm/actor.py", "rollout/vllm/local_core.py", "sync/vllm_plugin.py"),
        "environments/formats/vllm_door.py",
    },
}


def files() -> list[Path]:
    return sorted((ROOT / "mgrpo").rglob("*.py"))


def room_of(path: Path) -> str:
    place = path.relative_to(ROOT / "mgrpo")
    within = next((room for room in APPLICATION if str(place.parent) == room), None)
    return within or place.parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Modules that a file names in its imports, also in those inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            if node.module.split(".")[0] == "mgrpo":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_room_imports_only_what_the_table_allows(path):
    """A room that knows its neighbours can no longer be read, tested or replaced alone."""
    room = room_of(path)
    if room in APPLICATION:
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("mgrpo.")} - {room}
    assert used <= ROOMS[room], f"{room} imports {sorted(used - ROOMS[room])}"


@pytest.mark.parametrize("package", HEAVY)
def test_heavy_packages_stay_in_their_room(package):
    """An engine process that loads Megatron, or a learner that loads vLLM, costs seconds and gigabytes."""
    for path in files():
        if any(name.split(".")[0] == package for name in imports(path)):
            allowed = HEAVY[package]
            place = str(path.relative_to(ROOT / "mgrpo"))
            assert room_of(path) in allowed or place in allowed, f"{place} imports {package}"


def test_the_table_allows_no_more_than_is_used():
    """An allowance without a user is a door that nobody decided to open."""
    used: dict[str, set[str]] = {}
    for path in files():
        names = {name.split(".")[1] for name in imports(path) if name.startswith("mgrpo.")}
        used.setdefault(room_of(path), set()).update(names - {room_of(path)})
    assert {room: used.get(room) for room in ROOMS} == ROOMS


def test_only_the_start_of_the_engines_knows_what_they_are():
    """Other engines are started in one place; everything else talks to the protocol."""
    for path in files():
        place = str(path.relative_to(ROOT / "mgrpo"))
        if any(f"{name}.".startswith("mgrpo.rollout.vllm.") for name in imports(path)):
            assert place == "rollout/start.py" or place.startswith("rollout/vllm/"), f"{place} imports rollout.vllm"


def test_only_the_backend_asks_for_the_device():
    """CPU and GPU differ in a handful of files; a check elsewhere is a second code path that no test runs."""
    allowed = {"parallel/backend.py", "parallel/stand_in.py", "rehearsal/cuda.py"}
    allowed |= {"sync/vllm_plugin.py", "sync/device_memory.py"}
    for path in files():
        place = str(path.relative_to(ROOT / "mgrpo"))
        assert "torch.cuda" not in path.read_text() or place in allowed, f"{place} asks for the device"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("mgrpo", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.cli", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.planner.plan_command", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.run.produce.production", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.run.start.launch", {"torch", "ray", "vllm", "megatron", "transformers"}),
        ("mgrpo.rewards.worker", {"torch", "ray", "vllm", "megatron", "numpy"}),
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
