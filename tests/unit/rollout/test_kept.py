"""The sets that an engine sampled from, from its answers to the completions."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from mgrpo.environments.loop.trajectory import Sampled, Trajectory
from mgrpo.moving import from_values
from mgrpo.rollout.requests import evaluation_sampling, to_groups, training_sampling
from mgrpo.rollout.vllm import engine_arguments
from mgrpo.rollout.vllm.actor import _group
from mgrpo.rollout.vllm.calls import flattened, joined, sampling_settings
from mgrpo.rollout.vllm.kept_sets import TIES, kept_tokens, masked_tokens
from mgrpo.rollout.vllm.server.server_answers import ServerChoice
from tests.builders import kept_tokens as sets
from tests.builders import prompt, sets_of

CUT = float("-inf")


def logs(*shares: float) -> np.ndarray:
    """Log-probabilities; 0 is what was cut."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(shares, np.float32))


def found(sampled: int, ids: list[int], *shares: float) -> list[int]:
    """The set of one position."""
    (own,) = sets_of(kept_tokens(np.array([sampled]), np.array([ids]), logs(*shares)[None]))
    return own


def test_what_is_finite_is_the_set():
    """Worked by hand; a set that holds what was cut would give it a probability that the engine never gave it."""
    assert found(5, [3, 5, 9, 1], 0.6, 0.4, 0, 0) == [3, 5]
    assert found(3, [3, 5], 1, 0) == [3]
    assert sets_of(kept_tokens(np.zeros(0), np.zeros((0, 4)), np.zeros((0, 4)))) == []


def test_a_set_that_is_not_whole_is_not_known():
    """More tokens than were asked for may be equally likely: the trainer would normalise over fewer than the engine did."""
    assert found(3, [3, 5, 9], 0.3, 0.3, 0.3) == []
    assert found(8, [3, 5, 9], 0.4, 0.3, 0.3) == [], "the sampled token is not in it"
    assert found(3, [3, 5], 0.5, 0.49999) == [3, 5], "rounding"
    assert found(3, [3, 5], float("nan"), 0.5) == []


@pytest.mark.parametrize("seed", range(20))
def test_sets_are_those_of_a_softmax_cut_by_hand(seed):
    """Against the definition, with ties at the last of the top k and whole rows of one token."""
    rng = np.random.default_rng(seed)
    rows, vocab, top_k = 16, 60, 8
    logits = np.round(rng.normal(0, 3, (rows, vocab)), 1)
    least = -np.sort(-logits, axis=1)[:, top_k - 1 : top_k]
    logits[logits < least] = CUT
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    order = np.argsort(-probs, axis=1, kind="stable")[:, : top_k + TIES]
    shares = logs(*np.take_along_axis(probs, order, 1).ravel()).reshape(rows, -1)
    sampled = np.array([rng.choice(vocab, p=row / row.sum()) for row in probs])
    expected = [np.flatnonzero(row).tolist() if np.count_nonzero(row) <= top_k + TIES else [] for row in probs]
    assert [sorted(own) for own in sets_of(kept_tokens(sampled, order, shares))] == expected


def test_a_mask_is_a_set():
    """Worked by hand; a set that does not hold its token is not what it was sampled from."""
    assert sets_of(masked_tokens([5, 2, 7], [[3, 5, 9], [2], [1, 8]])) == [[3, 5, 9], [2], []]
    assert sets_of(masked_tokens([5, 2], [[3, 9], [5, 2]])) == [[], [5, 2]], "its own token, not another's"
    assert sets_of(masked_tokens([5, 2], [[], [2]])) == [[], [2]]
    assert sets_of(masked_tokens([], [])) == sets_of(masked_tokens([], None)) == []
    for unknown in (None, [], [[5]], [[5], [2], [2]]):
        assert sets_of(masked_tokens([5, 2], unknown)) == [[], []]


def actors_group(number: int, tokens: list[int], ids: list[list[int]], shares: list[list[float]]):
    """What the actor makes of vLLM's `FlatLogprobs`: of each position first the sampled token's, then the likeliest."""
    flat_ids = [i for token, row in zip(tokens, ids, strict=True) for i in (token, *row)]
    values = [
        v
        for token, row, own in zip(tokens, ids, shares, strict=True)
        for v in (own[row.index(token)], *own)
    ]  # fmt: skip
    completion = SimpleNamespace(
        index=0,
        token_ids=tokens,
        logprobs=SimpleNamespace(token_ids=flat_ids, logprobs=logs(*values).tolist()),
        finish_reason="stop",
        weight_versions=None,
    )

    async def get():
        return SimpleNamespace(finished=True, outputs=[completion])

    return asyncio.run(_group(number, SimpleNamespace(get=get), num_logprobs=len(ids[0])))


