"""Experts that engines chose: from their answers through requests, turns and branches to samples."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mgrpo.algo.training_samples import train_samples
from mgrpo.environments.agents.recorded_tree import RecordedTree
from mgrpo.environments.loop.trajectory import Sampled, Trajectory
from mgrpo.rollout.engine import WrongAnswerError
from mgrpo.rollout.mixtures import Mixtures
from mgrpo.rollout.requests import to_groups
from mgrpo.rollout.vllm.calls import flattened, joined
from mgrpo.rollout.vllm.server.server_answers import ServerChoice
from mgrpo.types import Completion, Routes, lengthened, unrouted
from tests import builders

SOME = Mixtures(layers=(1, 2), count=9, top_k=2, num_layers=4)


def rows(*tokens: int) -> Routes:
    """Rows that say which tokens they are of, `[tokens, 2, 2]`."""
    return (np.array(tokens, np.uint8)[:, None, None] * 4 + np.arange(4).reshape(2, 2)).astype(np.uint8)


def sampled(context: list[int], *tokens: int, shift: int = 0) -> Sampled:
    """A turn after this context; its rows say their tokens, plus `shift`."""
    return Sampled(
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        policy_versions=np.zeros(len(tokens), np.int32),
        finish_reason="stop",
        routes=rows(*(np.array([*context, *tokens][:-1]) + shift)),
    )


def completion(trajectory: Trajectory) -> Completion:
    trajectory.ended_by = "stop"
    return trajectory.completion(text_of=lambda tokens: [""] * len(tokens), scored_text="final")


def test_layers_without_experts_are_left_out():
    """vLLM has rows for all layers; the learner's first router would replay a dense layer's zeros."""
    found = np.arange(4 * 4 * 2).reshape(4, 4, 2).astype(np.uint8)
    assert np.array_equal(SOME.routes(found, 3, 2), found[:, 1:3])
    assert SOME.routes(None, 3, 0).shape == (0, 2, 2)
    for wrong in (found[:3], found[:, :3], found[:, :, :1]):
        with pytest.raises(ValueError, match=r"expected \[4, 4, 2\]"):
            SOME.routes(wrong, 3, 2)


@pytest.mark.parametrize(
    "count, top_k, dtype", [(255, 1, np.uint8), (256, 8, np.uint8), (256, 1, np.uint16), (512, 10, np.uint16)]
)
def test_the_highest_value_of_all_choices_is_no_choice(count, top_k, dtype):
    """Of 256 experts one has this number, but a token has it once."""
    assert Mixtures(layers=(0,), count=count, top_k=top_k, num_layers=1).dtype is dtype


def answer(
    number: int, prompt: int, *lengths: int, has_routes: bool = True
) -> tuple[dict[str, np.ndarray], list[Routes]]:
    """An engine's answer to a prompt of so many tokens, and its rows."""
    outputs = [SimpleNamespace(token_ids=[*range(n)], finish_reason="stop", weight_versions=None) for n in lengths]
    each = [rows(*range(number, number + prompt + n - 1)) if n else rows() for n in lengths]
    return flattened(number, outputs, [[0.0] * n for n in lengths], None, each if has_routes else None), each


def test_rows_survive_the_wire_beside_groups_without_any():
    """An evaluation may end in the same poll as groups to train on, and a completion without tokens has no row."""
    first, of_first = answer(1, 3, 2, 4)
    other, _ = answer(2, 2, 3, has_routes=False)
    last, of_last = answer(3, 1, 0, 2)
    groups = to_groups([builders.prompt()] * 3, joined([other, first, last]), lambda tokens: [""] * len(tokens))
    found = [[each.routes for each in group.completions] for group in groups]
    assert found[0] == [()] and found[2][0] == ()
    for (own,), expected in zip([*found[1], found[2][1]], [*of_first, of_last[1]], strict=True):
        assert np.array_equal(own, expected)


def npy(array: np.ndarray) -> str:
    with io.BytesIO() as file:
        np.save(file, array)
        return base64.b64encode(file.getvalue()).decode()


def choice(**fields: Any) -> ServerChoice:
    return ServerChoice(index=0, token_ids=[5, 6], finish_reason="stop", **fields)


