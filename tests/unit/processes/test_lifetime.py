"""No process outlives the one that started it, whatever ends that one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mgrpo
from mgrpo.processes.lifetime import children, ending, kill_descendants, start_program

SLEEP = "import time; time.sleep(60)"
STARTS_A_CHILD = """
import os, sys, time
from mgrpo.processes.lifetime import start_program

child = start_program("told_program", environment=os.environ, settings={}, folders=[sys.argv[1]])
print(child.stdout.readline().decode(), flush=True)
time.sleep(60)
"""
DIES_WITH_PARENT = """
import os, time
from mgrpo.processes.lifetime import die_with_parent

die_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""
TELLS_WHAT_IT_SEES = """
import json, os, sys

print(json.dumps([dict(os.environ), json.__file__, os.getsid(0) == os.getpid()]))
"""
LEAVES_AN_ORPHAN = f"""
import subprocess, sys

null = subprocess.DEVNULL
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True, stdout=null, stderr=null)
print(child.pid, flush=True)
"""
KILLS_ITS_DESCENDANTS = f"""
import json, os, subprocess, sys
from mgrpo.processes.lifetime import adopt_orphans, children, kill_descendants

adopt_orphans()
grandchild = int(subprocess.run([sys.executable, "-c", {LEAVES_AN_ORPHAN!r}], stdout=subprocess.PIPE).stdout)
found = children(os.getpid())
print(json.dumps([grandchild, found, kill_descendants(os.getpid())]))
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_dead_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_alive(pid)


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    """SIGKILL leaves the parent no time to end its children."""
    (tmp_path / "told_program.py").write_text(DIES_WITH_PARENT)
    parent = subprocess.Popen([sys.executable, "-c", STARTS_A_CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert is_alive(child)
        parent.kill()
        parent.wait()
        assert is_dead_within(child, 10)
    finally:
        parent.kill()
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_program_sees_only_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and tokens of the run are none of a verifier's business, nor is a json.py in the working directory."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "told_program.py").write_text(TELLS_WHAT_IT_SEES)
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.chdir(tmp_path)
    program = start_program(
        "told_program",
        environment={"GIVEN": "1", "SET": "1", "OMP_NUM_THREADS": "8"},
        settings={"SET": "2"},
        folders=[str(tmp_path / "modules")],
    )
    environment, json_file, leads_session = json.loads(program.communicate(timeout=30)[0])
    assert environment.items() >= {"GIVEN": "1", "SET": "2", "OMP_NUM_THREADS": "1"}.items()
    assert "OPENAI_API_KEY" not in environment
    assert not json_file.startswith(str(tmp_path)) and leads_session


def test_the_users_modules_are_not_hidden_by_what_lies_beside_this_package(tmp_path: Path, monkeypatch) -> None:
    """A checkout has folders such as tests and tools; the user's package of that name was "no module"."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").write_text("value = 7")
    (tmp_path / "own.py").write_text("import mgrpo, tests; print(tests.value, mgrpo.__file__)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    program = start_program("own", environment={}, settings={})
    assert program.communicate(timeout=30)[0].decode() == f"7 {mgrpo.__file__}\n"


def test_processes_that_a_program_spawns_find_this_package_last(tmp_path: Path, monkeypatch) -> None:
    """In a checkout that is not installed a tool that used multiprocessing could not import mgrpo there."""
    (tmp_path / "own.py").write_text(
        "import json, multiprocessing, sys\n"
        "def path(): return sys.path\n"
        "if __name__ == '__main__':\n"
        "    import own\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(json.dumps(pool.apply(own.path)))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = start_program("own", environment={}, settings={})
    path = json.loads(program.communicate(timeout=30)[0])
    assert str(tmp_path) in path and path[-1] == str(Path(mgrpo.__file__).parents[1])


def test_another_interpreter_sees_this_package_and_nothing_beside_it(tmp_path: Path) -> None:
    """Beside the package there may be torch and all else, compiled for the trainer's interpreter; this one may have nothing."""
    (tmp_path / "own.py").write_text(
        "import json, mgrpo.environments.workers.worker, sys; print(json.dumps([sys.executable, mgrpo.__file__, sys.path]))"
    )
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    program = start_program("own", environment={}, settings={}, folders=[str(tmp_path)], python=str(python))
    executable, package, path = json.loads(program.communicate(timeout=30)[0])
    assert executable == str(python) and Path(package) == Path(mgrpo.__file__)
    assert str(Path(mgrpo.__file__).parents[1]) not in path


def test_descendants_that_left_their_session_are_adopted_and_killed() -> None:
    """A program that starts a daemon would otherwise leave it on the machine."""
    ran = subprocess.run([sys.executable, "-c", KILLS_ITS_DESCENDANTS], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    grandchild, found, killed = json.loads(ran.stdout)
    assert found == [grandchild] and killed == 1
    assert is_dead_within(grandchild, 10)


def test_a_family_is_killed_and_its_neighbours_are_not() -> None:
    """Each generation is found, also behind a process that is stopped."""
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    family = subprocess.Popen([sys.executable, "-c", nested])
    neighbour = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        end = time.monotonic() + 20
        while not children(family.pid) and time.monotonic() < end:
            time.sleep(0.02)
        (grandchild,) = children(family.pid)
        os.kill(family.pid, signal.SIGSTOP)  # one that neither stops nor adopts orphans could lose them
        assert kill_descendants(family.pid) == 1
        assert is_dead_within(grandchild, 10)
        assert is_alive(family.pid) and is_alive(neighbour.pid)
    finally:
        for process in (family, neighbour):
            process.kill()
            process.wait()
    assert children(family.pid) == []


def test_how_a_process_ended() -> None:
    """The end of a sentence that a user reads."""
    assert ending(3) == "ended with exit code 3"
    assert ending(-signal.SIGKILL) == "died of SIGKILL"