def test_the_actors_sets_lie_beside_their_tokens():
    """And the logprobs are still those of the sampled tokens, not of the likeliest."""
    answer = actors_group(7, [4, 6], [[6, 4, 2], [6, 1, 3]], [[0.5, 0.25, 0.25], [1.0, 0, 0]])
    np.testing.assert_allclose(answer["logprobs"], logs(0.25, 1.0))
    assert answer["kept_ids"].tolist() == [6, 4, 2, 6] and answer["kept_sizes"].tolist() == [3, 1]
    assert answer["tokens"].tolist() == [4, 6] and answer["kept_ids"].dtype == answer["kept_sizes"].dtype == np.int32


def test_sets_come_back_to_their_completions_also_beside_an_evaluation():
    """Groups finish together; an evaluation's has no sets, and would move those of all later tokens."""
    first = actors_group(7, [4, 6], [[6, 4], [6, 1]], [[0.5, 0.5], [1.0, 0]])
    evaluated = [SimpleNamespace(token_ids=[1, 2, 3], finish_reason="stop", weight_versions=None)]
    answer = joined([first, flattened(8, evaluated, [[-1.0, -1.0, -1.0]]), first])
    prompts = [prompt(id=(0, number)) for number in range(3)]
    groups = to_groups(prompts, answer, lambda tokens: [""] * len(tokens))
    kept = [completion.kept and sets_of(completion.kept) for group in groups for completion in group.completions]
    assert kept == [[[6, 4], [6]], [[], [], []], [[6, 4], [6]]]
    plain = to_groups(prompts[:1], joined([flattened(8, evaluated, [[-1.0] * 3])]), lambda tokens: [""] * len(tokens))
    assert plain[0].completions[0].kept is None


def test_a_servers_sets_are_read_from_its_candidates():
    """It writes -9999 for what was cut, and the sampled token among the likeliest ones, first."""
    half = float(np.log(0.5))
    content = [
        {"token_id": 4, "logprob": half, "top_logprobs": [{"token_id": 4, "logprob": half}, {"token_id": 6, "logprob": half}, {"token_id": 2, "logprob": -9999.0}]},
        {"token_id": 6, "logprob": 0.0, "rank": 1, "top_logprobs": [{"token_id": 6, "logprob": 0.0}, {"token_id": 1, "logprob": -9999.0}]},
    ]  # fmt: skip
    answer = {"index": 0, "token_ids": [4, 6], "finish_reason": "stop", "logprobs": {"content": content}}
    choice = msgspec.json.decode(json.dumps(answer), type=ServerChoice)
    assert sets_of(choice.kept()) == [[4, 6], [6]]
    assert choice.sampled() == [half, 0.0]
    assert sets_of(ServerChoice(index=0, token_ids=[], finish_reason="abort").kept()) == []
    masked = msgspec.json.decode(json.dumps(answer | {"sampling_mask": [[2, 4], [6]]}), type=ServerChoice)
    assert sets_of(masked.kept(has_masks=True)) == [[2, 4], [6]] and sets_of(masked.kept()) == [[4, 6], [6]]
    assert sets_of(choice.kept(has_masks=True)) == [[], []]


def test_only_training_is_cut_and_asks_for_sets():
    """Evaluations keep the settings that earlier runs were measured with; what must match the expression does so in both."""
    values = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "vllm_guided_decoding_regex": "[0-9]+", "eval_top_p": 0.5}
    rollout = from_values(values).rollout
    train, held_out = (
        sampling_settings(sampling(rollout, [1]), num_logprobs=21)
        for sampling in (training_sampling, evaluation_sampling)
    )
    names = ("top_k", "top_p", "min_p", "logprobs", "structured_outputs")
    assert [train[name] for name in names] == [5, 0.9, 0.1, 21, {"regex": "[0-9]+"}]
    assert [held_out[name] for name in names] == [0, 0.5, 0.0, 0, {"regex": "[0-9]+"}]
    rollout = from_values(values | {"top_k": 512}).rollout
    masked = [sampling(rollout, [1]) for sampling in (training_sampling, evaluation_sampling)]
    assert [sampling.has_sets for sampling in masked] == [True, False]
    names = ("top_k", "top_p", "min_p", "logprobs")
    asked = [sampling_settings(sampling) for sampling in masked]
    assert [[own[name] for name in names] for own in asked] == [[512, 0.9, 0.1, 0], [512, 0.5, 0.0, 0]]
    uncut = sampling_settings(training_sampling(from_values({}).rollout, [1]))
    assert uncut["logprobs"] == 0 and "structured_outputs" not in uncut


