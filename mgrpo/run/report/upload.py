"""Trained models on their way to the Hub: a process of its own for each, so that no upload delays or breaks a run.

`python -m mgrpo.run.report.upload FOLDER REPOSITORY REVISION PRIVATE MESSAGE PAUSE_S FILE...` uploads.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from mgrpo.config import Config
from mgrpo.model_io.card import CARD, CURVE
from mgrpo.models.hf_files.hub import MODEL_FILES
from mgrpo.processes.lifetime import die_with_parent
from mgrpo.run.ranks.process import users_environment

CARDS = (CARD, CURVE)
"""Files written at the end of the run; until then an export has the card of the source model."""
FILES = (
    *(name for name in MODEL_FILES if name not in CARDS),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
)
"""Files of an export that go to the Hub. Others beside a model may be the user's own."""
ATTEMPTS = 3
REFUSED = (400, 401, 403, 404)
"""HTTP status codes that are not retried."""


class Uploads:
    """The uploads of one run, on rank 0. Failures are warnings."""

    current: ClassVar[subprocess.Popen[str] | None] = None
    """The upload under way, of all runs of this process: the next one must not overtake it."""
    folder: ClassVar[Path]
    """The folder of that upload."""

    def __init__(self, config: Config, *, pause_s: float = 5.0) -> None:
        """`pause_s`: seconds of the pause after the first failed attempt, four times as long after the second."""
        self.settings, self.run_name = config.hub, config.experiment.run_name
        self.pause_s = pause_s

    @property
    def repository(self) -> str:
        """Name on the Hub, possibly without its owner."""
        return self.settings.hub_model_id or self.run_name

    def saved(self, folder: Path, step: int) -> None:
        """Begin to upload an export of the running training, unless the last upload is still under way."""
        if not self.settings.push_to_hub or self.settings.hub_strategy != "every_save" or not has_token():
            return
        if self.current is None or self.current.poll() is not None:
            self._tell()
            self._start(folder, f"Training step {step}", FILES)

    def finish(self, folder: Path, step: int, *, message: str | None = None) -> None:
        """Upload the trained model at the end of the run, and wait for it."""
        if not self.settings.push_to_hub or not has_token():
            return
        self.wait()
        where = f"{self.repository}{f' ({self.settings.hub_revision})' if self.settings.hub_revision else ''}"
        print(f"mgrpo: uploading {folder} to {where} on the Hub", file=sys.stderr, flush=True)
        self._start(folder, message or f"The trained model, after {step} steps", (*FILES, *CARDS))
        self.wait()

    def wait(self) -> None:
        """Wait until the upload under way has succeeded or failed."""
        if self.current is not None:
            try:
                self.current.wait()
            except KeyboardInterrupt:
                self.current.terminate()
            self._tell()

    def _start(self, folder: Path, message: str, files: Sequence[str]) -> None:
        own = self.settings
        words = [
            str(folder),
            self.repository,
            own.hub_revision or "",
            str(own.hub_private_repo),
            message,
            str(self.pause_s),
        ]
        Uploads.folder = folder
        Uploads.current = subprocess.Popen(
            [sys.executable, "-m", "mgrpo.run.report.upload", *words, *files],
            env={**users_environment(), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _tell(self) -> None:
        """Print the result of the last upload, which must have ended."""
        if self.current is None:
            return
        out, err = self.current.communicate()
        if self.current.returncode == 0:
            print(f"mgrpo: {self.folder} is at {out.strip()}", file=sys.stderr, flush=True)
        else:
            why = next(iter(err.strip().splitlines()[-1:]), f"the upload ended with {self.current.returncode}")
            command = ["hf", "upload", self.repository, str(self.folder)]
            command += ["--private"] * self.settings.hub_private_repo
            command += ["--revision", self.settings.hub_revision] if self.settings.hub_revision else []
            text = f"{self.folder} is not on the Hub: {why}; repeat it with: {shlex.join(command)}"
            print(f"mgrpo: warning: {text}", file=sys.stderr, flush=True)
        Uploads.current = None


def has_token() -> bool:
    """True if this machine has a token of the Hub."""
    from huggingface_hub import get_token

    return get_token() is not None


def token_problems(config: Config) -> Iterator[str]:
    """Problem of an upload that the user requests without a token. A preset's request gets `token_warning` instead."""
    by_preset = config.provenance.sources.get("push_to_hub", "").startswith("preset ")
    if token_warning(config) and not by_preset:
        yield (
            "push_to_hub=true, but this machine has no token for the Hub: log in with hf auth login, set HF_TOKEN, leave "
            "push_to_hub out, or upload afterwards with hf upload OWNER/NAME output_dir/hf/step_N"
        )


def token_warning(config: Config) -> str | None:
    """Warning that a requested upload will not happen for lack of a token; None: no problem."""
    if not config.hub.push_to_hub or has_token():
        return None
    return "push_to_hub=true, but there is no token, so nothing will be uploaded; log in with hf auth login, or set HF_TOKEN"


def upload(
    folder: str, repository: str, *, revision: str | None, private: bool, message: str, files: Sequence[str]
) -> str:
    """Create the repository and the branch if missing, commit files of the folder, and return the commit's address."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="mgrpo")
    name = api.create_repo(repository, private=private, exist_ok=True).repo_id
    if revision:
        api.create_branch(name, branch=revision, exist_ok=True)
    commit = api.upload_folder(
        repo_id=name,
        folder_path=folder,
        revision=revision,
        commit_message=message,
        allow_patterns=[*files],
        # Files of an earlier upload, which may have other names.
        delete_patterns=["*.safetensors", "*.safetensors.index.json"],
    )
    return str(commit.commit_url)


def _main(argv: list[str]) -> int:
    die_with_parent(signal.SIGTERM)
    folder, repository, revision, private, message, pause_s, *files = argv
    branch, is_private = revision or None, private == "True"
    for attempt in range(1, ATTEMPTS + 1):
        try:
            print(upload(folder, repository, revision=branch, private=is_private, message=message, files=files))
            return 0
        except Exception as err:
            status = getattr(getattr(err, "response", None), "status_code", None)
            line = " ".join(str(err).split())[:300]
            if attempt == ATTEMPTS or status in REFUSED:
                print(f"{type(err).__name__}: {line}", file=sys.stderr)
                return 1
            time.sleep(float(pause_s) * 4 ** (attempt - 1))
    return 1


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
