"""The process that keeps a box: raises the walls, starts commands, and ends everything with the box. Standard library only.

Within walls it is the first process of a PID namespace, and the kernel ends all others with it; without, it adopts and kills them.
It ends when its owner closes their connection, however that ends. Packets are small: long content comes in files in memory.

    owner -> keeper   {"ask": "run" | "put" | "get", "id"} and descriptors: the job (JSON), stdin, stdout, stderr
                      {"ask": "kill", "id"} / {"ask": "end"}: everything
    keeper -> owner   {"ready": true}, with the socket on which the endpoint is reached / {"refused": why, "is_forbidden"}
                      {"id", "status", "why"} / {"ended": true}
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn

from mgrpo.environments.boxes.local import leftover, sight
from mgrpo.processes.lifetime import adopt_orphans, children, die_with_parent, kill_descendants
from mgrpo.sandbox import linux
from mgrpo.sandbox.seccomp import filter_program
from mgrpo.sandbox.supervision import exceed_memory, others, reap_descendants, remove_folder, socket_bytes
from mgrpo.sandbox.walls import (
    become_unprivileged,
    enter_user_namespace,
    forbid_namespaces,
    is_forbidden,
    show_own_processes,
)

MAX_PACKET = 4096
_WATCH_S = 0.2
_CHUNK = 2**20
_NOT_STARTED = 127
_OPEN_FILES = 1024
_BYTES_A_FILE = 8192
"""Bytes of a box's quota per allowed file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSetup:
    """Settings of a keeper."""

    descriptor: int
    """Its connection to the owner."""
    walls: Literal["user", "root", "none"]
    folder: str
    """The working folder; without walls, the folder that it lies in is removed at the end."""
    shown: dict[str, str]
    is_image: bool
    network: bool
    program_ids: tuple[int, int]
    """The first user id for the box's programs, and the number of ids."""
    memory_bytes: int
    disk_bytes: int
    max_processes: int
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every command."""

    def text(self) -> str:
        return json.dumps(asdict(self))


def main(text: str) -> None:
    """Keep one box until its owner is gone."""
    setup = KeeperSetup(**json.loads(text))
    owner = socket.socket(fileno=setup.descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    # When memory runs out, the kernel ends these processes first.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    try:
        endpoint = None
        program_id = setup.program_ids[0]
        if setup.walls == "none":
            adopt_orphans()
            leftover.lock(setup.folder)
        else:
            program_id = _program_id(setup)
            endpoint = _raise_walls(setup, program_id)
    except Exception as err:
        why = f"{setup.walls}: {err if isinstance(err, OSError) else repr(err)}"
        answer = {"refused": why, "is_forbidden": isinstance(err, OSError) and is_forbidden(err)}
        owner.send(json.dumps(answer)[:MAX_PACKET].encode())
        return
    if setup.walls != "none":
        _go_on_as_first(owner)
    keeper = _Keeper(setup, program_id, owner)
    try:
        ready = json.dumps({"ready": True}).encode()
        if endpoint is None:
            owner.send(ready)
        else:
            socket.send_fds(owner, [ready], [endpoint.fileno()])
            endpoint.close()
        keeper.serve()
    except ConnectionError:  # the owner is gone
        pass
    except Exception:
        traceback.print_exc()
    keeper.end()


def _program_id(setup: KeeperSetup) -> int:
    """The user id for the box's programs: random without a user namespace, where boxes should not share one."""
    first, count = setup.program_ids
    return first if setup.walls == "user" else first + int.from_bytes(os.urandom(4), "little") % count


