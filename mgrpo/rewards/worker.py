"""The program that runs verifiers: `python -m mgrpo.rewards.worker`, JSON lines on stdin and stdout.

In:  {"verifiers": [name, ...], "memory_mb": n}                       -> {"ready": [name, ...]}
     {"id": n, "verifier": name, "completion": text, "ground_truth": value} -> {"id": n, "score": x} or {"id": n, "error": text}
Answers come in the order of the questions, each at once, so that the one question without an answer is the culprit when
the pool (`pool`) has to kill this process. It ends with its input, and with its parent.
"""

from __future__ import annotations

import json
import math
import os
import resource
from typing import BinaryIO

from mgrpo.lifetime import die_with_parent
from mgrpo.rewards.verifiers import find, warm_up


def main() -> None:
    die_with_parent()
    questions, answers = _take_standard_streams()
    for line in questions:
        answer = json.dumps(_answer(json.loads(line)))
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


def _answer(question: dict) -> dict:
    if "verifiers" in question:
        if question.get("memory_mb"):
            limit = int(question["memory_mb"]) * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for name in question["verifiers"]:
            warm_up(name)
        return {"ready": question["verifiers"]}
    try:
        verifier = find(question["verifier"])
        score = float(verifier(question["completion"], question["ground_truth"]))
        if not math.isfinite(score):
            raise ValueError(f"the score is {score}")
    # SystemExit too: a verifier that calls sys.exit() is a bad verifier, not a reason to lose the worker.
    except (Exception, SystemExit) as err:
        return {"id": question["id"], "error": f"{type(err).__name__}: {err}"[:300]}
    return {"id": question["id"], "score": score}


if __name__ == "__main__":
    main()
