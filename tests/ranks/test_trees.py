"""A tree of turns is trained as its turns would be if each were written out after its whole context."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mgrpo.algo.training_samples import train_samples
from mgrpo.environments.agents.recorded_tree import RecordedTree
from mgrpo.environments.loop.trajectory import Sampled
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.table import trained_tensors
from mgrpo.types import Completion, RolloutGroup, Score, ScoredGroup, TrainSample
from tests.builders import prompt
from tests.ranks import cases, float64_cases
from tests.ranks.outcomes import Outcome, collect, gradient_differences
from tests.ranks.test_layouts import LOSS, check, oracle
from tests.tiny_models import save_tiny

VOCAB = 125
LAYOUTS = {
    "one rank": (1, {"zero_stage": 0}),
    "tp2": (2, {"tensor": 2, "zero_stage": 0}),
    "cp2": (2, {"context": 2, "zero_stage": 0}),
    "dp2": (2, {"zero_stage": 0}),
}
Turn = tuple[np.ndarray, Sampled]
"""What was sampled after what."""


def grown(seed: int) -> tuple[Completion, list[Turn]]:
    """A tree with forks, several roots, contexts that were rewritten and turns that nobody has read; and its turns that count."""
    random = np.random.default_rng(seed)

    def drawn(most: int) -> list[int]:
        return random.integers(3, VOCAB, random.integers(1, most)).tolist()

    record, turns, parents = RecordedTree(), dict[int, Turn](), dict[int, int | None]()
    for number in range(9):
        parent = None if number in (0, 5) else int(random.integers(max(0, number - 3), number))
        rewrites = number == 4
        context = record.ask(number, parent, drawn(7), rewrites)
        tokens = np.array(drawn(6), np.int32)
        sampled = Sampled(
            tokens=tokens,
            logprobs=random.normal(-4.8, 0.3, len(tokens)).astype(np.float32),
            policy_versions=np.zeros(len(tokens), np.int32),
            finish_reason="stop",
        )
        record.sampled(number, sampled)
        turns[number], parents[number] = (context, sampled), parent
    lost = {7} - {parent for number, parent in parents.items() if number != 7}
    message = {"role": "assistant", "content": ""}
    told = [{"number": number, "delivered": number not in lost, "message": message} for number in turns]
    trajectory = record.trajectory({"turns": told})
    completion = trajectory.completion(text_of=lambda tokens: [""] * len(tokens), scored_text="final")
    return completion, [turn for number, turn in turns.items() if number not in lost]


TREES = [grown(seed) for seed in range(3)]
REWARDS = (1.0, 0.0, 0.25)


def as_trees() -> list[TrainSample]:
    group = RolloutGroup(prompt=prompt(), completions=tuple(completion for completion, _ in TREES))
    scored = ScoredGroup(group=group, scores=tuple(Score(reward=reward) for reward in REWARDS))
    return train_samples([scored], normalization="centered", ddof=0, eps=0.0)


def written_out() -> list[TrainSample]:
    """Each turn with everything that it was sampled after, and nothing else."""
    return [
        TrainSample(
            prompt_tokens=context,
            tokens=sampled.tokens,
            loss_mask=np.ones(len(sampled.tokens), np.bool_),
            rollout_logprobs=sampled.logprobs,
            advantage=reward - float(np.mean(REWARDS)),
            group=0,
        )
        for (_, turns), reward in zip(TREES, REWARDS, strict=True)
        for context, sampled in turns
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("models"), "qwen2"))


def test_the_trees_have_what_agents_make_of_them() -> None:
    """Otherwise the comparisons below would compare lists."""
    branches = [completion.trajectory.branches for completion, _ in TREES if completion.trajectory]
    assert all(len(own) >= 4 for own in branches)
    assert {branch.parent for own in branches for branch in own} > {-1, 0}
    assert any(len(turns) == 8 for _, turns in TREES) and any(len(turns) == 9 for _, turns in TREES)
    trees, turns = as_trees(), written_out()
    assert sum(sample.loss_mask.sum() for sample in trees) == sum(len(sample.tokens) for sample in turns)
    assert len(trees) < len(turns) and any(sample.is_sampled is not None for sample in trees)


@pytest.fixture(scope="module")
def exact(run_ranks: Any, model: str) -> Outcome:
    """Loss and gradients of one turn after the other, on one rank."""
    alone = {"layout": {"zero_stage": 0}, "share_prompts": False, "pack_length": 64}
    (found,) = run_ranks(1, float64_cases.gradients, model_dir=model, samples=written_out(), loss=LOSS, **alone)
    assert all(grad.dtype == np.float64 for _, grad in found["gradients"])
    return collect([found], trained_tensors(shape_of(read_hf_config(model))))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pack_length", [64, 512])
def test_a_trees_gradient_is_that_of_its_turns(
    run_ranks: Any, model: str, exact: Outcome, layout: str, pack_length: int
) -> None:
    """A branch that trains its context again, or is trained after another one, weighs forks more than straight lines."""
    size, axes = LAYOUTS[layout]
    arguments = {"model_dir": model, "layout": axes, "samples": as_trees(), "loss": LOSS, "pack_length": pack_length}
    ranks = run_ranks(size, float64_cases.gradients, **arguments)
    found = collect(ranks, {name: gradient.shape for name, gradient in exact.gradients.items()})
    assert found.loss == pytest.approx(exact.loss, abs=1e-15)
    assert max(gradient_differences(found.gradients, exact.gradients)[:2]) < 4e-14


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_branchs_log_probabilities_are_transformers(run_ranks: Any, model: str, layout: str) -> None:
    """Also where a branch begins in the middle of another one, its first token is predicted from its whole context."""
    size, axes = LAYOUTS[layout]
    ranks = run_ranks(size, cases.gradients, model_dir=model, layout=axes, samples=as_trees(), loss=LOSS)
    check(ranks, oracle(model, as_trees(), LOSS))


def test_transformers_trees_are_its_turns(model: str) -> None:
    """The two lists of samples say the same, whoever reads them."""
    trees, turns = (oracle(model, samples, LOSS) for samples in (as_trees(), written_out()))
    assert trees.loss == pytest.approx(turns.loss, abs=2.5e-8)
    assert max(gradient_differences(trees.gradients, turns.gradients)[:2]) < 7e-6
