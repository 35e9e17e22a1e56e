"""What others have mounted below /tmp neither keeps the walls from rising nor can be seen within them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mgrpo.sandbox import linux
from tests.namespaces import skip_without_namespaces

_MOUNTS = """
import os, subprocess, sys
from pathlib import Path
from mgrpo.sandbox import linux, walled
from mgrpo.sandbox.cases import StdioTest
from mgrpo.sandbox.sandbox import Sandbox

folder, library = Path(sys.argv[1]), Path(sys.argv[2])

def mount(path, kind="tmpfs", source="none", flags=0):
    os.makedirs(path, exist_ok=True)
    linux.mount(str(source), str(path), kind, flags)
    if kind == "tmpfs":
        (path / "secret").write_text("seen")
        path.chmod(0o777)

is_root = os.geteuid() == 0
(folder / "removed").mkdir()
begin, began = os.pipe()
outside = os.fork()
if outside == 0:
    os.read(begin, 1)
    os.rmdir(folder / "removed")
    os._exit(0)
if not is_root:
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"4711 {os.stat(folder).st_uid} 1")
linux.unshare(linux.CLONE_NEWNS)
linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
mount(folder / "deep/in/memory")
mount(folder / "bound", "", folder / "deep", linux.MS_BIND | linux.MS_REC)
mount(folder / "read only", "", folder / "deep", linux.MS_BIND)
linux.mount("none", str(folder / "read only"), "", linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY)
mount(folder / "covered/inner")
mount(folder / "covered")
mount(folder / "closed/inner")
(folder / "closed/inner").chmod(0)
if is_root:
    os.chown(folder / "closed", 4712, 4712)
(folder / "closed").chmod(0)
mount(folder / "removed")
os.write(began, b"x")
os.waitpid(outside, 0)
mount(library / "one")
mount(library / "two/inner")
mount(library / "two")
mount(library / "three")
mount(library / "three")
readable = walled.readable_paths()
walled.readable_paths = lambda: (*readable, str(library))
"""
_PROGRAM = """
import os
mounts = [line.split()[4].replace("\\\\040", " ") for line in open("/proc/self/mountinfo")]
def can_write(folder):
    try: open(os.path.join(folder, "mgrpo-probe"), "w").close()
    except OSError: return False
    return True
print([path for path in mounts if can_write(path)], [path for path in mounts if "foreign" in path])
print([os.path.exists(place + FOLDER + "/deep/in/memory/secret") for place in ("", "/outside")])
print([os.path.exists("/outside" + LIBRARY + name) for name in ("/one/secret", "/two/inner", "/three/secret")])
"""
_RUN = """
program = f"FOLDER, LIBRARY = {str(folder)!r}, {str(library)!r}\\n" + sys.argv[3]
expected = "['/tmp'] []\\n[False, False]\\n[True, False, True]"
for walls in ["user", "root"] if is_root else ["user"]:
    with Sandbox(num_slots=1, walls=[walls]) as sandbox:
        assert sandbox.start().missing == ()
        verdicts = sandbox.run_stdio(program, [StdioTest("", expected)], 20.0).result()
        print(walls, verdicts.results)
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A folder below /tmp for others' mounts, and one of a library, which programs may read."""
    skip_without_namespaces()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "library").mkdir()
    return tmp_path / "foreign", tmp_path / "library"


def run_among_mounts(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _MOUNTS + script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_walls_rise_whatever_others_have_mounted_below_tmp(folders):
    """Jobs of Slurm, AppImages and containers mount there; one such mount took the sandbox from every user of a machine.

    Of these mounts a program sees none; those within its library it reads and cannot write.
    """
    done = run_among_mounts(_RUN, *folders, _PROGRAM)
    kinds = ["user", "root"] if os.geteuid() == 0 else ["user"]
    assert done.stdout == "".join(f"{kind} [1]\n" for kind in kinds), done.stderr


def test_a_library_that_has_vanished_is_named(tmp_path):
    """A bare "No such file or directory" gives its reader nothing to look for."""
    vanished = tmp_path / "vanished"
    vanished.mkdir()
    descriptor = os.open(vanished, os.O_PATH)
    vanished.rmdir()
    with pytest.raises(OSError, match=rf"mount: .* \({vanished} \(deleted\) at {tmp_path}\)"):
        linux.mount(f"/proc/self/fd/{descriptor}", str(tmp_path), flags=linux.MS_BIND)
    os.close(descriptor)
