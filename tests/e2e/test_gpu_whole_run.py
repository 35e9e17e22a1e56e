"""tools/gpu_whole_run.py and tools/gpu_book.py on a CPU: minutes on a GPU are too few to mend the programs there."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SKIPPED_ON_A_CPU = (
    *("transformers_liger", "transformers_compiled", "crashed_test", "ops_tests", "parallel_tests", "policy_tests"),
    *("trl", "big_1.5b", "counters"),
)


def test_every_stage_passes_on_a_cpu(tmp_path: Path) -> None:
    """With few steps; the other stages are in the book below."""
    command = [sys.executable, ROOT / "tools" / "gpu_whole_run.py", "engine", "quickstart", "group+sync_tests"]
    command += ["--device", "cpu", "--folder", tmp_path / "kept", "--out", tmp_path / "out"]
    done = subprocess.run([*command, "--", "--total_episodes", "1536"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "whole-run.json").read_text())
    outcomes = {name: part["status"] for name, part in report["parts"].items()}
    assert outcomes == {**dict.fromkeys(("engine", "quickstart", "group"), "passed"), "sync_tests": "skipped"}
    engine, run = (report["parts"][name]["figures"] for name in ("engine", "quickstart"))
    assert engine["first_weights"] == engine["once_more"] == {"tokens": 0, "logprobs": 0}
    assert engine["other_weights"]["tokens"] > 0.5
    assert run["steps"] == run["policy_version"] == 6 and run["dtype"] == "bfloat16"
    page = (tmp_path / "out" / "whole-run.md").read_text()
    assert "| quickstart | passed |" in page and "6 steps, reward" in page
    assert "it says: 10+16=" in (tmp_path / "out" / "logs.txt").read_text()


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders 1, 2 and 3 of pieces, with a module in each of two archives; the second ends in folder 3."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    carry = importlib.import_module("gpu_carry")
    pieces = carry.Pieces(tmp_path / "carry", 500)
    for archive, module in (("learner.tar.xz", "carried_first"), ("packages.tar.xz", "carried_last")):
        wheel = tmp_path / f"{module}-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            # Hexadecimal digits of a number without a pattern compress to half their size.
            file.writestr(f"{module}.py", f"VALUE = {3**3000 if module == 'carried_last' else 1:#x}\n")
        carry.pack([wheel], pieces, archive)
    pieces.close()
    (tmp_path / "carry" / "1" / carry.SUMS).write_text(json.dumps(pieces.sums))
    assert sorted(path.name for path in (tmp_path / "carry").iterdir()) == ["1", "2", "3"]
    return tmp_path / "carry"


@pytest.mark.timeout(900)
def test_the_book_runs_in_three_kinds_of_calls(tmp_path: Path, carried: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a borrowed machine: each call has a tree of its own, with the pieces that it brings."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    book = importlib.import_module("gpu_book")

    def call(name: str, number: int) -> str:
        tree = tmp_path / f"call_{number}"
        book.copy_tree(tree)
        shutil.copytree(carried / str(number), tree / ".carry" / str(number))
        command = f"{sys.executable} tools/gpu_book.py {name} --carry .carry/{number} --device cpu --wait 1"
        command += f" --folder {tmp_path / 'kept'} --out {tmp_path / 'out'}"
        done = subprocess.run(command.split(), cwd=tree, capture_output=True, text=True)
        shutil.rmtree(tree)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "the learner's half is running" in call("start", 1)
    assert "extension: passed" in call("more", 2)
    assert not (tmp_path / "kept" / "site" / "carried_last.py").exists()
    assert "the learner's half has ended" in call("finish", 3)
    report = json.loads((tmp_path / "out" / "book.json").read_text())
    outcomes = {name: part["status"] for name, part in report["parts"].items()}
    passed = {"join", *book.LEARNER, *book.ENGINE} - {*SKIPPED_ON_A_CPU}
    assert outcomes == dict.fromkeys(passed, "passed") | dict.fromkeys(SKIPPED_ON_A_CPU, "skipped")
    assert report["parts"]["join"]["note"] == "learner.tar.xz; packages.tar.xz"
    assert (tmp_path / "kept" / "site" / "carried_last.py").exists()
    run = report["parts"]["big"]["figures"]
    assert run["steps"] == run["policy_version"] == 4 and run["shortest"] == 32
    page = (tmp_path / "out" / "book.md").read_text()
    assert "| big | engine starts in 45 s; a step 4 to 5 s; sync of 1 GB 0.05 s | passed: a step" in page
    assert "| learner, tokens/s: mgrpo, transformers |" in page and "| bf16 (2) |" in page
