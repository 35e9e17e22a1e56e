"""Sequence-classification checkpoints as reward functions, each in its own process (`reward_model_worker`)."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.processes.json_lines import Child, ChildError, Message

_SETTINGS = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

logger = logging.getLogger(__name__)


class RewardModel:
    """A reward function whose values are a model's: the one logit of prompt + completion. Always `close` it.

    Rows of messages go through the model's own chat template, text is joined as it is. The model runs on the CPU in float32,
    or on a GPU in bfloat16; a failure of its process is an error that ends the run.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        gpu: int | None = None,
    ) -> None:
        """Starts nothing.

        Args:
            folder: config.json, safetensors and tokenizer files of a model with one label.
            chat_template_kwargs: further variables of the chat template.
            gpu: its number; None: the CPU.
        Raises:
            ValueError: the folder holds no such model.
        """
        check_reward_model(folder)
        self.folder = Path(folder)
        self.__name__ = self.folder.resolve().name
        self._options = {
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
            "on_gpu": gpu is not None,
        }
        # The other devices belong to the learners and the engines.
        self._environment = _SETTINGS | {"CUDA_VISIBLE_DEVICES": "" if gpu is None else str(gpu)}
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._is_loading = False
        self._has_warned = False

    def start(self) -> None:
        """Begin to load the model, without waiting for it; a second call does nothing."""
        with self._lock:
            self._start()

    def __call__(self, prompts: Sequence, completions: Sequence, **kwargs: object) -> list[float]:
        """One score per completion; NaN, with one warning, where the model gives none."""
        if not completions:
            return []
        with self._lock:
            child = self._start()
            try:
                if self._is_loading:
                    self._receive(child)
                    self._is_loading = False
                child.send([{"pairs": list(zip(prompts, completions, strict=True))}])
                scores = self._receive(child)["scores"]
            except BaseException:
                # It may still hold this question: its answer must not be taken for that to the next one.
                self._end()
                raise
            self._warn_of_nans(scores)
            return scores

    def close(self) -> None:
        """End the process at once: a thread that waits for scores gets an error. A later call loads the model anew."""
        # Killed first: a call to a model that hangs holds the lock. Repeatedly: another thread may be about to start it.
        while True:
            child = self._child
            if child is not None:
                child.kill()
            if self._lock.acquire(timeout=0.1):
                break
        try:
            self._end()
        finally:
            self._lock.release()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if there is one."""
        return None if self._child is None else self._child.process.pid

    def _start(self) -> Child:
        if self._child is None:
            self._child = Child("mgrpo.rewards.reward_model_worker", settings=self._environment)
            self._is_loading = True
            self._child.send([{"folder": str(self.folder), **self._options}])
        return self._child

    def _warn_of_nans(self, scores: Sequence[float]) -> None:
        num_nans = sum(map(math.isnan, scores))
        if num_nans and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "reward model %s gave NaN for %d of %d completions, which counts as no score; this warning appears once",
                self.folder,
                num_nans,
                len(scores),
            )

    def _receive(self, child: Child) -> Message:
        try:
            answer = child.receive()
        except ChildError as err:
            raise RuntimeError(f"the process of reward model {self.folder} {err}; its message is on stderr") from err
        if "error" in answer:
            raise RuntimeError(f"reward model {self.folder} failed: {answer['error']}")
        return answer

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None


def check_reward_model(folder: str | Path) -> None:
    """ValueError if the folder holds no sequence-classification model with one label, safetensors and a tokenizer."""
    folder = Path(folder)
    how = "give a folder that save_pretrained of a model with num_labels=1 and of its tokenizer wrote"
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ValueError(f"reward model {folder}: config.json cannot be read ({err}); {how}") from err
    architectures = config.get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        found = ", ".join(map(str, architectures)) or "missing"
        raise ValueError(f"reward model {folder}: architectures is {found}, not ...ForSequenceClassification; {how}")
    num_labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 1)
    if num_labels != 1:
        raise ValueError(f"reward model {folder}: it has {num_labels} labels, a reward needs one; {how}")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"reward model {folder}: there is no safetensors file (pickles are not loaded); {how}")
    if not (folder / "tokenizer_config.json").exists() and not (folder / "tokenizer.json").exists():
        raise ValueError(f"reward model {folder}: there is no tokenizer; {how}")
