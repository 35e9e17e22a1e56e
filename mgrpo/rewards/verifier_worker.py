"""The program that runs verifiers: `python -m mgrpo.rewards.verifier_worker` (`json_lines`).

In:  {"verifiers": [name, ...], "settings": {...}, "memory_mb": n}  -> {"ready": [name, ...], "failed": {name: text}}
     {"id": n, "verifier": name, "answer": {...}}                   -> {"id": n, "score": x} or {"id": n, "error": text}
where "answer" holds the fields of `verifier.Answer`. Answers come in the order of the questions, each at once, so that the
first question without an answer is the culprit when the pool (`worker_pool`) has to kill this process.
"""

from __future__ import annotations

import functools
import os

from mgrpo.config.fields import build
from mgrpo.config.schema import Reward
from mgrpo.processes.json_lines import Message, limit_memory, serve
from mgrpo.processes.lifetime import adopt_orphans, kill_descendants
from mgrpo.rewards.registry import add_modules, find
from mgrpo.rewards.verifier import Answer, Verifier, check_score


def main() -> None:
    adopt_orphans()
    serve(functools.partial(_answer, {}))


def _answer(verifiers: dict[str, Verifier], question: Message) -> Message:
    return _load(question, verifiers) if "verifiers" in question else _score(question, verifiers)


def _load(question: Message, verifiers: dict[str, Verifier]) -> Message:
    """Load the verifiers of the request, under its memory limit."""
    if question.get("memory_mb"):
        limit_memory(question["memory_mb"])
    settings, failed = _settings(question["settings"]), {}
    for name in question["verifiers"]:
        try:
            add_modules(settings.verifier_modules)
            verifier = find(name)(settings)
            assert isinstance(verifier, Verifier)  # the pool sends no others
            verifier.warm_up()
            verifiers[name] = verifier
        except (Exception, SystemExit) as err:
            failed[name] = f"{type(err).__name__}: {err}"[:300]
    return {"ready": question["verifiers"], "failed": failed}


def _settings(values: Message) -> Reward:
    """The reward section; JSON has lists where it holds tuples."""
    return build({name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}).reward


def _score(question: Message, verifiers: dict[str, Verifier]) -> Message:
    number = question["id"]
    try:
        score = float(verifiers[question["verifier"]].score(Answer(**question["answer"])))
        check_score(score)
        if left := _end_what_it_started():
            raise RuntimeError(f"it left {left} processes running, which were killed")
    # SystemExit as well: a verifier that calls sys.exit() should not cost the worker.
    except (Exception, SystemExit) as err:
        return {"id": number, "error": f"{type(err).__name__}: {err}"[:300]}
    return {"id": number, "score": score}


def _end_what_it_started() -> int:
    """Kill the processes that a verifier has left running; returns how many."""
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
