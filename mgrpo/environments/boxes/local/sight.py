"""The file system within a box's walls: this machine's system or an image's folder, read-only, and two folders to write to.

All written files, in the working folder, /tmp and /dev/shm, lie in one file system in memory, whose size is the quota; the
kernel frees it with the box.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence

from mgrpo.sandbox import linux
from mgrpo.sandbox.walls import DEVICES, LINKS, SCRATCH, enter_root, make_mount_point, outermost

FOLDER = "/box"
"""The working folder."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Not all of /etc: some of it is its owner's.
_SETTINGS = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl", "ca-certificates", "ca-certificates.conf"),
    *("pki", "crypto-policies", "localtime", "timezone", "mime.types", "magic", "protocols", "services", "gai.conf"),
    *("nsswitch.conf", "inputrc", "terminfo", "python3", "gitconfig", "bash.bashrc", "profile", "java", "fonts"),
)
_OF_THE_NETWORK = ("resolv.conf", "hosts")
_FILLED = {"proc", "dev", "tmp", "sys", "run", FOLDER.strip("/")}
_SMALLEST_FILE = 4096
_SKELETON = "mode=755,size=4m"


def of_machine(readable: Sequence[str], *, network: bool) -> dict[str, str]:
    """Paths within the walls and their sources: the system, this interpreter, and `readable`.

    Raises:
        ValueError: a readable path is one that the walls themselves fill.
    """
    settings = _SETTINGS + (_OF_THE_NETWORK if network else ())
    wanted = [*_SYSTEM, *(f"/etc/{name}" for name in settings), sys.prefix, sys.base_prefix, *readable]
    shown: dict[str, str] = {}
    for path in map(_showable, wanted):
        if os.path.exists(path):
            shown[path] = path
            # Links that lead into it from elsewhere, such as an environment's to its interpreter, name it like this.
            shown.setdefault(os.path.realpath(path), path)
    return shown


def of_image(image: str, readable: Sequence[str]) -> dict[str, str]:
    """Paths within the walls and their sources, with the content of a folder as the root.

    Raises:
        ValueError: it is no folder, or a readable path would have to be made in it.
    """
    if not os.path.isdir(image):
        raise ValueError(f"agent_image={image!r} is not a folder; agent_box=local needs one that becomes the root")
    shown = {f"/{name}": os.path.join(image, name) for name in os.listdir(image) if name not in _FILLED}
    for path in map(_showable, readable):
        if (top := f"/{path.split('/')[1]}") in shown:
            raise ValueError(
                f"{path} cannot be shown in agent_image={image!r}, which has its own {top}; copy it: agent_files"
            )
        shown[path] = path
    return shown


def _showable(path: str) -> str:
    path = os.path.abspath(path)
    top = path.split("/")[1]
    if path in ("/", SCRATCH, FOLDER) or top in ("dev", "proc", "sys"):
        raise ValueError(f"{path} cannot be shown within walls, which have their own; name a folder in it")
    return path


def enter_box(shown: Mapping[str, str], *, program_id: int, disk_bytes: int, max_files: int, names: bool) -> None:
    """Replace the file system by the shown paths, in new mount and network namespaces.

    `names`: True to create the files that name the users and this host, which an image has.
    """
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    # Opened first, because the new root may cover one of them; only links at the top stay links.
    links = {name: os.readlink(path) for name, path in shown.items() if name.count("/") == 1 and os.path.islink(path)}
    kept = mounted(shown, links)
    own = {name: name for name in (*DEVICES, "/proc")}
    sources = {
        name: os.open(path, os.O_PATH | os.O_CLOEXEC) for name, path in [*own.items(), *((n, shown[n]) for n in kept)]
    }
    root = os.path.realpath(SCRATCH)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _SKELETON)
    _mount_space(root, program_id, disk_bytes, max_files)
    for name, target in links.items():
        os.symlink(target, root + name)
    for name, source in sources.items():
        make_mount_point(root + name, is_folder=os.path.isdir(f"/proc/self/fd/{source}"))
        linux.mount(f"/proc/self/fd/{source}", root + name, flags=linux.MS_BIND | linux.MS_REC)
        os.close(source)
    for link, target in LINKS.items():
        os.symlink(target, root + link)
    if names:
        _write_names(root + "/etc", program_id)
    enter_root(root, writable=(SCRATCH, FOLDER))


def mounted(shown: Collection[str], links: Collection[str]) -> list[str]:
    """The paths to mount, without those behind a link at the top, which have a real name, and those within another path."""
    return list(outermost([name for name in shown if f"/{name.split('/')[1]}" not in links]))


def _mount_space(root: str, program_id: int, disk_bytes: int, max_files: int) -> None:
    """Two folders of one file system, so that one quota holds for both."""
    space = root + "/.space"
    os.mkdir(space)
    options = f"mode=755,size={disk_bytes},nr_inodes={max_files}"
    linux.mount("tmpfs", space, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    for name, mode in ((SCRATCH, 0o1777), (FOLDER, 0o755)):
        os.mkdir(space + name)
        os.chmod(space + name, mode)
        if os.geteuid() == 0:
            os.chown(space + name, program_id, program_id)
        os.mkdir(root + name)
        linux.mount(space + name, root + name, flags=linux.MS_BIND)
    linux.unmount(space)
    os.rmdir(space)


def _write_names(etc: str, program_id: int) -> None:
    os.makedirs(etc, exist_ok=True)
    for name, text in {
        "passwd": f"root:x:0:0::/:/bin/sh\nagent:x:{program_id}:{program_id}::{FOLDER}:/bin/sh\n",
        "group": f"root:x:0:\nagent:x:{program_id}:\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    }.items():
        if not os.path.exists(f"{etc}/{name}"):
            with open(f"{etc}/{name}", "w") as file:
                file.write(text)
