"""Stands in for the program `docker` where there is no daemon: the same words, namespaces of this machine, and a record of the calls.

It shows that the command lines do what the box needs of containers. It cannot show that a real daemon takes each of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

IMAGE, WORKDIR = "agents:1", "/srv/work"
_LOOPBACK = "import fcntl, socket, struct; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
_LOOPBACK += "fcntl.ioctl(s, 0x8914, struct.pack('16sH22x', b'lo', 1))"
_SPACES = ("--user", "--pid", "--mount", "--net")


def main() -> int:
    state = Path(os.environ["FAKE_DOCKER"])
    words = sys.argv[1:]
    with open(state / "calls", "a") as calls:
        calls.write(json.dumps(words) + "\n")
    match words:
        case ["image", "inspect", "--format", _, image]:
            print(WORKDIR if image == IMAGE else "")
            return int(image != IMAGE)
        case ["run", *rest]:
            return _run(state, *_options(rest))
        case ["exec", *rest]:
            return _exec(state, *_options(rest))
        case ["inspect", "--format", "{{.State.Running}}", name]:
            print(str(_pid(state, name) is not None).lower())
            return 0
        case ["ps", *_]:
            for file in state.glob("*.container"):
                print(file.stem)
            return 0
        case ["inspect", "--format", form, *names] if "Labels" in form:
            for name in names:
                print(name, json.loads((state / f"{name}.container").read_text())["label"])
            return 0
        case ["rm", "-f", *names] | ["rm", "--force", "--volumes", *names]:
            for name in names:
                if (pid := _pid(state, name)) is not None:
                    os.kill(pid, signal.SIGKILL)
                (state / f"{name}.container").unlink(missing_ok=True)
            return 0
    sys.stderr.write(f"docker: {words[0]}: denied\n")
    return 1


def _options(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        name, words = words[0], words[1:]
        value = "" if name in ("--rm", "--interactive") else words[0]
        words = words[1:] if value else words
        options.setdefault(name, []).append(value)
    return options, words


def _run(state: Path, options: dict[str, list[str]], words: list[str]) -> int:
    arguments = words[1:]
    source, target, _ = options["--volume"][0].split(":")
    prelude = f"""set -e
mount -t tmpfs none /run; mkdir -p {target}; mount --bind {source} {target}
mount -t tmpfs none /srv; mkdir {WORKDIR}; cd {WORKDIR}; mount -t tmpfs none /tmp
exec "$@" """
    spaces = [name for name in _SPACES if name != "--net" or options["--network"] == ["none"]]
    inner = ["sh", "-c", prelude, "sh", *options["--entrypoint"], *arguments]
    if "--net" in spaces:
        inner = ["sh", "-c", f'{sys.executable} -c "{_LOOPBACK}"; exec "$@"', "sh", *inner]
    first = subprocess.Popen(["unshare", "--map-root-user", *spaces, "--fork", "--kill-child", "--mount-proc", *inner])
    name = options["--name"][0]
    file = state / f"{name}.container"
    file.write_text(json.dumps({"pid": first.pid, "label": options["--label"][0].partition("=")[2]}))
    status = first.wait()
    if "--rm" in options:
        file.unlink(missing_ok=True)
    return status


def _exec(state: Path, options: dict[str, list[str]], words: list[str]) -> int:
    name, *argv = words
    if (pid := _pid(state, name)) is None:
        sys.stderr.write(f"Error response from daemon: No such container: {name}\n")
        return 1
    given = {"PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin", "HOME": "/"}
    for each in options.get("--env", []):
        variable, is_set, value = each.partition("=")
        given[variable] = value if is_set else os.environ[variable]
    cwd = options.get("--workdir", [WORKDIR])[0]
    spaces = [each for each in _SPACES if os.path.exists(f"/proc/{pid}/ns/{each[2:].replace('mount', 'mnt')}")]
    entered = ["nsenter", "--target", str(pid), "--preserve-credentials", *spaces, "setsid", "--wait"]
    inner = ["sh", "-c", 'cd "$0" && exec env -i "$@"', cwd, *(f"{k}={v}" for k, v in given.items()), *argv]
    status = subprocess.call([*entered, *inner])
    return 128 - status if status < 0 else status


def _pid(state: Path, name: str) -> int | None:
    """The first process of a container that runs."""
    try:
        outer = json.loads((state / f"{name}.container").read_text())["pid"]
        inner = [int(pid) for pid in Path(f"/proc/{outer}/task/{outer}/children").read_text().split()]
        return inner[0] if inner and b"SIGCHLD" in Path(f"/proc/{inner[0]}/cmdline").read_bytes() else None
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main())