def test_a_servers_rows_are_those_of_an_engine():
    """They come as a file in base64."""
    found = np.arange(4 * 4 * 2).reshape(4, 4, 2).astype(np.uint8) % 9
    assert np.array_equal(choice(routed_experts=npy(found)).routes(SOME, 3), found[:, 1:3])


@pytest.mark.parametrize(
    "text",
    [npy(np.zeros((3, 4, 2), np.uint8)), npy(np.full((4, 4, 2), 9, np.uint8)), npy(np.zeros((4, 4, 2))), "AAAA", "%"],
)
def test_rows_that_cannot_be_of_this_model_are_refused(text):
    """The learner would end in an index that does not exist, on a GPU without a word about where from."""
    with pytest.raises(WrongAnswerError, match="9 experts"):
        choice(routed_experts=text).routes(SOME, 3)


def test_a_turns_rows_are_of_the_turn_that_read_the_token_first():
    """A later turn may have read it again, with newer weights, after its answer was sampled."""
    trajectory = Trajectory(context=np.array([1, 2], np.int32))
    trajectory.add_sampled(sampled([1, 2], 3, 4))
    trajectory.add_bridge([5])
    trajectory.add_sampled(sampled([1, 2, 3, 4, 5], 6, shift=10))
    (found,) = completion(trajectory).routes
    assert np.array_equal(found, rows(1, 2, 3, 14, 15))


def test_a_turn_without_rows_has_those_of_the_next_one():
    """Its engine may not have said them."""
    trajectory = Trajectory(context=np.array([1], np.int32))
    trajectory.add_sampled(replace(sampled([1], 2), routes=None))
    trajectory.add_sampled(sampled([1, 2], 3))
    trajectory.add_sampled(replace(sampled([1, 2, 3], 4), routes=None))
    (found,) = completion(trajectory).routes
    assert np.array_equal(found, lengthened(rows(1, 2), 3))


def test_a_turn_whose_rows_are_not_its_tokens_ends_the_run():
    """Every later row would be another token's."""
    trajectory = Trajectory(context=np.array([1, 2], np.int32))
    with pytest.raises(AssertionError, match="routes of 3 tokens, the turn read 4"):
        trajectory.add_sampled(sampled([2], 3, 4, 5))


def test_branches_have_the_rows_of_the_turn_that_read_their_context():
    """A fork's context was read for its own turn; another branch's rows are of other tokens from there on."""
    tree = RecordedTree()
    for number, parent, added, tokens in ((0, None, [1], [2]), (1, 0, [3], [4]), (2, 0, [5], [6]), (3, 2, [7], [8])):
        context = tree.ask(number, parent, added).tolist()
        tree.sampled(number, sampled(context, *tokens, shift=10 * number))
    turns = [{"number": n, "delivered": True, "message": {"role": "assistant", "content": ""}} for n in range(4)]
    made = tree.trajectory({"turns": turns}).completion(text_of=lambda tokens: [""] * len(tokens), scored_text="final")
    assert [branch.prompt_tokens.tolist() for branch in made.trajectory.branches] == [[1], [1, 2, 5]]
    first, second = made.routes
    assert np.array_equal(first, rows(1, 12, 13))
    assert np.array_equal(second, rows(21, 22, 25, 36, 37))
    group = builders.scored_group([1.0, 0.0], completions=[made, builders.completion(2)])
    samples = train_samples([group], normalization="standard", ddof=0, eps=1e-4)
    assert [np.array_equal(sample.routes, own) for sample, own in zip(samples, made.routes, strict=False)] == [
        True,
        True,
    ]
    assert np.array_equal(samples[2].routes, unrouted(3, first))


def test_rows_of_another_length_are_not_trained_on():
    """They would move the rows of all samples behind them."""
    made = replace(builders.completion(3), routes=(rows(1, 2, 3),))
    group = builders.scored_group([1.0, 0.0], completions=[made, builders.completion(2)])
    with pytest.raises(AssertionError, match="routes of 3 tokens, the sample reads 4"):
        train_samples([group], normalization="standard", ddof=0, eps=1e-4)
