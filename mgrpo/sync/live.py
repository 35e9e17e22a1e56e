"""Live views of the boxes that a process holds, and the messages made of them.

A view is either memory that is read and written in place, or a slice of a weight that is computed when it is read: W with its
adapter merged. The last such weight is cached, because neighbouring slices are of the same weight.
"""

from __future__ import annotations

import copy
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, Self

import torch

from mgrpo.models.placement.boxes import Box
from mgrpo.sync.sending.float32_units import views_in_units


class MadeSlice(Protocol):
    """A slice of a weight that is computed on each read."""

    @property
    def weight(self) -> Callable[[], torch.Tensor]:
        """Computes the whole weight; the same object for all slices of a weight."""

    @property
    def region(self) -> tuple[slice, ...]:
        """The slice's region of the whole weight."""

    def __getitem__(self, region: tuple[slice, ...]) -> Self: ...


class LateSlice(ABC):
    """A slice whose values exist only at times, and in other memory each time."""

    @abstractmethod
    def values(self) -> torch.Tensor:
        """The current values."""

    @abstractmethod
    def __getitem__(self, region: tuple[slice, ...]) -> Self: ...


Held = Iterable[tuple[Box, torch.Tensor]]
"""Boxes with the live view of each."""
View = torch.Tensor | MadeSlice | LateSlice


class LiveBoxes:
    """Boxes that a process holds, with the live view of each."""

    def __init__(self, boxes: Iterable[tuple[Box, View]], dtype: torch.dtype) -> None:
        """
        Args:
            dtype: the engines' weight type.
        """
        self.by_name: dict[str, list[tuple[Box, View]]] = {}
        for box, view in views_in_units(boxes, dtype):
            self.by_name.setdefault(box.name, []).append((box, view))
        self._lock = threading.Lock()
        self._made: tuple[Callable[[], torch.Tensor], torch.Tensor] | None = None
        # Compute no weight here: its memory may have been released. Norms are never computed.
        views = (view for held in self.by_name.values() for _, view in held)
        first = next(view for view in views if isinstance(view, torch.Tensor))
        self.dtype, self.device = dtype, first.device

    def beside(self, late: Iterable[tuple[Box, LateSlice]]) -> LiveBoxes:
        """Combine these boxes with others whose units are already those of a plan."""
        found = copy.copy(self)
        found.by_name = {name: [*held] for name, held in self.by_name.items()}
        for box, view in late:
            found.by_name.setdefault(box.name, []).append((box, view))
        return found

    def find(self, box: Box) -> View | None:
        """The live view of `box`; None: no held box contains it."""
        for held, view in self.by_name.get(box.name, ()):
            if held.intersect(box) == box:
                return view[box.within(held)]
        return None

    def view(self, box: Box) -> View:
        """The live view of a box that is held."""
        view = self.find(box)
        assert view is not None, f"{box} is not held"
        return view

    def values(self, view: View) -> torch.Tensor:
        """The current values of a view; the last computed weight is cached until another one or `forget`."""
        if isinstance(view, torch.Tensor):
            return view
        if isinstance(view, LateSlice):
            return view.values()
        with self._lock:
            if self._made is None or self._made[0] is not view.weight:
                self._made = None
                self._made = view.weight, view.weight()
            return self._made[1][view.region]

    def forget(self) -> None:
        """Drop the cached weight. Call after reading: the next update changes it."""
        with self._lock:
            self._made = None


class WeightMessage:
    """Slices that are sent together.

    Iteration yields their current values in parts, each of at most one computed weight.
    """

    def __init__(self, live: LiveBoxes, boxes: Sequence[Box]) -> None:
        self._live, self._views = live, [live.view(box) for box in boxes]
        self.size = sum(box.size for box in boxes)
        """Number of elements."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for _, views in itertools.groupby(self._views, key=lambda view: getattr(view, "weight", None)):
            yield [self._live.values(view) for view in views]