def _raise_walls(setup: KeeperSetup, program_id: int) -> socket.socket | None:
    """Raise the walls; returns their socket at 127.0.0.1, for the owner to accept on; None with the machine's network."""
    if setup.walls == "user":
        enter_user_namespace(range(program_id, program_id + 1))
    own = linux.CLONE_NEWNS | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC | linux.CLONE_NEWPID
    linux.unshare(own if setup.network else own | linux.CLONE_NEWNET)
    endpoint = None
    if not setup.network:
        linux.raise_loopback()
        endpoint = socket.create_server(("127.0.0.1", 0), backlog=256)
    sight.enter_box(
        setup.shown,
        program_id=program_id,
        disk_bytes=setup.disk_bytes,
        max_files=max(1024, setup.disk_bytes // _BYTES_A_FILE),
        names=not setup.is_image,
    )
    if setup.walls == "user":
        forbid_namespaces()
    linux.drop_bounding_set()
    return endpoint


def _go_on_as_first(owner: socket.socket) -> None:
    """Continue in a child, the first process of the new PID namespace; each of the two ends with the other."""
    child = os.fork()
    if child:
        owner.close()
        os.waitpid(child, 0)
        os._exit(0)
    die_with_parent()
    show_own_processes()
    linux.set_dumpable(False)


class _Keeper:
    """The keeper's loop. Forked children return from no frame of this object: they execute a command or exit."""

    def __init__(self, setup: KeeperSetup, program_id: int, owner: socket.socket) -> None:
        self._setup, self._program_id, self._owner = setup, program_id, owner
        self._has_walls = setup.walls != "none"
        self._filter: bytes | None = None
        if self._has_walls:
            with contextlib.suppress(OSError, AttributeError):
                self._filter = filter_program(internet=True)
        self._commands: dict[int, int] = {}
        """The owner's number of each running process."""
        self._why = ""
        counts_sockets = self._has_walls and not setup.network and os.path.exists("/proc/self")
        self._socket_bytes = socket_bytes() if counts_sockets else 0

    def serve(self) -> None:
        """Serve until the owner closes the connection."""
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._owner, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            ready = {
                descriptor for descriptor, _ in poll.poll(1000 * _WATCH_S if self._commands or self._left() else None)
            }
            if woken in ready:
                os.read(woken, _CHUNK)
            self._reap(os.WNOHANG)
            if self._owner.fileno() in ready:
                packet, descriptors, _, _ = socket.recv_fds(self._owner, MAX_PACKET, 4)
                if not packet:
                    return
                self._answer(json.loads(packet), descriptors)
            self._enforce()

    def end(self) -> None:
        if self._has_walls:
            os._exit(0)  # with which the kernel ends the rest
        reap_descendants()
        remove_folder(os.path.dirname(self._setup.folder))

    def _answer(self, question: dict[str, Any], descriptors: list[int]) -> None:
        match question["ask"]:
            case "kill":
                for pid, number in self._commands.items():
                    if number == question["id"]:
                        # It may not have its own group yet, and has no children before.
                        for kill in (os.kill, os.killpg):
                            with contextlib.suppress(ProcessLookupError, PermissionError):
                                kill(pid, signal.SIGKILL)
            case "end":
                self._kill_all()
                self._tell({"ended": True})
            case kind:
                try:
                    pid = os.fork()
                except OSError as err:
                    self._tell(
                        {"id": question["id"], "status": _NOT_STARTED, "why": f"no process can be started: {err}"}
                    )
                else:
                    if pid == 0:
                        self._become(kind, descriptors)
                    self._commands[pid] = question["id"]
                for descriptor in descriptors:
                    os.close(descriptor)

    def _become(self, kind: str, descriptors: list[int]) -> NoReturn:
        """Do the job in a forked child, with the rights of the box's programs."""
        status = _NOT_STARTED
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for changed in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(changed, signal.SIG_DFL)
            job = json.loads(_content(descriptors[0]))
            for number, descriptor in enumerate(descriptors[1:]):
                os.dup2(descriptor, number)  # these come from the owner as 3 or above
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            if self._has_walls:
                _limit(self._setup)
                become_unprivileged(self._program_id)
                if self._filter is not None:
                    linux.filter_system_calls(self._filter)
                linux.set_dumpable(True)
            else:
                die_with_parent()
            os.chdir(self._setup.folder)
            _JOBS[kind](job, self._setup)
            status = 0
        except OSError as err:
            os.write(2, f"{err.errno} {err.strerror}".encode())
        except BaseException as err:
            os.write(2, f"{errno.EINVAL} {err!r}".encode())
        os._exit(status)

    def _reap(self, options: int) -> None:
        """Reap ended processes, also adopted ones, and report the ends of commands."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, options)
                if pid == 0:
                    return
                number = self._commands.pop(pid, None)
                if number is not None:
                    self._tell({"id": number, "status": os.waitstatus_to_exitcode(status), "why": self._why})
        self._why = ""

    def _kill_all(self) -> None:
        if self._has_walls:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            self._reap(0)
            return
        for pid in list(self._commands):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reap_without_walls()

    def _reap_without_walls(self) -> None:
        while children(os.getpid()):
            kill_descendants(os.getpid())
            self._reap(os.WNOHANG)

    def _left(self) -> bool:
        """True while any process remains."""
        return bool(children(os.getpid())) if not self._has_walls else bool(others())

    def _enforce(self) -> None:
        """End all processes if together they exceed a limit."""
        processes = others() if self._has_walls else _descendants(os.getpid())
        if len(processes) > self._setup.max_processes:
            self._why = f"the box had more than {self._setup.max_processes} processes"
        elif exceed_memory(processes, self._setup.memory_bytes, self._socket_bytes):
            self._why = f"the box used more than {self._setup.memory_bytes // 2**20} MiB of memory"
        else:
            return
        self._kill_all()

    def _tell(self, answer: dict[str, Any]) -> None:
        self._owner.send(json.dumps(answer).encode())


def _limit(setup: KeeperSetup) -> None:
    """Set the limits of each process; the keeper enforces those of their sums."""
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, setup.memory_bytes),
        (resource.RLIMIT_NPROC, setup.max_processes),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _run(job: dict[str, Any], setup: KeeperSetup) -> NoReturn:
    argv = job["argv"]
    try:
        os.chdir(job["cwd"])
        os.execvpe(argv[0], argv, setup.environment | job["env"])
    except (OSError, ValueError) as err:
        os.write(2, f"mgrpo: cannot start {argv[0]!r} in {job['cwd']}: {err}\n".encode())
        os._exit(_NOT_STARTED)


def _put(job: dict[str, Any], _: KeeperSetup) -> None:
    folder, path = os.path.dirname(job["path"]), job["path"]
    if folder:
        os.makedirs(folder, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, job["mode"])
    _regular(target, path)
    while piece := os.read(0, _CHUNK):
        while piece:
            piece = piece[os.write(target, piece) :]
    os.fchmod(target, job["mode"])


def _get(job: dict[str, Any], _: KeeperSetup) -> None:
    path, left = job["path"], job["max_bytes"]
    source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    _regular(source, path)
    while piece := os.read(source, _CHUNK):
        left -= len(piece)
        if left < 0:
            raise OSError(errno.EFBIG, f"longer than {job['max_bytes']} bytes", path)
        while piece:
            piece = piece[os.write(1, piece) :]


_JOBS = {"run": _run, "put": _put, "get": _get}


def _regular(descriptor: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def _content(descriptor: int) -> bytes:
    data = bytearray()
    os.lseek(descriptor, 0, os.SEEK_SET)
    while piece := os.read(descriptor, _CHUNK):
        data += piece
    return bytes(data)


def _descendants(pid: int) -> list[str]:
    found = [pid]
    for parent in found:
        found += children(parent)
    return [str(each) for each in found[1:]]
