"""System calls that Python does not provide: namespaces, mounts, capabilities. Linux only, through libc."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

_MNT_DETACH = 2
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def unshare(flags: int) -> None:
    """Move this process (for CLONE_NEWPID: its children) into new namespaces."""
    _call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system; OSError names its kind or source and the target; an open file by its current path."""
    try:
        _call(
            "mount",
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            options.encode() or None,
        )
    except OSError as err:
        named = os.readlink(source) if os.path.islink(source) else kind or source
        raise OSError(err.errno, f"{err.strerror} ({named} at {target})") from None


def unmount(target: str) -> None:
    """Detach the mount at once; the kernel frees it after its last use."""
    _call("umount2", os.fsencode(target), ctypes.c_int(_MNT_DETACH))


def pivot_root(new_root: str, put_old: str) -> None:
    _call("pivot_root", os.fsencode(new_root), os.fsencode(put_old))


def raise_loopback() -> None:
    """Bring up 127.0.0.1 of this network namespace, in which it is down at first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        _, flags = struct.unpack("16sH22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16s24x", b"lo")))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def set_dumpable(is_dumpable: bool) -> None:
    """Allow or forbid other processes of the same user to trace this one and read its /proc entry."""
    _prctl(_PR_SET_DUMPABLE, int(is_dumpable))


def forbid_new_privileges() -> None:
    """Forbid additional privileges by exec, for this process and its children."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def filter_system_calls(program: bytes) -> None:
    """Install a BPF filter on this process and its children, irrevocably."""
    code = ctypes.create_string_buffer(program, len(program))
    described = _FilterProgram(len(program) // 8, ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(described))


def drop_bounding_set() -> None:
    """Forbid executed programs to gain a capability."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError as err:
            if err.errno not in (errno.EINVAL, errno.EPERM):
                raise
            return


def drop_capabilities() -> None:
    """Give up every capability of this process."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def _prctl(option: int, *arguments: int) -> None:
    rest = (*arguments, 0, 0, 0, 0)[:4]
    _call("prctl", ctypes.c_int(option), *map(ctypes.c_ulong, rest))


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc(), name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
