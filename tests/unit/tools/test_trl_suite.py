"""tools/peers/trl_suite: what is run, what is left out, and how the outcomes become a page; TRL itself is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.peers.trl_suite import session, table
from tools.peers.trl_suite.meaning import why_not
from tools.peers.trl_suite.stand_ins import make_package

ROOT = Path(__file__).resolve().parents[3]
TRAINS = "def test_train(self):\n    trainer = GRPOTrainer(model=model_id)\n    trainer.train()\n    trainer.state.log_history\n"


def test_the_trainer_is_replaced_and_the_rest_is_the_checkouts(tmp_path: Path) -> None:
    """Otherwise TRL would be measured against itself, or our stand-ins against ourselves."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "__init__.py").write_text("raise ImportError('the checkout is imported as it stands')")
    (tmp_path / "checkout" / "import_utils.py").write_text("HERE = 'checkout'")
    make_package(tmp_path / "checkout", tmp_path / "site")
    program = (
        "import mgrpo.trl, trl, trl.import_utils;"
        "print(trl.GRPOConfig is mgrpo.trl.GRPOConfig, trl.GRPOTrainer is mgrpo.trl.GRPOTrainer, trl.import_utils.HERE)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), str(ROOT)))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["True", "True", "checkout"]


@pytest.mark.parametrize(
    ("source", "class_name", "words"),
    [
        (TRAINS, "TestGRPOTrainer", None),
        (TRAINS, "TestGRPOTrainerVLM", "vision"),
        (TRAINS + "    assert trainer._logs\n", "TestGRPOTrainer", "inner"),
        (TRAINS + "    trainer.get_eval_dataloader()\n", "TestGRPOTrainer", "inner"),
        (TRAINS + "    assert trainer.reward_funcs\n", "TestGRPOTrainer", None),
        ("def test_mask(self):\n    GRPOTrainer.get_off_policy_mask(mask)\n", "TestGRPOTrainer", "inner"),
        (TRAINS.replace("model_id", "model_id, use_liger_kernel=True"), "TestGRPOTrainer", "Liger"),
        (TRAINS.replace("model_id", "model_id, use_liger_kernel=use_liger_kernel"), "TestGRPOTrainer", None),
        ('with patch.object(trainer.model, "generate", side_effect=fake):\n' + TRAINS, "TestGRPOTrainer", "vLLM"),
        ('@patch("transformers.generation.utils.GenerationMixin.generate")\n' + TRAINS, "TestGRPOTrainer", "vLLM"),
    ],
)
def test_only_what_needs_more_than_the_interface_is_left_out(source: str, class_name: str, words: str | None) -> None:
    """A pattern that matches too much would hide failures behind a reason."""
    reason = why_not(source, class_name=class_name)
    assert reason is None if words is None else words in (reason or "")


def report(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**{"failed": False, "skipped": False} | fields)


def test_the_first_failure_of_a_test_is_its_outcome() -> None:
    """An error in a fixture's end, or a skip inside the test, must not read as passed."""
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="ConfigError: 1 problem:\n - beta"))
    assert session.summed_up([report(), report(), report()]) == {"outcome": "passed", "note": ""}
    assert session.summed_up([report(), report(), report(failed=True, longrepr=crash)]) == {
        "outcome": "failed",
        "note": "ConfigError: 1 problem: - beta",
    }
    skip = report(skipped=True, longrepr=("file", 3, "Skipped: no GPU"))
    assert session.summed_up([report(), skip, report()]) == {"outcome": "skipped", "note": "Skipped: no GPU"}


def test_each_test_runs_apart_and_what_hangs_is_stopped(tmp_path: Path) -> None:
    """A crash or a hang in one test would end the others, and what one leaves behind would decide on the next."""
    (tmp_path / "test_some.py").write_text(
        "import os, time\nimport pytest\n\nleft = []\n\n\n"
        "class Test:\n"
        "    def test_leaves(self): left.append(1)\n"
        "    def test_finds(self): assert left == [], 'not alone'\n"
        "    def test_dies(self): os._exit(1)\n"
        "    def test_hangs(self): time.sleep(60)\n"
        "    @pytest.mark.skipif(True, reason='no GPU')\n"
        "    def test_skipped(self): pass\n"
        "    def test_private(self): trainer._generate()\n"
    )
    program = (
        "import pytest; from pathlib import Path; from tools.peers.trl_suite.session import Session\n"
        "for chosen, limit_s in (('hangs', 0.2), ('not hangs', 100.0)):\n"
        "    arguments = ['-p', 'no:cacheprovider', '--capture=no', '-k', chosen, 'test_some.py']\n"
        "    pytest.main(arguments, [Session(Path('out'), limit_s=limit_s)])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, check=True)
    results = session.kept(tmp_path / "out" / "results.json")
    assert {name.partition("test_")[2]: (result["outcome"], result["note"]) for name, result in results.items()} == {
        "leaves": ("passed", ""),
        "finds": ("passed", ""),
        "dies": ("failed", "its process ended without a word"),
        "hangs": ("failed", "not done after 0.2 s"),
        "skipped": ("skipped", "no GPU"),
        "private": ("not meaningful", "calls, reads or replaces inner parts of TRL's trainer"),
    }


def test_the_page_counts_and_explains(tmp_path: Path) -> None:
    """Numbers that differ from the outcomes, or a failure that is not listed, would make the page untrue."""

    def outcome(what: str, note: str = "") -> dict[str, object]:
        return {"outcome": what, "note": note, "seconds": 1.0}

    results = {
        "TestA::test_a[1]": outcome("passed"),
        "TestA::test_a[2]": outcome("passed"),
        "TestA::test_b[x]": outcome("failed", "ConfigError: a | b"),
        "TestA::test_c[y]": outcome("failed", "AssertionError"),
        "TestA::test_d": outcome("skipped", "no GPU"),
        "TestB::test_e": outcome("not meaningful", "vision"),
    }
    lines = list(table.section("1.2", results, {"test_c": "It is another thing here.", "test_a": "Never shown."}))
    assert lines[0] == (
        "TRL 1.2, 6 tests: 1 skipped by TRL itself, 1 not meaningful here, 4 meaningful. **Of these 2 pass.**"
    )
    assert "| `test_b[x]` | `ConfigError: a \\| b` |" in lines
    assert "| `test_c[y]` | It is another thing here. |" in lines
    assert "| passed |  | 2 | `test_a` (2) |" in lines
    assert "| not meaningful | vision | 1 | `test_e` |" in lines

    page = f"# Page\n\n{table.BEGIN}\nold\n{table.END}\n\nafter\n"
    assert table.replaced(page, ["new"]) == f"# Page\n\n{table.BEGIN}\n\nnew\n\n{table.END}\n\nafter\n"
    with pytest.raises(ValueError, match="between which the outcomes go"):
        table.replaced("# Page\n", ["new"])


def test_every_explanation_is_a_sentence() -> None:
    """A comma too many in the file would cut a sentence off, and the page would show half of it."""
    sentences = table.explanations()
    assert sentences
    assert all(name.startswith("test_") and why.endswith(".") for name, why in sentences.items())
