"""Transport between processes of one machine over shared memory of the host or of a GPU.

The worker of a pair allocates two slots of the pair's largest message and passes the descriptor, or the CUDA IPC handle, to the
training rank over a Unix socket. The socket then carries one byte for each message written to a slot, and one back for each
that was read. Neither has a name in a file system, so a killed process leaves nothing behind, and its peers see the closed
socket at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Mapping

import torch

from mgrpo.processes import local_socket
from mgrpo.sync import device_memory
from mgrpo.sync.live import WeightMessage
from mgrpo.sync.transport import Lost, Messages, named

BUCKET_BYTES = 16 << 20
"""Most bytes of a message: small enough to be read from the cache, large enough to make the wake-ups negligible."""
SLOTS = 2
_GONE = "it has ended, or given up"
_HELLO = struct.Struct("<II")
"""The worker's number among the members, and the length of the description of its GPU memory that follows; 0: a descriptor comes along."""


class SharedMemoryLink:
    """One end of a pair.

    Args:
        memory: `[n]`, `SLOTS` slots of equal size.
    """

    def __init__(self, connection: socket.socket, memory: torch.Tensor, *, timeout_s: float) -> None:
        connection.settimeout(timeout_s)
        self._socket = connection
        self._slots = memory.view(SLOTS, -1)
        self.count = 0
        """Messages that this end has written to a slot, or read from one."""
        self.heard = 0
        """Messages that the other end has read, or written."""

    def put(self, message: WeightMessage) -> None:
        """Write a message into the next slot once that is free."""
        self.wait(self.count - SLOTS + 1)
        for views, places in self._places(message):
            torch._foreach_copy_(places, views)
        self._tell()

    def take(self, message: WeightMessage) -> None:
        """Read the next message into its slices once it is there."""
        self.wait(self.count + 1)
        for views, places in self._places(message):
            torch._foreach_copy_(views, places)
        self._tell()

    def wait(self, count: int) -> None:
        """Wait until the other end has written, or read, `count` messages.

        Raises:
            RuntimeError: the time limit has passed, or the other end has closed the connection.
        """
        while self.heard < count:
            with _as_runtime_error():
                told = len(self._socket.recv(SLOTS))
            if not told:
                raise RuntimeError(_GONE)
            self.heard += told

    def close(self) -> None:
        """Close the connection, which ends the other end's waits."""
        self._socket.close()

    def _places(self, message: WeightMessage) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """The message part by part: its slices, and where each lies in the slot."""
        rest = self._slots[self.count % SLOTS]
        for views in message:
            sizes = [view.numel() for view in views]
            places = rest[: sum(sizes)].split(sizes)
            yield views, [place.view(view.shape) for place, view in zip(places, views, strict=True)]
            rest = rest[sum(sizes) :]

    def _tell(self) -> None:
        if self._slots.is_cuda:
            # The other process's stream is not ordered with this one's.
            torch.accelerator.current_stream(self._slots.device).synchronize()
        with _as_runtime_error():
            self._socket.send(b"\0")
        self.count += 1


class SharedMemory:
    """A member's links with others (a `Transport`)."""

    def __init__(self, links: Mapping[int, SharedMemoryLink]) -> None:
        self.links = links

    def send(self, messages: Messages, *, lost: Lost) -> Sent:
        """See `Transport`. When it returns, the views may change."""
        for peer, message in messages.items():
            with named([peer], lost):
                self.links[peer].put(message)
        return Sent({peer: self.links[peer] for peer in messages}, lost)

    def recv(self, messages: Messages, *, lost: Lost) -> Received:
        """See `Transport`."""
        return Received(self.links, messages, lost)

    def bucket_limit(self, peer: int) -> int:
        """See `Transport`."""
        return BUCKET_BYTES

    def close(self) -> None:
        """See `Transport`."""
        for link in self.links.values():
            link.close()


