"""Boxes that are containers, by the command line of docker or podman.

A container's first process reads a pipe that its owner holds open, and ends with it: after a kill -9 of the owner the program
`docker run --rm` reads the end of its input, and the container is removed. Containers that outlive even that have a label, and
are removed at the next start.

Few storage drivers limit written bytes, so that their size is polled; volumes of an image do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mgrpo.environments.boxes.box import (
    CLOSE_LIMIT_S,
    MIB,
    Bounds,
    BoxError,
    BoxLost,
    Done,
    address_of,
    moved,
    ready_in_time,
)
from mgrpo.environments.boxes.containers.container_command import ContainerCommand
from mgrpo.environments.boxes.relay import Relay

LABEL = "mgrpo.owner"
_PREFIX = "mgrpo-container-"
_MOUNT = "/run/mgrpo"
_PORT = 47123
"""Port of the forwarder, in a container's network."""
_FOLDER = "/tmp/box"
"""Working folder if the image has none; any user may create this one."""
_SIZE_EVERY_S = 5.0
"""Seconds between reads of the written size, each of which takes less than a hundredth of a core."""
_ASK_S = 30.0
_FILE_LIMIT_S = 60.0
_ABSENT, _NOT_REGULAR = 44, 45
_REMOVE = ("rm", "--force", "--volumes")
"""With --volumes, since volumes that an image declares stay otherwise."""
_LONGEST_IMAGE = 512
_IMAGE = re.compile(
    r"(\[[0-9a-fA-F:]+\](:[0-9]+)?/|[a-zA-Z0-9][\w.-]*:[0-9]+/)?"
    r"[a-zA-Z0-9][\w.-]*(/[a-zA-Z0-9][\w.-]*)*(:\w[\w.-]{0,127})?(@[a-zA-Z][\w.+-]*:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
"""The grammar of docker's references. Podman would read others as files of this machine: dir:/, docker-archive:/."""
_OWNER = re.compile(r"(\w[\w.-]*) ([^/]+)/([^/]+/[0-9]{1,10}/\w+)")
"""A container's id and its label: the machine, and the owner's name on it."""
_PYTHON = """
for python in python3 python; do command -v $python >/dev/null && exec $python -I -S -c "$0" "$@"; done
echo "it has no python3, which a box needs" >&2; exit 127
"""
_MARK = "mgrpo-begun"
"""The first line of a command's output. Without it the program's own failure has the exit status, and no command has run."""
_NUMBERED = f'echo $$ > "$0" 2>/dev/null; echo {_MARK}; exec "$@"'
# A daemon passes two outputs on by two ways, which loses their order.
_AS_ONE = " 2>&1"
_PUT = 'mkdir -p "$(dirname "$0")" && cat > "$0" && chmod "$1" "$0"'
_GET = f'[ -e "$0" ] || exit {_ABSENT}; [ -f "$0" ] || exit {_NOT_REGULAR}; head -c "$1" "$0"'


async def open_container(bounds: Bounds, *, program: str = "docker") -> ContainerBox:
    """A container of the image.

    Raises:
        ValueError: no image is named, or the program is missing or has no daemon.
        BoxError: the container did not start.
    """
    if bounds.image is None:
        raise ValueError(
            f"agent_box={program} needs agent_image, the name of an image that has sh, python3 and what the agent needs"
        )
    if len(bounds.image) > _LONGEST_IMAGE or _IMAGE.fullmatch(bounds.image) is None:
        raise ValueError(
            f"image={bounds.image!r:.200} is no name of an image; expected [HOST[:PORT]/]NAME[:TAG][@DIGEST] in agent_image, or in "
            "the row's column image"
        )
    if shutil.which(program) is None:
        raise ValueError(
            f"agent_box={program}, but there is no program {program} on the PATH; install it, or set agent_box=local"
        )
    box = ContainerBox(program, bounds)
    await ready_in_time(box, box.start_container(), bounds, "a container")
    return box


async def remove_orphans(program: str) -> int:
    """Remove the containers of this machine whose owners have ended, and their folders; returns how many containers."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*-*"):
        pid, began = folder.name.removeprefix(_PREFIX).split("-")[:2]
        with contextlib.suppress(OSError):
            # Any user may put links and folders there.
            about = folder.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and _began(pid) != began:
                shutil.rmtree(folder, ignore_errors=True)
    if shutil.which(program) is None:
        return 0
    found = await ContainerCommand.run([program, "ps", "-a", "-q", "--filter", f"label={LABEL}"], limit_s=_ASK_S)
    if not (containers := found.stdout.decode(errors="replace").split()):
        return 0
    # A container that is gone by now is an error, but the others are printed all the same.
    form = '{{.Id}} {{index .Config.Labels "' + LABEL + '"}}'
    listed = await ContainerCommand.run([program, "inspect", "--format", form, *containers], limit_s=_ASK_S)
    left = []
    for line in listed.stdout.decode(errors="replace").splitlines():
        if (label := _OWNER.fullmatch(line)) and label[2] == _machine():
            pid = label[3].split("/")[1]
            if label[3] != f"{_boot()}/{pid}/{_began(pid)}":
                left.append(label[1])
    if left:
        await ContainerCommand.run([program, *_REMOVE, *left], limit_s=_ASK_S)
    return len(left)


class ContainerBox:
    """A `Box`."""

    folder = _FOLDER
    scratch = "/tmp"

    def __init__(self, program: str, bounds: Bounds) -> None:
        self._program, self._bounds = program, bounds
        self._name = f"mgrpo-box-{secrets.token_hex(8)}"
        # Only this user enters the outer folder on this machine; a container has the inner one.
        pid = str(os.getpid())
        self._outer = tempfile.mkdtemp(prefix=f"{_PREFIX}{pid}-{_began(pid)}-")
        self._socket = os.path.join(self._outer, "endpoint", "socket")
        self._relay: Relay | None = None
        self._is_forwarding = False
        self._first: ContainerCommand | None = None
        self._watching: asyncio.Task[None] | None = None
        self._number = 0
        self._why = "the box has ended"
        self._closing: asyncio.Task[None] | None = None

    async def start_container(self) -> None:
        """Start a container; raises as `open_container`."""
        os.mkdir(os.path.dirname(self._socket), mode=0o755)
        self._relay = Relay(_listen(self._socket))
        image = self._bounds.image
        assert image is not None
        inspect = await self._ask("image", "inspect", "--format", "{{.Config.WorkingDir}}", image, limit_s=None)
        if inspect.status != 0:
            pulled = await self._ask("pull", "--quiet", image, limit_s=None)
            if pulled.status != 0:
                raise ValueError(f"agent_image={image!r} cannot be had from {self._program}: {_said(pulled)}")
            inspect = await self._ask("image", "inspect", "--format", "{{.Config.WorkingDir}}", image, limit_s=None)
        found = inspect.stdout.decode(errors="replace").strip()
        self.folder = found if found.strip("/") else _FOLDER
        self._first = await ContainerCommand.start(
            [self._program, *self._run_arguments(image)], stdin=asyncio.subprocess.PIPE, max_bytes=4096
        )
        while b"ready\n" not in self._first.said:
            if self._first.process.returncode is not None:
                ended = await self._first.wait(None)
                raise BoxError(f"a container of {image!r} did not start: {_said(ended)}")
            await asyncio.sleep(0.01)
        self._watching = asyncio.create_task(self._watch_size())

    def _run_arguments(self, image: str) -> list[str]:
        memory = f"{self._bounds.memory_bytes}b"
        cpus = () if self._bounds.cpus is None else ("--cpus", f"{self._bounds.cpus:g}")
        owner = f"{_machine()}/{_boot()}/{os.getpid()}/{_began(str(os.getpid()))}"
        return [
            *("run", "--rm", "--interactive", "--name", self._name, "--label", f"{LABEL}={owner}"),
            *("--network", "bridge" if self._bounds.network else "none"),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(self._bounds.max_processes), *cpus),
            *("--security-opt", "no-new-privileges", "--cap-drop", "NET_RAW", "--cap-drop", "MKNOD"),
            *("--cap-drop", "SYS_PTRACE"),  # which the first process is not closed to
            *("--volume", f"{os.path.dirname(self._socket)}:{_MOUNT}:ro"),
            *("--entrypoint", "sh", image, "-c", _PYTHON, _text("first_process"), self.folder),
        ]

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float,
    ) -> Done:
        process = await self._begin(argv, env, cwd, stdin=stdin)
        return await process.wait(timeout_s)

    async def start(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> ContainerProcess:
        return await self._begin(argv, env, cwd, is_one=True)

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        done = await (await self._shell(_PUT, os.path.join(self.folder, path), f"{mode:o}", stdin=data)).wait(
            _FILE_LIMIT_S
        )
        if done.status != 0:
            raise OSError(errno.EIO, _said(done), path)

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        process = await self._shell(
            _GET, os.path.join(self.folder, path), str(max_bytes + 1), max_bytes=max(max_bytes + 2, 4096)
        )
        done = await process.wait(_FILE_LIMIT_S)
        if len(done.stdout) > max_bytes:
            raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes", path)
        if done.status == _ABSENT:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        if done.status != 0:
            raise OSError(errno.EINVAL, _said(done) or "not a regular file", path)
        return done.stdout

    async def url_for(self, url: str) -> str:
        """The URL through the relay, also with a network: the endpoint may listen only at this machine's loopback."""
        address = address_of(url)
        self._check()
        assert self._relay is not None
        self._relay.pass_to(address)
        if not self._is_forwarding:
            await self._start_forwarder()
            self._is_forwarding = True
        return moved(url, "127.0.0.1", _PORT)

    async def end_processes(self) -> None:
        """End all processes but the first. One that the container's user may not end loses the box."""
        self._is_forwarding = False
        await self._tell("all")

    async def alive(self) -> bool:
        if self._closing is not None or self._first is None or self._first.process.returncode is not None:
            return False
        try:
            found = await self._ask("inspect", "--format", "{{.State.Running}}", self._name)
        except BoxError:
            return False
        return found.stdout.strip() == b"true"

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _watch_size(self) -> None:
        """End the box once its written bytes exceed the limit."""
        while True:
            await asyncio.sleep(_SIZE_EVERY_S)
            with contextlib.suppress(OSError, BoxError):
                found = await self._ask("inspect", "--size", "--format", "{{.SizeRw}}", self._name)
                if (size := found.stdout.strip()).isdigit() and int(size) > self._bounds.disk_bytes:
                    self._why = f"the box has written more than {self._bounds.disk_bytes // MIB} MiB"
                    await self.close()

    async def _close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        try:
            with contextlib.suppress(OSError, BoxError):
                if self._first is not None:
                    if (stdin := self._first.process.stdin) is not None:
                        stdin.close()
                    await ContainerCommand.run([self._program, *_REMOVE, self._name], limit_s=CLOSE_LIMIT_S - 1)
                    await self._first.end(1.0)
        finally:
            if self._relay is not None:
                await self._relay.close()
            shutil.rmtree(self._outer, ignore_errors=True)

    async def _start_forwarder(self) -> None:
        words = ["sh", "-c", _PYTHON, _text("forwarder"), f"{_MOUNT}/socket", str(_PORT)]
        process = await self._begin(words, None, "/", is_one=True)
        try:
            async with asyncio.timeout(_ASK_S):
                while b"ready" not in process.said:
                    if process.command.process.returncode is not None:
                        done = await process.wait(None)
                        raise BoxError(f"agent_image={self._bounds.image!r} cannot reach the endpoint: {_said(done)}")
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise BoxError("a container's forwarder did not start") from None

    async def _shell(self, script: str, *arguments: str, stdin: bytes = b"", max_bytes: int = 4096) -> ContainerProcess:
        # Not in the working folder, which an agent may have removed.
        return await self._begin(["sh", "-c", script, *arguments], None, "/", stdin=stdin, max_bytes=max_bytes)

    async def _begin(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: str | None,
        *,
        stdin: bytes = b"",
        is_one: bool = False,
        max_bytes: int | None = None,
    ) -> ContainerProcess:
        self._check()
        # Not a number in a row: an agent would put a pipe there for its check to wait at.
        number = f"/tmp/.mgrpo-{secrets.token_hex(8)}"
        given, aliases, script = {}, [], ""
        for place, (name, value) in enumerate((env or {}).items()):
            # Not as an argument, which every user of this machine sees, nor by a name that docker's program takes as its own.
            alias = name
            if name.isascii() and name.isidentifier():
                alias = f"MGRPO_GIVEN_{place}"
                script += f'export {name}="${alias}"; unset {alias}; '
            given[alias] = value
            aliases += ["--env", alias]
        command = await ContainerCommand.start(
            [
                *(self._program, "exec", "--interactive", "--workdir", cwd or self.folder),
                *aliases,
                *(self._name, "sh", "-c", script + _NUMBERED + _AS_ONE * is_one, number, *argv),
            ],
            env=given,
            stdin=stdin,
            is_one=is_one,
            max_bytes=max_bytes or self._bounds.output_bytes,
            mark=f"{_MARK}\n".encode(),
        )
        return ContainerProcess(self, command, number)

    def why_ended(self, said: str) -> str:
        """The box's reason, with a command's last output unless the box was closed."""
        return self._why if self._closing is not None else f"{self._why}: {said}"

    async def kill(self, number: str) -> None:
        """Kill the process whose number is in this file; BoxLost if that fails."""
        await self._tell(f"one {number}")

    async def _tell(self, words: str) -> None:
        """Send the first process an order to kill others, see its file."""
        self._check()
        assert self._first is not None and self._first.process.stdin is not None
        self._number += 1
        line = f"{words} {self._number}\n".encode()
        self._first.process.stdin.write(line)
        try:
            async with asyncio.timeout(_ASK_S):
                while line not in self._first.said:
                    if self._first.process.returncode is not None:
                        raise BoxLost(self._why)
                    await asyncio.sleep(0.01)
        except TimeoutError:
            await self.close()
            raise BoxLost("processes in a container could not be ended") from None

    async def _ask(self, *words: str, limit_s: float | None = _ASK_S) -> Done:
        return await ContainerCommand.run([self._program, *words], limit_s=limit_s)

    def _check(self) -> None:
        if self._closing is not None:
            raise BoxLost(self._why)


class ContainerProcess:
    """A `Process`."""

    def __init__(self, box: ContainerBox, command: ContainerCommand, number: str) -> None:
        self._box, self.command, self._number = box, command, number
        self._done: Done | None = None

    @property
    def said(self) -> bytes:
        """Its output so far."""
        return self.command.said

    async def wait(self, timeout_s: float | None = None) -> Done:
        if self._done is not None:
            return self._done
        try:
            done = await self.command.wait(timeout_s)
        except TimeoutError:
            await self.kill()
            try:
                done = await self.command.wait(CLOSE_LIMIT_S)
            except TimeoutError:
                await self.command.end(0.0)
                raise BoxLost("a process in a container could not be killed") from None
            done = Done(
                status=-signal.SIGKILL, stdout=done.stdout, stderr=done.stderr, timed_out=True, truncated=done.truncated
            )
        except asyncio.CancelledError:
            with contextlib.suppress(BoxLost):
                await asyncio.shield(self.kill())
            raise
        if (done.status != 0 or not self.command.has_begun) and not await self._box.alive():
            raise BoxLost(self._box.why_ended(_said(done)))
        if not self.command.has_begun:
            raise BoxLost(f"a command in a container has not begun: {_said(done)}")
        self._done = done
        return done

    async def kill(self) -> None:
        if self.command.process.returncode is None:
            await self._box.kill(self._number)


def _listen(path: str) -> socket.socket:
    """A listening Unix socket; its path may exceed the kernel's limit."""
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
    os.chmod(path, 0o666)  # the container's user is another one
    listening.listen(256)
    return listening


def _text(module: str) -> str:
    """Source of a program for the container."""
    return Path(__file__).with_name(f"{module}.py").read_text()


def _said(done: Done) -> str:
    text = (done.stderr or done.stdout).decode(errors="replace").strip()[-500:]
    # An image's programs may write control characters for the terminal.
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


def _machine() -> str:
    """Host name and PID namespace of process ids: containers that share a daemon may share their name as well."""
    return socket.gethostname() + os.readlink("/proc/self/ns/pid")


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _began(pid: str) -> str:
    """Start time of a process in the kernel's ticks, which differs for another process with the same id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "ended"
