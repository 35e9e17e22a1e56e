"""Run TRL's own tests of its GRPO trainer against mgrpo.trl: `python -m tools.peers.trl_suite CHECKOUT OUT [-k EXPRESSION]`.

The tests are those of CHECKOUT/tests/test_grpo_trainer.py as they stand there, with its conftest; `from trl import GRPOConfig, GRPOTrainer`
gives this project's classes, and names on the Hub are folders in OUT that stand_ins.py makes. Nothing is fetched. OUT/results.json has
the outcomes, those of earlier calls among them, and OUT/logs what each test printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from tools.peers.trl_suite import stand_ins
from tools.peers.trl_suite.session import Session

LIMIT_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of github.com/huggingface/trl")
    parser.add_argument("out", type=Path, help="a folder for what is made and measured")
    parser.add_argument("-k", default="", dest="chosen", help="tests to run, as pytest's -k; by default all")
    parser.add_argument("--limit_s", type=float, default=LIMIT_S, help="how long a test may run")
    given = parser.parse_args()
    checkout, out = given.checkout.resolve(), given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found_first = [str(out / "site"), str(checkout)]
    sys.path[:0] = found_first
    os.environ["PYTHONPATH"] = os.pathsep.join([*found_first, os.environ.get("PYTHONPATH", os.getcwd())])
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a fork of a process that has asked CUDA for devices cannot use them
    stand_ins.make(checkout, out)
    os.chdir(out)
    plain = ["--capture=no", "--import-mode=append", "-p", "no:cacheprovider", "-p", "no:terminal"]
    tests = str(checkout / "tests" / "test_grpo_trainer.py")
    sys.exit(
        pytest.main([*plain, f"--rootdir={checkout}", "-k", given.chosen, tests], [Session(out, limit_s=given.limit_s)])
    )


if __name__ == "__main__":
    main()
