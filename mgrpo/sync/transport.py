"""Interface of the transports, which move slices between training ranks and the workers of one engine.

A transport connects one member of an engine's transfer (`mgrpo.sync.joining`) to the others. Messages between two members
arrive in the order in which they were begun; both ends pass slices of the same sizes in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from mgrpo.sync.live import WeightMessage

Messages = Mapping[int, WeightMessage]
"""Slices that are sent to each peer, or that its values are written to."""

Lost = Callable[[Sequence[int], Exception], Exception]
"""Makes the error from the members that were waited for and the cause."""


class Round(Protocol):
    """Messages that are under way at the same time, at most one with each member."""

    def is_due(self) -> bool:
        """True if `settle` is to be called: on CUDA once all messages arrived or failed; on the CPU always: `settle` waits."""

    def settle(self) -> None:
        """Wait on the host until all messages have arrived.

        Afterwards the views hold the received values, and the round's memory may be reused; on CUDA that holds for the device's
        later work.
        """


class Transport(Protocol):
    """One member's end. If a peer does not answer in time, any method of a round raises the error of `lost`."""

    def send(self, messages: Messages, *, lost: Lost) -> Round:
        """Begin to send these slices, cast to the engine's dtype; at most one round before it may be unsettled."""

    def recv(self, messages: Messages, *, lost: Lost) -> Round:
        """Begin to receive into these slices, which are of the engine's dtype."""

    def bucket_limit(self, peer: int) -> int | None:
        """Most bytes that a message with this member should have (one row may have more); None: any number."""

    def close(self) -> None:
        """Close the connections; waiting peers get an error if the transport can send one."""


@contextlib.contextmanager
def named(peers: Sequence[int], lost: Lost) -> Iterator[None]:
    """Turn a RuntimeError within the block into the error of `lost` for these members."""
    try:
        yield
    except RuntimeError as err:
        raise lost(peers, err) from err
