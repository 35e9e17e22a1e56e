"""Scores of completions: named verifiers, run in killable worker processes, and the rules that make a reward of them.

`verifier` says what one is, `verifiers/` holds them, `catalog` finds them by name; `worker` is the program they run in,
`pool` keeps the workers, `remote` asks servers, `scorer` is all of that behind one call; `compose` builds rewards of
scores, `functions` of the user's own functions.
"""

from __future__ import annotations

from collections.abc import Sequence


def verify(
    name: str,
    completion: str,
    ground_truth: object,
    *,
    prompt: str = "",
    completion_ids: Sequence[int] | None = None,
    num_tokens: int | None = None,
    query: str | None = None,
    tokenized_prediction: Sequence[int] | None = None,
    **settings: object,
) -> float:
    """Score of one completion by the verifier called `name`, under time and memory limits.

    The first call starts a worker process, which lives as long as this one. Other settings than the last call's start another.

    Args:
        name: see docs/rewards.md; case does not matter.
        ground_truth: one JSON value, as the row's `ground_truth`; numpy's numbers and arrays will do.
        prompt: what the completion answers, for judges. `query` is Open Instruct's word for it.
        completion_ids: token ids of the completion, for the verifiers of lengths; or their number as `num_tokens`.
            `tokenized_prediction` is Open Instruct's word for the ids.
        settings: fields of the reward section of the configuration, for example `code_api_url`.
    Returns:
        The score, or NaN where none could be given (time, memory, a crash, a server that fails, a ground truth that the
        verifier cannot read).
    Raises:
        ValueError: no verifier is called `name`; a setting has no such value; a judge that has no model.
        TypeError: no setting is called so; the completion is no text, or the ground truth no JSON value.
        RuntimeError: the verifier cannot be loaded.
    """
    from mgrpo.rewards.door import json_value, reward_settings
    from mgrpo.rewards.scorer import shared_scorer
    from mgrpo.rewards.verifier import Answer, Item

    if not isinstance(completion, str):
        raise TypeError(f"completion={completion!r:.80} must be text, not {type(completion).__name__}")
    ids = tokenized_prediction if completion_ids is None else completion_ids
    count = num_tokens if ids is None else len(ids)
    answer = Answer(
        completion=completion,
        ground_truth=json_value(ground_truth),
        prompt=str(query or prompt),
        num_tokens=None if count is None else int(count),
    )
    return shared_scorer(reward_settings(settings)).verify_many([Item(name, answer)])[0]
