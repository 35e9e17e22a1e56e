"""Whether this machine can isolate programs at all, asked of the kernel and not of the sandbox that is under test."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

_TRY = """
import ctypes, os, sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)

def check(result):
    if result != 0:
        error = ctypes.get_errno()
        sys.exit(os.strerror(error))

user = os.geteuid()
if sys.argv[1] == "user":
    check(libc.unshare(NEWUSER))
    with open("/proc/self/uid_map", "w") as file:
        file.write(f"0 {user} 1")
check(libc.unshare(NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET))
check(libc.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None))
check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(6), None))
"""


@functools.cache
def _refusals() -> tuple[str, ...]:
    """Why neither an ordinary user nor root gets namespaces here; empty where one of them does."""
    found = []
    for kind in ("user", "root"):
        done = subprocess.run([sys.executable, "-S", "-c", _TRY, kind], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return ()
        found.append(f"{kind}: {done.stderr.strip().splitlines()[-1]}")
    return tuple(found)


def skip_without_namespaces() -> None:
    """Skip the test where the kernel refuses namespaces; anywhere else a sandbox that does not start is a failure."""
    if refusals := _refusals():
        pytest.skip(f"the kernel refuses namespaces to this user: {'; '.join(refusals)}")


def run_as_somebody(script: str) -> str:
    """What a script prints that runs as a user without rights, in a user namespace."""
    prelude = """
import json, os
from pathlib import Path
from mgrpo.sandbox import linux
from mgrpo.sandbox.cases import StdioTest
from mgrpo.sandbox.sandbox import Sandbox

def become_somebody():
    user, group = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"4711 {user} 1")
    Path("/proc/self/gid_map").write_text(f"4711 {group} 1")

if os.fork() == 0:
    become_somebody()
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
    os._exit(0)
if os.wait()[1] != 0:
    raise SystemExit(77)
become_somebody()
"""
    done = subprocess.run([sys.executable, "-c", prelude + script], capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("this machine has no user namespace within a user namespace")
    assert done.returncode == 0, done.stderr
    return done.stdout
