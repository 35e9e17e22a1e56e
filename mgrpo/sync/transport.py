"""The interface of all transports, which move slices between training ranks and the workers of one engine.

A transport joins one member of an engine's transfer (`mgrpo.sync.joining`) to the others. Messages between two members
arrive in the order in which they were begun, and each end is given slices of the same sizes in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from mgrpo.sync.live import WeightMessage

Messages = Mapping[int, WeightMessage]
"""For each of some members the slices that are sent to it, or that its values are written to."""

Lost = Callable[[Sequence[int], Exception], Exception]
"""Makes the error from the members that were waited for and the cause."""


class Round(Protocol):
    """Messages that are under way at the same time, at most one with each member."""

    def is_due(self) -> bool:
        """Whether to call `settle`: on CUDA once the messages have arrived or failed, on the CPU always, where it waits."""

    def settle(self) -> None:
        """Wait on the host until all messages have arrived.

        From here on what was received is in the views, and the room that the round took may be used again; on CUDA that
        holds for the device's later work.
        """


class Transport(Protocol):
    """One member's end. A member that does not answer within the time raises what `lost` makes, from any method of a round."""

    def send(self, messages: Messages, *, lost: Lost) -> Round:
        """Begin to send these slices, cast to the engine's dtype; at most one round before it may be unsettled."""

    def recv(self, messages: Messages, *, lost: Lost) -> Round:
        """Begin to receive into these slices, which are of the engine's dtype."""

    def bucket_limit(self, peer: int) -> int | None:
        """Most bytes that a message with this member should have (one row may have more); None: any number."""

    def close(self) -> None:
        """Give up the connections; a member that still waits for this one is told where the transport can do that."""


@contextlib.contextmanager
def named(peers: Sequence[int], lost: Lost) -> Iterator[None]:
    """A RuntimeError within the block was one of these members' fault."""
    try:
        yield
    except RuntimeError as err:
        raise lost(peers, err) from err
