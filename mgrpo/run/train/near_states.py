"""Training states on the nodes' disks (`checkpoint_local_dir`): ranks that share a disk, copies, and the parts of a state that remain."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch.distributed as dist
from torch.distributed import ProcessGroup

from mgrpo.checkpoint.folder import LocalFolder, near_root, open_folder, split_path, step_folder, unwritable
from mgrpo.checkpoint.manifest import FileRecord
from mgrpo.checkpoint.reader import StoredCheckpoint
from mgrpo.checkpoint.saving.copy_server import Address, CopyServer, fetch, put
from mgrpo.checkpoint.saving.near_folder import FETCHED, TENSORS, NearFolder, node_name, partner, sound_files
from mgrpo.checkpoint.stored import Stored
from mgrpo.config import ConfigError
from mgrpo.parallel.gather import gather_json
from mgrpo.run.ranks.lead import Lead


class NearStates:
    """One rank's part. Every rank makes one, and makes the same calls."""

    def __init__(self, setting: str, root: str, *, lead: Lead, host_group: ProcessGroup, host: str) -> None:
        """Collective.

        Args:
            setting: `checkpoint_local_dir`.
            root: folder or URL of the run's states on storage.
            host: address of this node for the others.
        Raises:
            ConfigError: on all ranks, when a node's folder cannot be written to, or all nodes have the same one.
        """
        self.rank, self.host_group = dist.get_rank(), host_group
        name, secret = lead.share(
            lambda: [sha256(os.path.abspath(root).encode()).hexdigest()[:16], secrets.token_hex(32)]
        )
        given = Path(os.path.expandvars(setting))
        self.local = LocalFolder(given / f"mgrpo-{name}")
        node, why = "", unwritable(given)
        try:
            node = "" if why else node_name(self.local.path)
            self.server = CopyServer(self.local.path, host, secret)
        except OSError as err:
            why = why or str(err)
        problem = f"checkpoint_local_dir={setting} on {host}: {why}" if why else ""
        if problems := list(dict.fromkeys(filter(None, gather_json(problem, host_group)))):
            raise ConfigError(problems)
        found = gather_json([node, host, self.server.address], host_group)
        nodes = [node for node, _, _ in found]
        self._servers: list[Address] = [(address[0], address[1]) for _, _, address in found]
        if len({*nodes}) == 1 < len({host for _, host, _ in found}):
            raise ConfigError(
                [
                    f"checkpoint_local_dir={setting} is one folder on all nodes; name one on a disk that each node has for itself"
                ]
            )
        to = partner(self.rank, nodes)
        self._beside = [rank for rank, node in enumerate(nodes) if node == nodes[self.rank]]
        """The ranks of this node."""
        self._secret = secret
        send = None if to is None else partial(_send, self._servers[to], secret)
        self.folder = NearFolder(open_folder(near_root(root)), self.local, send=send)

    def open(self, path: str) -> tuple[StoredCheckpoint | None, str]:
        """Open the state at `path`, with tensors on this node's disk or another's; None with the problem otherwise. Collective."""
        _, step = split_path(path)
        files: Mapping[str, FileRecord] = {}
        problem = ""
        try:
            files = Stored(self.folder.shared, step).manifest.files
        except (ValueError, OSError) as err:
            problem = str(err)
        names = [name for name in files if name.endswith(TENSORS)]
        own = names[self._beside.index(self.rank) :: len(self._beside)]
        sound = sound_files(self.local.child(step_folder(step)), {name: files[name] for name in own})
        found = gather_json([sound, problem], self.host_group)
        held = {name: server for (there, _), server in zip(found, self._servers, strict=True) for name in there}
        missing = [name for name in names if name not in held]
        problem = next((problem for _, problem in found if problem), "")
        if missing:
            problem = (
                f"{path} is not complete any more: {len(missing)} of its {len(names)} files were on nodes that are not here, or "
                "have changed"
            )
        if problem:
            return None, problem
        sizes = {name: files[name].num_bytes for name in held}

        def fetch_from_its_node(step_folder: str, name: str, place: Path) -> Path:
            return fetch(held[name], self._secret, step_folder, name, place)

        folder = NearFolder(self.folder.shared, self.local, fetch=fetch_from_its_node, sizes=sizes)
        return StoredCheckpoint(folder, step, cache=self.local.path / f"{FETCHED}{self.rank}"), ""

    def finish(self) -> None:
        """Delete the nodes' copies at the end of the run, when its result is elsewhere. Collective."""
        dist.barrier(group=self.host_group)
        self.server.close()
        if self.rank == self._beside[0]:
            shutil.rmtree(self.local.path, ignore_errors=True)
        if self.rank == 0:
            self.folder.shared.remove_all()


def _send(address: Address, secret: str, folder: LocalFolder, name: str) -> None:
    put(address, secret, folder.path / name)