@pytest.mark.parametrize(("vocab", "expected"), [(1000, 8 + TIES), (20, 20)])
def test_an_engine_returns_more_logprobs_than_are_kept_but_never_more_than_there_are(tmp_path, vocab, expected):
    """Ties are kept on a CPU; and vLLM ends when it looks for more tokens than the vocabulary has."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab}))
    values = {"model_name_or_path": str(tmp_path), "top_k": 8, "vllm_guided_decoding_regex": "a+"}
    args = engine_arguments.engine_args(from_values(values), on_gpu=False)
    assert args["max_logprobs"] == expected and not args["skip_tokenizer_init"] and "tokenizer" in args
    assert "max_logprobs" not in engine_arguments.engine_args(
        from_values({"model_name_or_path": str(tmp_path)}), on_gpu=False
    )


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("top_k", "has_masks"), [(0, False), (64, False), (65, True), (2048, True)])
def test_many_tokens_are_returned_as_masks(tmp_path, on_gpu, top_k, has_masks):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    args = engine_arguments.engine_args(
        from_values({"model_name_or_path": str(tmp_path), "top_k": top_k}), on_gpu=on_gpu
    )
    assert args.get("return_sampling_mask", False) == has_masks
    assert ("max_logprobs" in args) == (0 < top_k <= 64) and args["logprobs_mode"] == "processed_logprobs"


@pytest.mark.parametrize(
    ("gpus", "runner", "words"),
    [
        ([], None, "top_k=512 must be at most 64 with engines on a CPU"),
        ("01", None, None),
        ("01", "1", None),
        (
            "01",
            "0",
            "VLLM_USE_V2_MODEL_RUNNER=0 chooses the model runner of vLLM without sampling masks, which top_k=512",
        ),
    ],
)
def test_masks_are_asked_for_only_where_engines_have_them(monkeypatch, gpus, runner, words):
    """Servers say it themselves."""
    monkeypatch.setattr(engine_arguments, "serving_gpus", lambda: list(gpus))
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    server = {"vllm_mode": "server", "vllm_server_base_url": ["http://127.0.0.1:1"]}
    for values, is_asked in (({"top_k": 512}, True), ({"top_k": 64}, False), ({"top_k": 512, **server}, False)):
        config = from_values({"model_dtype": "float32", **values})
        problems = engine_arguments.machine_problems(
            config, num_local_learners=1, hf_config={"head_dim": 64}, starts_engines=True
        )
        expected = [words] if words and is_asked else []
        assert len(problems) == len(expected) and all(w in p for w, p in zip(expected, problems, strict=True))


def sampled(tokens: list[int], kept=None) -> Sampled:
    return Sampled(
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        policy_versions=np.zeros(len(tokens), np.int32),
        finish_reason="stop",
        kept=kept,
    )


def test_turns_keep_their_sets_and_what_stands_between_them_has_none():
    """Worked by hand, with a branch; without any cut there are no sets at all."""
    for is_cut in (True, False):
        grown = Trajectory(context=np.array([1], np.int32))
        grown.add_sampled(sampled([3, 4], sets([3, 9], [4]) if is_cut else None))
        grown.add_bridge([7, 7, 7])
        grown.begin_branch(np.array([1, 2], np.int32))
        grown.add_sampled(sampled([5], sets([8, 5]) if is_cut else None))
        grown.ended_by = "stop"
        completion = grown.completion(text_of=lambda tokens: [""] * len(tokens), scored_text="final")
        if is_cut:
            assert sets_of(completion.kept) == [[3, 9], [4], [], [], [], [8, 5]]
            assert (completion.kept.sizes > 0).tolist() == completion.loss_mask.tolist()
        else:
            assert completion.kept is None
