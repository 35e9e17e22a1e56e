"""A filter of system calls, where the machine has libseccomp: it blocks calls that a program never needs for its tests.

It reduces the part of the kernel that a program can reach, and replaces a missing network namespace.
"""

from __future__ import annotations

import ctypes
import errno
import os

from mgrpo.sandbox import linux

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NOT_EQUAL = 1
_EQUAL = 4
_GREATER = 6
_MASKED_EQUAL = 7
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_SOCK_DGRAM = 2
_SOCKET_TYPE_MASK = 0xF
_OTHER_SOCKET_TYPES = (2, 3, 4, 5, 6, 10)
"""All but SOCK_STREAM. A datagram socket holds messages of any number of others, which may be closed since."""
_SOL_SOCKET, _SO_SNDBUF = 1, 7
_SHARED_WITHOUT_FILE = 0x01 | 0x20
"""MAP_SHARED and MAP_ANONYMOUS. A program can hold such memory without mapping it, where nothing counts it."""

_REFUSED = (
    # namespaces, mounts and roots
    *("unshare", "setns", "mount", "umount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "name_to_handle_at", "open_by_handle_at"),
    # other processes
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "process_madvise", "pidfd_getfd"),
    # the kernel itself
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("add_key", "request_key", "keyctl", "init_module", "finit_module", "delete_module", "kexec_load"),
    *("kexec_file_load", "reboot", "swapon", "swapoff", "syslog", "acct", "quotactl", "iopl", "ioperm"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname", "vhangup"),
    # memory outside any process, which the limits do not count
    *("memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open", "vmsplice", "landlock_create_ruleset"),
    # scarce resources of the machine or its user
    *("io_setup", "inotify_init", "inotify_init1", "fanotify_init"),
    # the kernel's treatment of the process, and the place of its memory
    *("personality", "modify_ldt", "mbind", "set_mempolicy", "set_mempolicy_home_node", "migrate_pages", "move_pages"),
)
_NAMESPACE_FLAGS = (
    linux.CLONE_NEWNS,
    linux.CLONE_NEWUTS,
    linux.CLONE_NEWIPC,
    linux.CLONE_NEWUSER,
    linux.CLONE_NEWPID,
    linux.CLONE_NEWNET,
    0x02000000,  # CLONE_NEWCGROUP
)


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def filter_program(*, internet: bool = False) -> bytes:
    """The BPF program for `linux.filter_system_calls`; OSError where there is no libseccomp.

    `internet`: TCP and UDP are allowed, as far as the network namespace has them.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    if not context:
        raise OSError(errno.ENOSYS, "seccomp_init failed")
    try:
        rules = _Rules(library, context)
        for name in _REFUSED:
            rules.refuse(name)
        for name in ("socket", "socketpair"):
            rules.refuse_sockets(name, internet=internet)
        # The supervisor counts a socket as full; a program must not make it larger.
        rules.refuse("setsockopt", _Comparison(1, _EQUAL, _SOL_SOCKET, 0), _Comparison(2, _EQUAL, _SO_SNDBUF, 0))
        rules.refuse("mmap", _Comparison(3, _MASKED_EQUAL, _SHARED_WITHOUT_FILE, _SHARED_WITHOUT_FILE))
        # Only pid 0, the calling process itself, is allowed.
        rules.refuse("prlimit64", _Comparison(0, _NOT_EQUAL, 0, 0))
        for flag in _NAMESPACE_FLAGS:
            rules.refuse("clone", _Comparison(0, _MASKED_EQUAL, flag, flag))
        # A filter cannot read clone3's flags, which are in memory; on this error the C library falls back to clone.
        rules.refuse("clone3", error=errno.ENOSYS)
        with open(os.memfd_create("filter"), "r+b") as file:
            _check(library.seccomp_export_bpf(context, ctypes.c_int(file.fileno())), "seccomp_export_bpf")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


class _Rules:
    def __init__(self, library: ctypes.CDLL, context: ctypes.c_void_p) -> None:
        self._library, self._context = library, context

    def refuse(self, name: str, *comparisons: _Comparison, error: int = errno.EPERM) -> None:
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # unknown to this library or this processor
            return
        array = (_Comparison * len(comparisons))(*comparisons)
        action, count = ctypes.c_uint32(_ERRNO | error), ctypes.c_uint(len(comparisons))
        result = self._library.seccomp_rule_add_array(self._context, action, ctypes.c_int(number), count, array)
        _check(result, f"the rule for {name}")

    def refuse_sockets(self, name: str, *, internet: bool) -> None:
        """All but streams between processes and, with `internet`, TCP and UDP."""
        if not internet:
            self.refuse(name, _Comparison(0, _NOT_EQUAL, _AF_UNIX, 0))
        else:
            for family in {*range(_AF_INET6)} - {_AF_UNIX, _AF_INET}:
                self.refuse(name, _Comparison(0, _EQUAL, family, 0))
            self.refuse(name, _Comparison(0, _GREATER, _AF_INET6, 0))
        for kind in _OTHER_SOCKET_TYPES:
            is_kind = _Comparison(1, _MASKED_EQUAL, _SOCKET_TYPE_MASK, kind)
            if internet and kind == _SOCK_DGRAM:
                self.refuse(name, _Comparison(0, _EQUAL, _AF_UNIX, 0), is_kind)
            else:
                self.refuse(name, is_kind)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(-result, f"{what} failed: {os.strerror(-result)}")
