"""The boxes that a process holds, as live views, and what is sent of them.

A view is either memory that is read and written where it is, or a slice of a weight that is made when it is read: W with its
adapter merged into it. Of those one is kept, because neighbouring slices are of the same weight.
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
    """A slice of a weight that is made anew each time."""

    @property
    def weight(self) -> Callable[[], torch.Tensor]:
        """Makes the whole weight; slices of one weight have the same."""

    @property
    def region(self) -> tuple[slice, ...]:
        """The slice's region of the whole weight."""

    def __getitem__(self, region: tuple[slice, ...]) -> Self: ...


class LateSlice(ABC):
    """A slice whose values are elsewhere each time, and not there all the time."""

    @abstractmethod
    def values(self) -> torch.Tensor:
        """As they are now."""

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
        # Nothing is made yet: its memory may have been given up. Norms are never made.
        views = (view for held in self.by_name.values() for _, view in held)
        first = next(view for view in views if isinstance(view, torch.Tensor))
        self.dtype, self.device = dtype, first.device

    def beside(self, late: Iterable[tuple[Box, LateSlice]]) -> LiveBoxes:
        """These boxes, and others that are counted as a plan counts them."""
        found = copy.copy(self)
        found.by_name = {name: [*held] for name, held in self.by_name.items()}
        for box, view in late:
            found.by_name.setdefault(box.name, []).append((box, view))
        return found

    def find(self, box: Box) -> View | None:
        """The live view of `box`; None where no held box contains it."""
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
        """The values of the view now; the weight that was made last stays until another one is, or `forget`."""
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
        """Give up the weight that was made last. Call after reading: the next update changes it."""
        with self._lock:
            self._made = None


class WeightMessage:
    """Slices that are sent together.

    To iterate gives their values as they are now, in parts: no part is of more than one weight that had to be made.
    """

    def __init__(self, live: LiveBoxes, boxes: Sequence[Box]) -> None:
        self._live, self._views = live, [live.view(box) for box in boxes]
        self.size = sum(box.size for box in boxes)
        """Number of elements."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for _, views in itertools.groupby(self._views, key=lambda view: getattr(view, "weight", None)):
            yield [self._live.values(view) for view in views]
