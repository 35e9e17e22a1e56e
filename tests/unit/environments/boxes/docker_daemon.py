"""A docker daemon of the tests' own, and an image that is made of this machine's programs: no registry is asked.

The daemon has namespaces of its own for its network, mounts and processes, and ends with the tests, however they end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.environments.boxes.boxed import wait_until

_PROGRAMS = (
    *("sh", "bash", "env", "cat", "cp", "mkdir", "mktemp", "rm", "chmod", "chown", "ln", "ls", "dirname", "basename", "head"),
    *("wc", "tail", "tee", "grep", "sleep", "setsid", "su", "id", "touch", "mknod", "dd", "ps", "stat", "df", "timeout", "seq", "true"),
)  # fmt: skip
_LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "tkinter",
    "__pycache__",
    "turtledemo",
}
_FIRST = """
exec 3<&0
{ [ -z "$IP" ] || "$IP" link set lo up; }
dockerd --data-root "$0/data" --exec-root "$0/exec" --pidfile "$0/pid" --host "unix://$0/socket" \\
    --exec-opt native.cgroupdriver=cgroupfs --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --userland-proxy=false "$@" >"$0/log" 2>&1 &
daemon=$!
(read -r line <&3; kill $daemon) &
wait $daemon
"""


@contextlib.contextmanager
def daemon(folder: Path, *options: str) -> Iterator[str]:
    """Its address, DOCKER_HOST; the test is skipped where there can be none."""
    missing = [name for name in ("docker", "dockerd", "containerd", "runc", "unshare") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"no daemon of docker can be started: {' '.join(missing) or 'root'} is missing")
    spaces = ["--net", "--mount", "--pid", "--fork", "--mount-proc"]
    command = ["unshare", *spaces, "sh", "-c", _FIRST, str(folder), *options]
    variables = {**os.environ, "IP": shutil.which("ip") or ""}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=variables) as process:
        try:
            wait_until(lambda: (folder / "socket").exists() or process.poll() is not None)
            if process.poll() is not None:
                said = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
                pytest.skip(f"dockerd does not run here: {said[-3:]}")
            address = f"unix://{folder}/socket"
            _skip_unless(address, "version")
            yield address
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            shutil.rmtree(folder / "data", ignore_errors=True)


def docker(*words: str, stdin: bytes | None = None) -> str:
    """What the program `docker` prints; it must end well."""
    done = subprocess.run(["docker", *words], input=stdin, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


def _skip_unless(address: str, *words: str) -> None:
    done = subprocess.run(["docker", "--host", address, *words], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"docker {' '.join(words)} does not work here: {done.stderr.strip()[-500:]}")


def make_image(address: str, name: str, workdir: str) -> None:
    """An image with a shell, the usual small programs and this Python's standard library, as `python3`.

    The test is skipped where the daemon can run no container of it.
    """
    words = ["docker", "--host", address, "import", "--change", f"WORKDIR {workdir}", "-", name]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        with tarfile.open(fileobj=process.stdin, mode="w|") as image:
            _fill(image)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
    _skip_unless(address, "run", "--rm", name, "true")


def _fill(image: tarfile.TarFile) -> None:
    libraries: set[str] = set()
    folders = {"/tmp": 0o1777, "/etc": 0o755, "/home/agent": 0o755, "/root": 0o700}
    for folder, mode in folders.items():
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        image.addfile(entry)
    programs = {f"/bin/{name}": path for name in _PROGRAMS if (path := shutil.which(name))}
    programs |= dict.fromkeys(("/usr/bin/python3", "/usr/bin/python"), os.path.realpath(sys.executable))
    standard = sysconfig.get_path("stdlib")
    loaded = [str(path) for path in Path(standard, "lib-dynload").glob("*.so")]
    for path in [*programs.values(), *loaded]:
        libraries |= _libraries(path)
    for name, path in programs.items():
        image.add(os.path.realpath(path), name)
    for path in sorted(libraries):
        image.add(os.path.realpath(path), path)
    image.add(
        standard,
        standard,
        filter=lambda entry: None if _LEFT_OUT & {*Path(entry.name).parts} or "config-" in entry.name else entry,
    )


def _libraries(path: str) -> set[str]:
    """Of a program, the loader included."""
    printed = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    return {word for line in printed.splitlines() for word in line.split() if word.startswith("/")}
