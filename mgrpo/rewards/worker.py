"""The program that runs verifiers: `python -m mgrpo.rewards.worker`, JSON lines on stdin and stdout.

In:  {"verifiers": [name, ...], "settings": {...}, "memory_mb": n}  -> {"ready": [name, ...], "failed": {name: text}}
     {"id": n, "verifier": name, "completion": text, "ground_truth": value, "prompt": text, "num_tokens": n}
                                                                    -> {"id": n, "score": x} or {"id": n, "error": text}
Answers come in the order of the questions, each at once, so that the one question without an answer is the culprit when
the pool (`pool`) has to kill this process. It ends with its input, and with its parent.
"""

from __future__ import annotations

import json
import math
import os
import resource
from typing import BinaryIO

from mgrpo.config.schema import Reward
from mgrpo.processes.lifetime import adopt_orphans, die_with_parent, kill_descendants
from mgrpo.rewards.catalog import add_modules, find
from mgrpo.rewards.verifier import Answer, Verifier


def main() -> None:
    die_with_parent()
    adopt_orphans()
    questions, answers = _take_standard_streams()
    verifiers: dict[str, Verifier] = {}
    for line in questions:
        question = json.loads(line)
        answer = json.dumps(_load(question, verifiers) if "verifiers" in question else _answer(question, verifiers))
        _write_all(answers, answer.encode() + b"\n")


def _take_standard_streams() -> tuple[BinaryIO, int]:
    """Keep stdin and stdout for the protocol; what a verifier prints goes to stderr, and its input is empty."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return questions, answers


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _load(question: dict, verifiers: dict[str, Verifier]) -> dict:
    """Make the verifiers that the question names, under the limit that it sets."""
    if question.get("memory_mb"):
        limit = int(question["memory_mb"]) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    settings, failed = Reward(**question["settings"]), {}
    for name in question["verifiers"]:
        try:
            add_modules(settings.verifier_modules)
            verifiers[name] = find(name)(settings)
            verifiers[name].warm_up()
        except (Exception, SystemExit) as err:
            failed[name] = f"{type(err).__name__}: {err}"[:300]
    return {"ready": question["verifiers"], "failed": failed}


def _answer(question: dict, verifiers: dict[str, Verifier]) -> dict:
    number, verifier = question.pop("id"), verifiers[question.pop("verifier")]
    try:
        score = float(verifier.score(Answer(**question)))
        if not math.isfinite(score):
            raise ValueError(f"the score is {score}")
        if left := _end_what_it_started():
            raise RuntimeError(f"it left {left} processes running, which were killed")
    # SystemExit too: a verifier that calls sys.exit() is a bad verifier, not a reason to lose the worker.
    except (Exception, SystemExit) as err:
        return {"id": number, "error": f"{type(err).__name__}: {err}"[:300]}
    return {"id": number, "score": score}


def _end_what_it_started() -> int:
    """Kill what a verifier has left running; returns how many processes that were."""
    killed = 0
    try:
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                killed += kill_descendants(os.getpid())
                os.waitpid(-1, 0)
    except ChildProcessError:
        return killed


if __name__ == "__main__":
    main()
