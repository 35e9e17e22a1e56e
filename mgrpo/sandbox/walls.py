"""The walls around a slot: namespaces, a root of its own, an unprivileged user. Runs inside the slot's process only.

Three kinds. "user": everything inside a user namespace, which needs no rights. "root": the same by the rights of root, where
user namespaces are forbidden. "none": no namespace at all, for who accepts the risk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from mgrpo.sandbox import kernel
from mgrpo.sandbox.limits import SCRATCH_BYTES

SCRATCH = "/tmp"
"""The program's own folder inside the walls, and before that the place where the new root is built."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": SCRATCH,
}
_KEPT_FLAGS = {
    "nosuid": kernel.MS_NOSUID,
    "nodev": kernel.MS_NODEV,
    "noexec": kernel.MS_NOEXEC,
    "noatime": kernel.MS_NOATIME,
    "nodiratime": kernel.MS_NODIRATIME,
    "relatime": kernel.MS_RELATIME,
}


def enter_user_namespace(program_id: int) -> None:
    """Become all-powerful over nothing: a namespace in which `program_id` is the one unprivileged user.

    Root keeps its own number besides, so that it can still read what only root may read while it builds the walls, and a
    program of another number cannot. Anyone else has only one number to give, and gives up its powers later.
    """
    if os.geteuid() != 0:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(kernel.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{program_id} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{program_id} {group} 1")
        return
    # Only a process outside the namespace may write a map of several numbers.
    outer = os.getpid()
    is_inside, now_inside = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(now_inside)
            os.read(is_inside, 1)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{outer}/{name}").write_text(f"0 0 1\n{program_id} {program_id} 1")
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(is_inside)
    try:
        kernel.unshare(kernel.CLONE_NEWUSER)
    finally:
        os.close(now_inside)
        status = os.waitpid(helper, 0)[1]
    if status != 0:
        raise PermissionError(f"the numbers 0 and {program_id} cannot be mapped into a user namespace")


def enter_private_root(readable: Sequence[str]) -> None:
    """Leave the network and the file system: what remains is `readable`, at its usual places, and nothing can be written.

    The machine's /proc stays visible for the supervisors, which cannot mount their own without it; they take it away.
    """
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    places = [*_outermost(readable), *_DEVICES, "/proc"]
    # Opened first: the new root may cover one of them.
    sources = {place: os.open(place, os.O_PATH | os.O_CLOEXEC) for place in places if os.path.exists(place)}
    kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for place, source in sources.items():
        target = SCRATCH + place
        if os.path.islink(place) and not place.startswith("/dev/"):
            os.symlink(os.readlink(place), target)
            continue
        _make_mount_point(target, is_folder=os.path.isdir(f"/proc/self/fd/{source}"))
        kernel.mount(f"/proc/self/fd/{source}", target, flags=kernel.MS_BIND | kernel.MS_REC)
    for source in sources.values():
        os.close(source)
    for link, target in _LINKS.items():
        os.symlink(target, SCRATCH + link)
    os.mkdir(SCRATCH + SCRATCH)
    _make_read_only(SCRATCH)
    os.chdir(SCRATCH)
    kernel.pivot_root(".", ".")
    kernel.unmount(".")
    os.chdir("/")


def forbid_namespaces() -> None:
    """No namespace of users inside this one: in it a program would be all-powerful again."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")


def enter_private_run(program_id: int) -> bool:
    """For the first process of new namespaces of processes and mounts: a /proc that shows only these, an empty scratch folder.

    Returns whether there is a /proc; without the right to mount one there is none at all.
    """
    has_proc = _mount_proc(SCRATCH)
    kernel.unmount("/proc")
    if has_proc:
        kernel.mount(SCRATCH, "/proc", flags=kernel.MS_MOVE)
    mount_scratch(program_id)
    return has_proc


def _mount_proc(target: str) -> bool:
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
    # Kernels before 5.8 know no subset; there /proc also describes the machine.
    for options in ("subset=pid", ""):
        with contextlib.suppress(OSError):
            kernel.mount("proc", target, "proc", flags, options)
            return True
    return False


def mount_scratch(program_id: int) -> None:
    """An empty folder in memory, which vanishes with the namespace."""
    options = f"mode=700,uid={program_id},gid={program_id},size={SCRATCH_BYTES},nr_inodes=4096"
    kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)


def become_unprivileged(program_id: int) -> None:
    """Give up every right for good, and the number of root where this process has it."""
    kernel.forbid_new_privileges()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(program_id, program_id, program_id)
        os.setresuid(program_id, program_id, program_id)
    kernel.drop_capabilities()


def _outermost(paths: Sequence[str]) -> list[str]:
    """Without the paths that lie inside another."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path == other or path.startswith(other + "/") for other in kept if not os.path.islink(other)):
            kept.append(path)
    return kept


def _make_mount_point(path: str, *, is_folder: bool) -> None:
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _make_read_only(root: str) -> None:
    """Every mount at or under `root`, also those that came along with a folder, except /proc."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, options = line.split()[4:6]
        place = place.encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")
        if (place + "/").startswith(root + "/") and not (place + "/").startswith(root + "/proc/"):
            flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
            if not place.startswith(root + "/dev/"):
                flags |= kernel.MS_NODEV
            for name, flag in _KEPT_FLAGS.items():
                flags |= flag if name in options.split(",") else 0
            kernel.mount("none", place, flags=flags)
