"""Scores of completions: named verifiers, run in worker processes under limits, and the rules that turn scores into rewards.

`verifier` has their interface, `verifiers/` holds them, `registry` finds them by name; `verifier_worker` is the program they run in,
`worker_pool` keeps the workers, `remote_endpoint` calls servers, `scorer` combines them in one call; `compose` builds rewards
from scores, `rubrics/` also lets criteria evolve, `reward_functions` from the user's own functions; `rewarder` is the door that a run uses.
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

    The first call starts a worker process, which lives as long as this one. A call with other settings replaces it.

    Args:
        name: see docs/rewards.md; case does not matter.
        completion: text of the answer, without the prompt.
        ground_truth: one JSON value, as the row's `ground_truth`; or numpy numbers and arrays.
        prompt: text that the completion answers, for judges.
        completion_ids: token ids of the completion, for the length verifiers.
        num_tokens: their number, in place of the ids.
        query: Open Instruct's name for `prompt`.
        tokenized_prediction: Open Instruct's name for `completion_ids`.
        settings: fields of the reward section of the configuration, for example `code_api_url`.
    Returns:
        The score, or NaN where none could be given (time, memory, a crash, a server that fails, a ground truth that the
        verifier cannot read).
    Raises:
        ValueError: no verifier is called `name`; a setting cannot have its value; a judge without a model.
        TypeError: a setting does not exist; the completion is not text, or the ground truth not a JSON value.
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
