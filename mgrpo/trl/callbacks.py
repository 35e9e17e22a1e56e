"""Callbacks of transformers, called on rank 0 as a run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mgrpo.run.ranks.process import rank

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

_log = logging.getLogger(__name__)

EVENTS = ("on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")
"""Supported events. A step is a training step, the optimizer steps of one rollout batch."""
WISHES = ("should_evaluate", "should_save", "should_log")
"""Flags of a callback's control for actions between the steps that the configuration names; they have no effect."""


class Callbacks:
    """The callbacks of a trainer, in their order."""

    def __init__(self, callbacks: Iterable[Any], *, args: Any, processing_class: object) -> None:
        """
        Args:
            callbacks: objects, or classes of which one is made.
            args, processing_class: the trainer's, which each callback is given.
        """
        self.callbacks: list[Any] = []
        self.args, self.processing_class = args, processing_class
        self._control: TrainerControl | None = None
        self._refused: set[str] = set()
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Any) -> None:
        """Add a callback, which is called from now on."""
        from transformers import TrainerCallback

        callback = callback() if isinstance(callback, type) else callback
        events = [name for name in dir(TrainerCallback) if name.startswith("on_") and name not in EVENTS]
        unheard = [n for n in events if getattr(type(callback), n, None) not in (None, getattr(TrainerCallback, n))]
        if unheard:
            _log.warning(
                "%s of %s is never called: there are %s",
                ", ".join(unheard),
                type(callback).__name__,
                ", ".join(EVENTS),
            )
        self.callbacks.append(callback)

    def remove(self, callback: Any) -> Any:
        """Remove this callback, or the first one of this class, and return it; None if not found."""
        for own in self.callbacks:
            if own is callback or type(own) is callback:
                self.callbacks.remove(own)
                return own
        return None

    def call(self, event: str, state: TrainerState, **more: object) -> None:
        """Call `event` of each callback; on rank 0 alone.

        Args:
            more: `logs` of on_log, `metrics` of on_evaluate.
        """
        for callback in self.callbacks if rank() == 0 else ():
            given = {"model": None, "processing_class": self.processing_class, **more}
            returned = getattr(callback, event)(self.args, state, self.control, **given)
            self._control = returned or self.control
            for wish in WISHES:
                if getattr(self.control, wish):
                    setattr(self.control, wish, False)
                    self._refuse(wish, callback)

    @property
    def wants_end(self) -> bool:
        """True if a callback has requested the end of training."""
        return bool(self.callbacks) and self.control.should_training_stop

    @property
    def control(self) -> TrainerControl:
        """The control object in which callbacks set their requests."""
        if self._control is None:
            from transformers import TrainerControl

            self._control = TrainerControl()
        return self._control

    def _refuse(self, wish: str, callback: object) -> None:
        if wish not in self._refused:
            self._refused.add(wish)
            _log.warning(
                "%s of %s has no effect: eval_steps, save_steps and logging_steps say when; of a callback's wishes "
                "should_training_stop is done",
                wish,
                type(callback).__name__,
            )