class Sent:
    """A round whose messages have been written to their slots."""

    def __init__(self, links: Mapping[int, SharedMemoryLink], lost: Lost) -> None:
        self._due = {peer: (link, link.count) for peer, link in links.items()}
        self._lost = lost

    def is_due(self) -> bool:
        """See `Round`."""
        return True

    def settle(self) -> None:
        """See `Round`."""
        for peer, (link, count) in self._due.items():
            with named([peer], self._lost):
                link.wait(count)


class Received:
    """A round whose messages are read in `settle`."""

    def __init__(self, links: Mapping[int, SharedMemoryLink], messages: Messages, lost: Lost) -> None:
        self._links, self._messages, self._lost = links, messages, lost

    def is_due(self) -> bool:
        """See `Round`."""
        return True

    def settle(self) -> None:
        """See `Round`."""
        for peer, message in self._messages.items():
            with named([peer], self._lost):
                self._links[peer].take(message)


class Listener:
    """A training rank's socket for the workers of its machine; processes of other users and machines are refused."""

    def __init__(self, backlog: int) -> None:
        self._socket, self.address = local_socket.listen(backlog)

    def accept(
        self, slot_bytes: Mapping[int, int], *, dtype: torch.dtype, device: torch.device, timeout_s: float
    ) -> dict[int, SharedMemoryLink]:
        """Accept these workers, which have all connected, and return their links.

        Args:
            slot_bytes: by member; see `connect`.
            device: of the training rank.
        """
        self._socket.settimeout(timeout_s)
        links: dict[int, SharedMemoryLink] = {}
        while len(links) < len(slot_bytes):
            with _as_runtime_error():
                connection, _ = self._socket.accept()
                if not local_socket.is_own(connection):
                    connection.close()
                    continue
                connection.settimeout(timeout_s)
                hello, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
                if len(hello) < _HELLO.size:
                    raise ConnectionError("the worker has gone again")
                worker, size = _HELLO.unpack(hello)
                if size:
                    offered = connection.recv(size, socket.MSG_WAITALL)
                    memory = device_memory.mapped(offered, dtype=dtype, device=device)
                else:
                    memory = _mapped(descriptors[0], SLOTS * slot_bytes[worker], dtype)
                    os.close(descriptors[0])
            links[worker] = SharedMemoryLink(connection, memory, timeout_s=timeout_s)
        return links

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def connect(
    address: str, *, member: int, slot_bytes: int, dtype: torch.dtype, device: torch.device, timeout_s: float
) -> SharedMemoryLink | None:
    """Connect a worker to the training rank at `address`; None: that rank runs on another machine.

    Args:
        member: the worker's own number among the members.
        slot_bytes: size of the pair's largest message.
        device: of the worker, whose memory both use.
    Raises:
        OSError: no memory is left for the slots, or the training rank runs as another user.
    """
    user = int(address.split("-")[1])
    if user != os.geteuid():
        raise PermissionError(f"they run as users {user} and {os.geteuid()}")
    memory, description, descriptors = _made(SLOTS * slot_bytes, dtype, device)
    try:
        connection = local_socket.connect(address, timeout_s=timeout_s)
        socket.send_fds(connection, [_HELLO.pack(member, len(description))], descriptors)
        connection.sendall(description)
    except ConnectionRefusedError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return SharedMemoryLink(connection, memory, timeout_s=timeout_s)


def _made(num_bytes: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, bytes, list[int]]:
    """Allocate memory that another process can map, with a description (CUDA) or a descriptor to map it by."""
    if device.type == "cuda":
        memory = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
        return memory, device_memory.offer(memory), []
    descriptor = os.memfd_create("mgrpo")
    try:
        # Missing memory is an error here rather than a signal at the first write.
        os.posix_fallocate(descriptor, 0, num_bytes)
        return _mapped(descriptor, num_bytes, dtype), b"", [descriptor]
    except OSError:
        os.close(descriptor)
        raise


def _mapped(descriptor: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Map a descriptor's memory. Its pages are populated before the first message."""
    memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=dtype)


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    try:
        yield
    except TimeoutError as err:
        raise RuntimeError("no answer") from err
    except ConnectionError as err:
        raise RuntimeError(_GONE) from err
    except OSError as err:
        raise RuntimeError(str(err)) from err
