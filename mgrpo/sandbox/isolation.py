"""The isolation of programs on this machine, measured by a program that tries to break out."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mgrpo.sandbox.paths import outer_path
from mgrpo.sandbox.zygote import Walls

_WALLS = {
    "user": "namespaces inside a user namespace",
    "root": "namespaces set up as root",
    "none": "no namespaces",
}
_ALLOW_THEM = (
    "The kernel forbids them to this user. Allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined), or run the service on a machine that allows them and set code_api_url. Or accept that "
    "programs can access whatever this user can: code_sandbox_accept_risk=true in a run, --accept_risk for the service"
)
_MEND_THEM = (
    "The kernel does not forbid them, so no setting of the machine helps: remove the cause named above, or run the "
    "service on another machine and set code_api_url"
)
_PROBE = """
try:
    import ctypes, json, os, socket, sys
except BaseException as err:
    raise SystemExit(print(f"cannot import Python's own modules: {err!r}"))
marker, port, prober = input(), int(input()), int(input())

def works(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return False
    return True

def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True

def connect():
    with socket.socket() as client:
        client.settimeout(5)
        client.connect(("127.0.0.1", port))

def is_closed(path):
    return not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0))

libc = ctypes.CDLL(None)
capabilities = (ctypes.c_uint32 * 6)()
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), capabilities)
closed = [folder for folder in sys.path if is_closed(folder)]
for folder in set(filter(os.path.isdir, sys.path)) - set(closed):
    closed += [os.path.join(folder, name) for name in os.listdir(folder) if is_closed(os.path.join(folder, name))]
folders = ("/", "/usr/lib", os.path.dirname(os.__file__), "/dev", "/var/tmp")
print(json.dumps([closed, {
    "processes": not is_there(prober),
    "files": not os.path.exists(marker) and not any(works(open, f + "/mgrpo-probe", "w") for f in folders),
    "network": not works(connect),
    "unprivileged": os.getuid() != 0 and not works(os.setuid, 0) and not any(capabilities),
    "system_calls": libc.prctl(21, 0, 0, 0, 0) == 2,
}]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The layers that are active. Limits on time, memory, processes and files always are."""

    walls: Walls
    processes: bool
    """Programs see only their own processes, none of which outlives them."""
    files: bool
    """Programs see only Python's files, and write only to memory that is freed after them."""
    network: bool
    """Programs have no network."""
    unprivileged: bool
    """Programs run as a user without privileges."""
    system_calls: bool
    """A filter blocks system calls that programs do not need."""
    reasons: tuple[str, ...] = field(default=())
    """Reasons why stronger kinds of walls are not available."""
    are_forbidden: bool = True
    """True if the kernel forbids those; False after a failure to set up walls that it allows."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Required layers that are not active: without them programs run only if the risk is accepted."""
        return tuple(layer for layer in ("processes", "files", "network") if not getattr(self, layer))

    def describe(self) -> str:
        """One line for the log."""
        layers = {
            "own processes only": self.processes,
            "own files only": self.files,
            "no network": self.network,
            "unprivileged user": self.unprivileged,
            "system call filter": self.system_calls,
            "resource limits": True,
        }
        active = ", ".join(layer for layer, is_active in layers.items() if is_active)
        absent = ", ".join(layer for layer, is_active in layers.items() if not is_active)
        why = "".join(f"; {reason}" for reason in self.reasons)
        return f"{_WALLS[self.walls]}; active: {active}; missing: {absent or 'nothing'}{why}"

    def refuse_if_missing(self, *, accept_risk: bool) -> None:
        """ValueError where a required layer is missing and the risk is not accepted."""
        if self.missing and not accept_risk:
            raise ValueError(
                f"this machine cannot isolate untrusted programs ({self.describe()}), so they will not run. "
                f"{_ALLOW_THEM if self.are_forbidden else _MEND_THEM}"
            )


def probe(walls: Walls, run: Callable[[str, str], str], **why: Any) -> Isolation:
    """Measure the layers by a program that tries forbidden operations; `run(program, stdin)` returns its output.

    RuntimeError with the reason where that program fails; `why`: fields of `Isolation` about stronger walls.
    """
    with tempfile.NamedTemporaryFile() as marker, socket.create_server(("127.0.0.1", 0)) as server:
        os.chmod(marker.name, 0o644)
        printed = run(_PROBE, f"{marker.name}\n{server.getsockname()[1]}\n{os.getpid()}\n")
    try:
        closed, layers = json.loads(printed)
    except ValueError:
        raise RuntimeError(f"the program that probes the sandbox ({_WALLS[walls]}) {printed.strip()}") from None
    if closed and walls != "none":
        raise RuntimeError(
            f"programs run as another user than root, who cannot read {outer_path(closed[0])}, so that imports would "
            "fail; open it with chmod -R a+rX, or run as an ordinary user"
        )
    return Isolation(walls=walls, **why, **layers)
