"""The walls around a slot: namespaces, a private root, an unprivileged user. Runs inside the slot's process only.

Three kinds. "user": everything inside a user namespace, which needs no privileges. "root": the same set up as root,
where user namespaces are forbidden. "none": no namespaces, where the user accepts the risk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mgrpo.sandbox import linux
from mgrpo.sandbox.limits import SCRATCH_BYTES
from mgrpo.sandbox.paths import inner_path

SCRATCH = "/tmp"
"""The program's folder inside the walls; before that, where the new root is built."""
# Not /dev/zero: a shared mapping of it is memory that belongs to no process.
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_OWN = (*DEVICES, "/proc")
LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": SCRATCH,
}
# The kernel itself keeps the flags about access times.
_KEPT_FLAGS = {b"nodev": linux.MS_NODEV, b"noexec": linux.MS_NOEXEC}


def is_forbidden(err: OSError) -> bool:
    """True if the kernel forbids namespaces to this process; False for other failures to set up walls."""
    by_the_kernel = err.filename is None or str(err.filename).startswith("/proc/")
    return by_the_kernel and err.errno in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EUSERS, errno.ENOSYS)


def enter_user_namespace(program_ids: range) -> None:
    """Enter a user namespace with all capabilities over it, in which `program_ids` are unprivileged users.

    Root also keeps its own user id: it can read root's files while it sets up the walls, and a program, with another
    id, cannot. Any other user can map only one id, the first, and drops its capabilities later.
    """
    program_id = program_ids.start
    if os.geteuid() != 0:
        user, group = os.geteuid(), os.getegid()
        linux.unshare(linux.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{program_id} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{program_id} {group} 1")
        return
    # Only a process outside the namespace may write a map of several ids.
    outer = os.getpid()
    is_inside, now_inside = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(now_inside)
            os.read(is_inside, 1)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{outer}/{name}").write_text(f"0 0 1\n{program_id} {program_id} {len(program_ids)}")
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(is_inside)
    try:
        linux.unshare(linux.CLONE_NEWUSER)
    finally:
        os.close(now_inside)
        status = os.waitpid(helper, 0)[1]
    if status != 0:
        raise PermissionError(
            f"the user ids 0 and {program_id} to {program_ids[-1]} cannot be mapped into a user namespace"
        )


def enter_private_root(readable: Sequence[str]) -> None:
    """Leave the network and the file system: only `readable` remains, read-only, at each path's `inner_path`.

    The machine's /proc stays visible for the supervisors, which cannot mount their own without it and then unmount it.
    """
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWUTS)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    paths = [*outermost(readable), *_OWN]
    # Opened first, because the new root may cover one of them.
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths if os.path.exists(path)}
    root = os.path.realpath(SCRATCH)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=1m")
    for path, source in sources.items():
        target = root + (path if path in _OWN else inner_path(path))
        if os.path.islink(path) and not path.startswith("/dev/"):
            os.symlink(os.readlink(path), target)
            continue
        make_mount_point(target, is_folder=os.path.isdir(f"/proc/self/fd/{source}"))
        linux.mount(f"/proc/self/fd/{source}", target, flags=linux.MS_BIND | linux.MS_REC)
    for source in sources.values():
        os.close(source)
    for link, target in LINKS.items():
        os.symlink(target, root + link)
    os.mkdir(root + SCRATCH)
    enter_root(root)


def enter_root(root: str, *, writable: Sequence[str] = ()) -> None:
    """Make the folder this process's root, in a new mount namespace, and all of it read-only except `writable` mounts."""
    os.chdir(root)
    linux.pivot_root(".", ".")
    linux.unmount(".")
    os.chdir("/")
    # Only now are the mounts of this process those of the new root alone: the machine's may have the same names.
    _make_read_only(writable)


def forbid_namespaces() -> None:
    """Forbid user namespaces inside this one: a program would have all capabilities in it."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")


def enter_private_run(program_id: int) -> bool:
    """Mount a /proc of new PID and mount namespaces only, in their first process, and an empty scratch folder.

    Returns True if there is a /proc, which needs the privilege to mount one.
    """
    has_proc = show_own_processes()
    mount_scratch(program_id)
    return has_proc


def show_own_processes() -> bool:
    """Mount a /proc of this PID namespace over the machine's. Returns True if there is one, as `enter_private_run` does."""
    has_proc = _mount_proc(SCRATCH)
    linux.unmount("/proc")
    if has_proc:
        linux.mount(SCRATCH, "/proc", flags=linux.MS_MOVE)
    return has_proc


def _mount_proc(target: str) -> bool:
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC | linux.MS_RDONLY
    # Kernels before 5.8 lack the option subset; there /proc also describes the machine.
    for options in ("subset=pid", ""):
        with contextlib.suppress(OSError):
            linux.mount("proc", target, "proc", flags, options)
            return True
    return False


def mount_scratch(program_id: int) -> None:
    """Mount an empty folder in memory, which is freed with the namespace."""
    options = f"mode=700,uid={program_id},gid={program_id},size={SCRATCH_BYTES},nr_inodes=4096"
    linux.mount("tmpfs", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)


def become_unprivileged(program_id: int) -> None:
    """Drop all privileges irrevocably, and root's user id where this process has it."""
    linux.forbid_new_privileges()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(program_id, program_id, program_id)
        os.setresuid(program_id, program_id, program_id)
    linux.drop_capabilities()


def outermost(paths: Sequence[str]) -> list[str]:
    """The paths that are not inside another one."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path == other or path.startswith(other + "/") for other in kept if not os.path.islink(other)):
            kept.append(path)
    return kept


def make_mount_point(path: str, *, is_folder: bool) -> None:
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _make_read_only(writable: Sequence[str]) -> None:
    """Remount everything read-only, submounts included, except /proc and these mounts."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        number, _, _, _, escaped, options = line.split()[:6]
        path = os.fsdecode(re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), escaped))
        if (path + "/").startswith("/proc/") or path in writable or not _leads_to(path, number):
            continue
        flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID
        if not path.startswith("/dev/"):
            flags |= linux.MS_NODEV
        for option in options.split(b","):
            flags |= _KEPT_FLAGS.get(option, 0)
        linux.mount("none", path, flags=flags)


def _leads_to(path: str, mount: bytes) -> bool:
    """True if the path is that of this mount. If not, another mount covers it, which cannot be removed within the walls."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return b"mnt_id:\t" + mount in Path(f"/proc/self/fdinfo/{descriptor}").read_bytes().splitlines()
    finally:
        os.close(descriptor)
