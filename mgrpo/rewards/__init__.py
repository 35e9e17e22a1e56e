"""Scores of completions: named verifiers, run in killable worker processes, and the rules that make a reward of them.

`verifiers` scores one text, `worker` is the program it runs in, `pool` keeps the workers, `compose` builds rewards.
"""

from __future__ import annotations


def verify(name: str, completion: str, ground_truth: object, **context: object) -> float:
    """Score of one completion by the verifier called `name`, in a worker process under time and memory limits.

    `context` is what a caller knows besides (the prompt, say); no verifier of today reads it.
    The first call starts the worker, which lives as long as this process.

    Returns:
        The score, or NaN where none could be given (time, memory, a crash, a ground truth the verifier cannot read).
    """
    from mgrpo.rewards.pool import Item, shared_pool

    return shared_pool().verify_many([Item(name, completion, ground_truth)])[0]
