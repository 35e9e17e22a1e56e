"""The hostile corpus through every verifier: the workers are whole afterwards, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from mgrpo.config.schema import Reward
from mgrpo.rewards.registry import find, known_verifiers
from mgrpo.rewards.scorer import Scorer, is_remote
from tests.hostile_answers import INJECTIONS, PROGRAMS, TEXTS
from tests.namespaces import skip_without_namespaces
from tests.processes import processes_with
from tests.unit.rewards.items import item

IFEVAL = {"instruction_id": ["length_constraints:number_words"], "kwargs": [{"num_words": 5, "relation": "at least"}]}
LABELS: dict[str, object] = {
    "integer": 12345,
    "gsm8k": "12345",
    "math": r"\frac{12345}{67}",
    "strict_math": r"\frac{12345}{67}",
    "math_open_instruct": r"\frac{12345}{67}",
    "ifeval": json.dumps([IFEVAL]),
    "ifeval_old": json.dumps({"func_name": "validate_lowercase"}),
    "max_length": "100",
    "up_to_max_length": "100",
}
LOCAL = tuple(name for name in known_verifiers() if not is_remote(name))
GOOD = item("integer", "5", 5)
TRACES = [Path(folder) / "mgrpo-hostile" for folder in ("/tmp", "/var/tmp", "/dev/shm", "/", ".", str(Path.home()))]


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The folder for temporary files, which everything started from here carries in its environment."""
    return _temporary_files_in(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scorer, str]]:
    """Workers with every local verifier, and their folder for temporary files."""
    with pytest.MonkeyPatch.context() as patch:
        folder = _temporary_files_in(tmp_path_factory.mktemp("temporary"), patch)
        with nothing_left(folder):
            scorer = Scorer(Reward(verifier_timeout=4.0, verifier_workers=2), LOCAL)
            try:
                yield scorer, folder
            finally:
                scorer.close()


def _temporary_files_in(folder: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("TMPDIR", str(folder))
    patch.setattr(tempfile, "tempdir", None)
    return str(folder)


@contextlib.contextmanager
def nothing_left(word: str, running: Callable[[], Iterable[int]] = tuple) -> Iterator[None]:
    """No process beside those that are still running, and no file or mount more than before."""
    mounts = Path("/proc/self/mountinfo").read_text()
    yield
    deadline = time.monotonic() + 10
    while processes_with(word) != set(running()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(word) == set(running())
    assert not [path for path in TRACES if path.exists()]
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not os.listdir(word)


def test_the_corpus_is_as_large_as_it_says() -> None:
    """A corpus that shrinks unnoticed proves less every time."""
    assert len(TEXTS) >= 100 and len(PROGRAMS) >= 30 and len(INJECTIONS) >= 8


@pytest.mark.parametrize("name", LOCAL)
def test_no_text_breaks_a_verifier(name: str, local: tuple[Scorer, str]) -> None:
    """One answer that takes the worker along costs a step its rewards; one that scores is a policy's shortest way."""
    scorer, folder = local
    texts = [*TEXTS.values(), *PROGRAMS.values(), *INJECTIONS.values()]
    items = [item(name, text, LABELS.get(name, "the right answer"), "question", 1000) for text in texts]
    with nothing_left(folder, lambda: scorer.pool.pids):
        scores = scorer.verify_many([*items, GOOD])
        assert scores[-1] == 1.0
        assert len(scorer.pool.pids) == 2
        unscored = [
            key for key, score in zip([*TEXTS, *PROGRAMS, *INJECTIONS], scores, strict=False) if math.isnan(score)
        ]
        assert not unscored, f"no score for {unscored}"


@pytest.mark.parametrize("name", ["code", "code_stdio"])
def test_no_program_breaks_out(name: str, marker: str) -> None:
    """A program that a model wrote runs on the machine of the run."""
    skip_without_namespaces()
    tests = ["assert False"] if name == "code" else [{"input": "", "output": "the right answer"}]
    texts = {key: f"```python\n{program}\n```" for key, program in PROGRAMS.items()}
    with nothing_left(marker):
        scorer = Scorer(Reward(code_max_execution_time=0.5), [name])
        try:
            scores = scorer.verify_many([item(name, text, tests) for text in texts.values()])
            assert dict(zip(texts, scores, strict=True)) == dict.fromkeys(texts, 0.0)
            good = ["assert f() == 1"] if name == "code" else [{"input": "1", "output": "1"}]
            program = "def f():\n    return 1" if name == "code" else "print(input())"
            assert scorer.verify_many([item(name, f"```python\n{program}\n```", good)]) == [1.0]
        finally:
            scorer.close()


def test_every_name_has_a_verifier() -> None:
    """A name that is listed and cannot be found fails at step 1."""
    assert {find(name).name for name in known_verifiers()} >= {
        "integer", "gsm8k", "math", "strict_math", "math_open_instruct", "ifeval", "ifeval_old", "flan", "string_matcher", "string_f1", "puzzle",
        "re_search_f1", "re_search", "max_length", "up_to_max_length", "code", "code_stdio", "general-quality",
        "general-quality_ref", "general-quality_rubric", "general-safety", "general-factuality", "general-creative_writing",
        "general-refusal", "general-web_instruct_general_verifier", "rubric", "passthrough",
    }  # fmt: skip
