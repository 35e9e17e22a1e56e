"""Device memory that is freed while another process uses the device, and comes back with the same values."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mgrpo.parallel import backend


class Offload:
    """Storages whose memory is in host memory, or nowhere, between `offload` and `restore`.

    The storages themselves stay: their views (Megatron's buffers and optimizers, the weight sync) are valid again
    afterwards, at other addresses.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        """Each storage with its copy in host memory, by identity; kept for the next time, because pinning memory is slow."""
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._moved: set[int] = set()
        """Storages with their values in the copies, by identity."""

    @property
    def is_offloaded(self) -> bool:
        """True if there is anything to restore."""
        return bool(self._moved or self._dropped)

    def offload(
        self, tensors: Iterable[torch.Tensor], *, but: Iterable[torch.Tensor], dropped: Iterable[torch.Tensor]
    ) -> int:
        """Free the memory below `tensors`, except that also below `but`, and that below `dropped`, without its values.

        May be called again before `restore`, with more.

        Returns:
            Bytes of the device that were freed.
        """
        stay = _storages(but)
        moved = {key: storage for key, storage in _storages(tensors).items() if key not in stay}
        lost = [storage for key, storage in _storages(dropped).items() if key not in stay | moved]
        for key, storage in moved.items():
            self._copies[key] = storage, self._copy(key, storage)
        self._moved |= moved.keys()
        self._dropped += [(storage, storage.nbytes()) for storage in lost]
        backend.synchronize()
        given_up = [*moved.values(), *lost]
        num_bytes = sum(storage.nbytes() for storage in given_up)
        for storage in given_up:
            storage.resize_(0)
        backend.release_memory()
        return num_bytes

    def restore(self) -> None:
        """Take the memory again."""
        self._copies = {key: self._copies[key] for key in self._moved}
        for storage, copy in self._copies.values():
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy, non_blocking=True)
        for storage, num_bytes in self._dropped:
            storage.resize_(num_bytes)
        # Other streams than this one use it next.
        backend.synchronize()
        self._moved, self._dropped = set(), []

    def _copy(self, key: int, storage: torch.UntypedStorage) -> torch.Tensor:
        _, copy = self._copies.get(key, (None, None))
        if copy is None or copy.nbytes != storage.nbytes():
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=backend.has_cuda())
        return copy.copy_(_bytes_of(storage), non_blocking=True)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages on the device that are not empty, by identity."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device == backend.device()]
    # On the CPU an array of numpy's keeps the memory that it was made from.
    return {storage._cdata: storage for storage in storages if storage.nbytes() and storage.resizable()}


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
