"""Sequence-classification checkpoints as reward functions, each in a process of its own (`reward_model_worker`)."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mgrpo.processes.lifetime import start_program

logger = logging.getLogger(__name__)


class RewardModel:
    """A reward function whose values are a model's: the one logit of prompt + completion, in float32. Always `close` it.

    Rows of messages go through the model's own chat template, text is joined as it is. The model runs on the CPU, on one
    thread; a failure of its process is an error that ends the run.
    """

    def __init__(self, folder: str | Path, *, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Nothing is started yet.

        Args:
            folder: config.json, safetensors and tokenizer files of a model with one label.
            chat_template_kwargs: further variables of the chat template.
        Raises:
            ValueError: the folder holds no such model.
        """
        check_reward_model(folder)
        self.folder = Path(folder)
        self.__name__ = self.folder.resolve().name
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._spawner: ThreadPoolExecutor | None = None
        self._has_warned = False

    def start(self) -> None:
        """Begin to load the model, without waiting for it; a second call does nothing."""
        with self._lock:
            self._start()

    def __call__(self, prompts: Sequence, completions: Sequence, **kwargs: object) -> list[float]:
        """One score a completion; NaN, and a warning once, where the model has none."""
        if not completions:
            return []
        with self._lock:
            self._start()
            try:
                if self._is_loading:
                    self._hear()
                    self._is_loading = False
                self._say({"pairs": list(zip(prompts, completions, strict=True))})
                scores = self._hear()["scores"]
            except BaseException:
                # It may still hold this question: its answer must not meet the next one.
                self._end()
                raise
            self._warn_of_nans(scores)
            return scores

    def close(self) -> None:
        """End the process, at once: a thread that waits for scores gets an error. A later call loads the model anew."""
        # Killed first: a model that is stuck holds the lock. Again and again: it may be about to start, or waited for by more
        # than one thread.
        while True:
            process = self._process
            if process is not None:
                process.kill()
            if self._lock.acquire(timeout=0.1):
                break
        try:
            self._end()
        finally:
            self._lock.release()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, when there is one."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        if self._process is not None:
            return
        # The kernel ends the worker when the thread that started it ends (`lifetime`), so that is one that waits here.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model-spawner")
        self._process = self._spawner.submit(_spawn).result()
        self._is_loading = True
        self._say({"folder": str(self.folder), "chat_template_kwargs": self._chat_template_kwargs})

    def _warn_of_nans(self, scores: Sequence[float]) -> None:
        num_nans = sum(map(math.isnan, scores))
        if num_nans and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "reward model %s gave NaN for %d of %d completions, which counts as no score; this is said once",
                self.folder,
                num_nans,
                len(scores),
            )

    def _say(self, message: dict) -> None:
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._hear()  # its last words, or how it ended
            raise

    def _hear(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            how = f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RuntimeError(f"the process of reward model {self.folder} {how}; its message is on stderr")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"reward model {self.folder} failed: {answer['error']}")
        return answer

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what it had not read
            self._process.stdin.close()
        self._process = None
        self._spawner.shutdown()


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
        raise ValueError(f"reward model {folder}: it has {num_labels} labels, a reward is one; {how}")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"reward model {folder}: there is no safetensors file (pickles are not loaded); {how}")
    if not (folder / "tokenizer_config.json").exists() and not (folder / "tokenizer.json").exists():
        raise ValueError(f"reward model {folder}: there is no tokenizer; {how}")


def _spawn() -> subprocess.Popen:
    settings = {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # The devices belong to the learners and the engines.
        "CUDA_VISIBLE_DEVICES": "",
    }
    return start_program("mgrpo.rewards.reward_model_worker", environment=os.environ, settings=settings)
