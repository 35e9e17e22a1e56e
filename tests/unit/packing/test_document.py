"""Packs of whole samples: what each row sees and predicts, and padding."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.layout import Layout
from mgrpo.packing import (
    Cost,
    assemble,
    document_length,
    documents,
    pack_lengths,
    plan_step,
)
from mgrpo.types import PackedBatch, TeacherScores, TrainSample
from tests.builders import kept_tokens, sets_of, teacher_scores

# No deadline: a shared machine is slow now and then. No database: a test leaves no files.
property_test = settings(database=None, deadline=None, max_examples=100)


def make_samples(
    groups: list[tuple[int, list[int]]],
    seed: int = 0,
    *,
    has_turns: bool = False,
    is_cut: bool = False,
    taught: str = "",
) -> list[TrainSample]:
    """One group for each (prompt length, response lengths).

    Args:
        taught: three of four samples have one of two teachers, which "scored" them, with as many likeliest tokens as the digit
            after the word says, or reads a "prompt" of its own, one of two of the group, or of 70 % of the samples.
        is_cut: tokens have sets, one in five of them an empty one.
        has_turns: of two samples in three some tokens were not sampled, or none was; each token has its own advantage.
    """
    rng, masks, cuts, teachers = (np.random.default_rng(seed) for _ in range(4))
    samples = []
    for number, (prompt_length, response_lengths) in enumerate(groups):
        prompt = rng.integers(1, 1000, prompt_length).astype(np.int32)
        hints = [teachers.integers(1, 1000, teachers.integers(1, 9)).astype(np.int32) for _ in range(2)]
        for length in response_lengths:
            is_sampled = masks.random(length) < 0.5 if has_turns and masks.random() < 2 / 3 else None
            tokens = rng.integers(1, 1000, length).astype(np.int32)
            has_set = (cuts.random(length) < 0.8) & (True if is_sampled is None else is_sampled)
            sets = [
                [*cuts.integers(1000, 2000, cuts.integers(4)), token] if has_own else []
                for token, has_own in zip(tokens, has_set, strict=True)
            ]
            teacher = int(teachers.integers(2)) if taught and teachers.random() < 0.75 else -1
            samples.append(
                TrainSample(
                    prompt_tokens=prompt.copy(),
                    teacher=teacher,
                    taught=teacher_scores(length, int(taught[-1]), teachers)
                    if teacher >= 0 and taught[-1:].isdigit()
                    else None,
                    teacher_prompt=hints[teachers.integers(2)]
                    if teacher >= 0 and taught == "prompt" and teachers.random() < 0.7
                    else None,
                    tokens=tokens,
                    loss_mask=(rng.random(length) < 0.7) & (True if is_sampled is None else is_sampled),
                    is_sampled=is_sampled,
                    token_advantages=masks.random(length).astype(np.float32) if has_turns else None,
                    rollout_logprobs=-rng.random(length).astype(np.float32),
                    advantage=float(rng.normal()),
                    group=number,
                    ages=rng.integers(0, 128, length, dtype=np.uint8),
                    kept=kept_tokens(*sets) if is_cut else None,
                )
            )
    return samples


groups_of_samples = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=4)), max_size=8
)
share = st.sampled_from([True, False, "auto"])
teaching = st.sampled_from(["", "scored0", "scored3", "prompt"])


def pack_step(samples, *, multiple_of, document_multiple_of=1, **choices):
    """All packs of a step as [mini-batch][rank][micro-batch]."""
    padding = {"multiple_of": multiple_of, "document_multiple_of": document_multiple_of}
    plan = plan_step(samples, **padding, **choices)
    return [[[assemble(samples, documents, **padding) for documents in row] for row in ranks] for ranks in plan]


def attention_mask(pack: PackedBatch) -> np.ndarray:
    """`[tokens, tokens]` bool from the definition: earlier rows of the same document, in the trunk or the own branch."""
    index = np.arange(len(pack.tokens))
    document = np.searchsorted(pack.cu_seqlens, index, side="right")
    same = document[:, None] == document[None, :]
    earlier = index[None, :] <= index[:, None]
    visible = (pack.branches[None, :] == 0) | (pack.branches[None, :] == pack.branches[:, None])
    return same & earlier & visible


def check_pack(pack: PackedBatch, samples: list[TrainSample]) -> None:
    """Every sequence is its sample: what is predicted, from which visible tokens at which positions, and its numbers.

    What is predicted is what was sampled, or the first token.
    """
    mask = attention_mask(pack)
    for i, number in enumerate(pack.samples):
        sample = samples[number]
        span = slice(pack.response_cu_seqlens[i], pack.response_cu_seqlens[i + 1])
        sampled = range(len(sample.tokens)) if sample.is_sampled is None else np.flatnonzero(sample.is_sampled)
        own = list(sampled) or [0]
        np.testing.assert_array_equal(pack.targets[span], sample.tokens[own])
        np.testing.assert_array_equal(pack.loss_mask[span], sample.loss_mask[own])
        np.testing.assert_array_equal(pack.rollout_logprobs[span], sample.rollout_logprobs[own])
        np.testing.assert_array_equal(pack.ages[span], sample.ages[own])
        if sample.token_advantages is None:
            assert pack.advantages[i] == np.float32(sample.advantage) and len(pack.advantages) == len(pack.samples)
        else:
            np.testing.assert_array_equal(pack.advantages[span], sample.token_advantages[own])
        if sample.kept is None:
            assert pack.kept is None
        else:
            sets = [sets_of(sample.kept)[place] or [sample.tokens[place]] for place in own]
            assert pack.kept is not None and sets_of(pack.kept.part(span.start, span.stop)) == sets
        assert (-1 if pack.teachers is None else pack.teachers[i]) == sample.teacher
        if pack.taught is not None:
            scores = sample.taught or TeacherScores.none(len(sample.tokens), pack.taught.num_likeliest)
            assert equal_scores(pack.taught.part(span), scores.part(np.array(own)))
        assert pack.taught is not None or sample.taught is None
        text = np.concatenate([sample.prompt_tokens, sample.tokens])
        for j, row in zip(own, pack.rows[span], strict=True):
            seen = np.flatnonzero(mask[row])
            length = len(sample.prompt_tokens) + j
            np.testing.assert_array_equal(pack.tokens[seen], text[:length])
            np.testing.assert_array_equal(pack.positions[seen], np.arange(length))
            assert seen[-1] == row


def equal_packs(left: PackedBatch, right: PackedBatch) -> bool:
    special = ("kept", "teachers", "taught", "routes")
    names = [field.name for field in dataclasses.fields(PackedBatch) if field.name not in special]
    sets = [pack.kept and sets_of(pack.kept) for pack in (left, right)]
    teachers = [None if pack.teachers is None else pack.teachers.tolist() for pack in (left, right)]
    return (
        sets[0] == sets[1]
        and teachers[0] == teachers[1]
        and equal_scores(left.taught, right.taught)
        and all(
            getattr(left, name).dtype == getattr(right, name).dtype
            and np.array_equal(getattr(left, name), getattr(right, name))
            for name in names
        )
    )


def equal_scores(left: TeacherScores | None, right: TeacherScores | None) -> bool:
    if left is None or right is None:
        return left is right
    for ours, theirs in zip(dataclasses.astuple(left), dataclasses.astuple(right), strict=True):
        if (ours is None) != (theirs is None):
            return False
        if ours is not None and not (
            ours.dtype == theirs.dtype and np.array_equal(ours, theirs, equal_nan=ours.dtype.kind == "f")
        ):
            return False
    return True


@property_test
@given(
    groups_of_samples,
    share,
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
    teaching,
)
def test_packs_of_a_step_reproduce_every_sample_exactly_once(
    groups, share_prompts, multiple_of, dp, num_mini_batches, has_turns, is_cut, taught
):
    """A row that sees another completion, or predicts a shifted token, trains on text nobody sampled; loss still falls."""
    samples = make_samples(groups, has_turns=has_turns, is_cut=is_cut, taught=taught)
    packs = pack_step(
        samples,
        pack_length=32,
        dp=dp,
        num_mini_batches=num_mini_batches,
        multiple_of=multiple_of,
        share_prompts=share_prompts,
    )
    seen = []
    for ranks in packs:
        assert len({len(micro_batches) for micro_batches in ranks}) == 1
        for pack in (pack for micro_batches in ranks for pack in micro_batches):
            check_pack(pack, samples)
            seen += pack.samples.tolist()
            assert 0 < len(pack.tokens) <= 32 and len(pack.tokens) % multiple_of == 0
            assert pack.cu_seqlens[0] == 0 and pack.cu_seqlens[-1] == len(pack.tokens)
            assert np.all(np.diff(pack.cu_seqlens) > 0)
    assert sorted(seen) == list(range(len(samples)))


def test_a_tree_document_has_the_hand_worked_layout():
    """The record's definition itself, so that a mistake shared by packer and checker shows."""
    samples = [
        dataclasses.replace(sample, prompt_tokens=np.array([1, 2, 3], np.int32), tokens=np.array(tokens, np.int32))
        for sample, tokens in zip(make_samples([(3, [3, 1, 2])]), ([10, 11, 12], [20], [30, 31]), strict=True)
    ]
    pack = assemble(samples, [[0, 1, 2]], multiple_of=4)
    assert pack.tokens.tolist() == [1, 2, 3, 10, 11, 30, 0, 0]
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 3, 0, 1]
    assert pack.branches.tolist() == [0, 0, 0, 1, 1, 3, 0, 0]
    assert pack.cu_seqlens.tolist() == [0, 6, 8]
    assert pack.rows.tolist() == [2, 3, 4, 2, 2, 5]
    assert pack.targets.tolist() == [10, 11, 12, 20, 30, 31]
    assert pack.response_cu_seqlens.tolist() == [0, 3, 4, 6]
    assert pack.samples.tolist() == [0, 1, 2]
    assert document_length(samples, [0, 1, 2]) == 6


def test_what_stands_between_turns_is_an_input_only():
    """Rows of tool output cost a logit for each entry of the vocabulary, and their log-probabilities are in every mean."""
    turns = dataclasses.replace(
        make_samples([(2, [5])])[0],
        prompt_tokens=np.array([1, 2], np.int32),
        tokens=np.array([10, 11, 90, 91, 12], np.int32),
        rollout_logprobs=np.array([-1, -2, 0, 0, -3], np.float32),
        is_sampled=np.array([True, True, False, False, True]),
        loss_mask=np.array([True, True, False, False, True]),
    )
    lost = dataclasses.replace(turns, is_sampled=np.zeros(5, bool), loss_mask=np.zeros(5, bool))
    pack = assemble([turns, lost], [[0, 1]])
    assert pack.tokens.tolist() == [1, 2, 10, 11, 90, 91, 10, 11, 90, 91]
    # 12 follows 91; the completion without a sampled token keeps its first one, which the prompt predicts.
    assert pack.targets.tolist() == [10, 11, 12, 10]
    assert pack.rows.tolist() == [1, 2, 5, 1]
    assert pack.response_cu_seqlens.tolist() == [0, 3, 4]
    assert pack.rollout_logprobs.tolist() == [-1, -2, -3, -1]
    assert pack.loss_mask.tolist() == [True, True, True, False]


def test_a_full_pack_gets_no_padding_document():
    """A padding document of zero tokens breaks variable-length attention kernels."""
    samples = make_samples([(3, [2])])
    assert assemble(samples, [[0]], multiple_of=4).cu_seqlens.tolist() == [0, 4]


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_a_dummy_pack_can_run_a_forward_and_trains_nothing(multiple_of):
    """A rank without work has to take part in every collective of the model, with at least one token to compute on."""
    pack = assemble([], [], multiple_of=multiple_of)
    assert pack.tokens.tolist() == [0] * multiple_of
    assert pack.positions.tolist() == list(range(multiple_of))
    assert pack.cu_seqlens.tolist() == [0, multiple_of]
    assert pack.response_cu_seqlens.tolist() == [0]
    for name in ("rows", "targets", "loss_mask", "rollout_logprobs", "advantages", "samples"):
        assert getattr(pack, name).shape == (0,)
    assert pack.rows.dtype == np.int32 and pack.loss_mask.dtype == np.bool_ and pack.advantages.dtype == np.float32


def test_groups_that_fit_share_their_prompt_when_asked():
    """A tree longer than a pack would end the run though its samples fit."""
    samples = make_samples([(4, [3, 3]), (50, [50, 50]), (2, [5])])
    assert documents(samples, share_prompts=True, pack_length=4096) == [[0, 1], [2, 3], [4]]
    assert documents(samples, share_prompts=True, pack_length=147) == [[0, 1], [2], [3], [4]]
    assert documents(samples, share_prompts=False, pack_length=4096) == [[0], [1], [2], [3], [4]]
    assert documents(samples, share_prompts=True, pack_length=7) == [[0], [1], [2], [3], [4]]
    assert documents(samples, share_prompts=True, pack_length=8)[0] == [0, 1]


def test_auto_shares_a_prompt_where_its_tokens_outweigh_the_mask():
    """The dense mask makes long trees dearer than their samples apart; a prompt repeated for every sample wastes layers."""
    # Group 0: 100 + 2 x 10 = 120 tokens shared, 2 x 110 = 220 apart. Group 1: 10 + 2 x 100 = 210, 2 x 110 = 220.
    samples = make_samples([(100, [11, 11]), (10, [101, 101])])
    cheap, dear = Cost(a=1, b=0), Cost(a=1, b=0.01)
    assert documents(samples, share_prompts="auto", pack_length=4096, cost=cheap) == [[0, 1], [2, 3]]
    # Attention adds 144 to 120 and 242 to 220 in group 0, 441 to 210 and 242 to 220 in group 1.
    assert documents(samples, share_prompts="auto", pack_length=4096, cost=dear) == [[0, 1], [2], [3]]
    assert documents(samples, share_prompts="auto", pack_length=100, cost=cheap) == [[0], [1], [2], [3]]


def test_samples_with_different_prompts_never_share_one():
    """A group number used twice would train completions under a prompt they never saw."""
    samples = make_samples([(4, [3]), (4, [3])])
    samples = [dataclasses.replace(sample, group=0) for sample in samples]
    assert documents(samples, share_prompts=True, pack_length=100) == [[0], [1]]


def test_a_tree_that_does_not_fit_is_taken_apart():
    """A pack of 9 has no room for a tree of 10, whose samples do fit: it has to be split, not refused."""
    samples = make_samples([(4, [4, 4])])
    packs = pack_step(samples, pack_length=9, dp=1, num_mini_batches=1, multiple_of=3, share_prompts=True)
    assert sorted(pack.samples.tolist() for pack in packs[0][0]) == [[0], [1]]


@property_test
@given(groups_of_samples, st.integers(2, 3), st.sampled_from([1, 2]), st.integers(1, 2), st.booleans())
def test_documents_are_padded_as_context_and_tensor_ranks_require(groups, context, tensor, dp, has_turns):
    """A context rank takes two stretches of every document: without the padding they would not be of equal length."""
    samples = make_samples(groups, has_turns=has_turns)
    layout = Layout(world_size=context * tensor, context=context, tensor=tensor, sequence_parallel=tensor > 1)
    packs = pack_step(
        samples,
        pack_length=48,
        dp=dp,
        num_mini_batches=1,
        multiple_of=layout.pack_multiple_of,
        share_prompts="auto",
        document_multiple_of=layout.document_multiple_of,
    )
    seen = []
    for pack in (pack for micro_batches in packs[0] for pack in micro_batches):
        check_pack(pack, samples)
        seen += pack.samples.tolist()
        assert np.all(np.diff(pack.cu_seqlens) % (2 * context) == 0)
        assert len(pack.tokens) % (context * tensor) == 0 and len(pack.tokens) <= 48
    assert sorted(seen) == list(range(len(samples)))


@pytest.mark.parametrize(
    ("context", "tensor", "sequence_parallel", "expected"),
    [(1, 4, False, (1, 1)), (1, 4, True, (1, 4)), (2, 1, False, (4, 4)), (2, 4, True, (4, 8)), (3, 2, True, (6, 6))],
)
def test_multiples_of_hand_worked_layouts(context, tensor, sequence_parallel, expected):
    """Too small a multiple stops in the model's first layer, too large a one pads every document of every step."""
    layout = Layout(world_size=context * tensor, context=context, tensor=tensor, sequence_parallel=sequence_parallel)
    assert (layout.document_multiple_of, layout.pack_multiple_of) == expected


def test_padding_of_a_document_has_the_hand_worked_layout():
    """The padding continues the last branch: later positions, seen by no row that predicts, and no loss."""
    sample = dataclasses.replace(
        make_samples([(3, [3])])[0],
        prompt_tokens=np.array([1, 2, 3], np.int32),
        tokens=np.array([10, 11, 12], np.int32),
    )
    pack = assemble([sample, sample], [[0], [1]], multiple_of=12, document_multiple_of=4)
    assert pack.tokens.tolist() == [1, 2, 3, 10, 11, 0, 0, 0] * 2 + [0] * 8
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7] * 3
    assert pack.branches.tolist() == [0, 0, 0, 1, 1, 1, 1, 1] * 2 + [0] * 8
    assert pack.cu_seqlens.tolist() == [0, 8, 16, 24]
    assert pack.rows.tolist() == [2, 3, 4, 10, 11, 12]
    assert pack.targets.tolist() == [10, 11, 12] * 2
    assert document_length([sample], [0], multiple_of=4) == 8


def test_shared_prompts_are_refused_where_documents_are_split():
    """A context rank sees a part of each branch: without support for that it would attend to the wrong tokens."""
    samples = make_samples([(4, [3, 3])])
    arguments = {"pack_length": 32, "dp": 1, "num_mini_batches": 1, "multiple_of": 4, "document_multiple_of": 4}
    with pytest.raises(ValueError, match="shared_prompt_packing=auto or off"):
        pack_step(samples, share_prompts=True, **arguments)
    pack = pack_step(samples, share_prompts="auto", **arguments)[0][0][0]
    assert pack.branches.max() == 1 and len(pack.cu_seqlens) == 3


GROUPS = [(3, [4, 5, 6]), (2, [3, 4, 5, 6]), (5, [7, 1, 2]), (9, [8, 2]), (1, [1, 1, 1, 9]), (4, [5, 5])]


def memberships(samples, **options) -> list[list[int]]:
    """Which samples train in each of three mini-batches."""
    defaults = {"pack_length": 64, "dp": 2, "num_mini_batches": 3, "multiple_of": 1, "share_prompts": False}
    packs = pack_step(samples, **defaults | options)
    return [sorted(int(i) for row in ranks for pack in row for i in pack.samples) for ranks in packs]


def test_mini_batches_train_whole_groups_and_every_sample_once():
    """The trainer routes each sample's old logprobs by `samples`."""
    samples = make_samples(GROUPS)
    parts = memberships(samples)
    assert sorted(index for part in parts for index in part) == list(range(len(samples)))
    for part in parts:
        groups = {samples[index].group for index in part}
        assert part == [index for index, sample in enumerate(samples) if sample.group in groups]


@pytest.mark.parametrize(
    "layout",
    [
        {"share_prompts": True},
        {"dp": 4},
        {"multiple_of": 8, "document_multiple_of": 4},
        {"multiple_of": 16, "document_multiple_of": 8, "dp": 1},
        {"pack_length": 32, "micro_batches_multiple_of": 2},
    ],
)
def test_mini_batches_do_not_depend_on_the_layout(layout):
    """A run that goes on with more context ranks would take other optimizer steps, and no test of one step would show it."""
    samples = make_samples(GROUPS)
    assert memberships(samples, **layout) == memberships(samples)


@property_test
@given(groups_of_samples, share, st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 6)]), st.integers(1, 3), st.booleans())
def test_lengths_are_those_of_the_packs_that_are_laid_out(groups, share_prompts, multiples, dp, has_turns):
    """Padding and operations are reported from lengths alone: they would be those of other packs."""
    samples = make_samples(groups, has_turns=has_turns)
    padding = dict(zip(("multiple_of", "document_multiple_of"), multiples, strict=True))
    choices = {"pack_length": 36, "dp": dp, "num_mini_batches": 2} | padding
    plan = plan_step(samples, share_prompts=share_prompts and multiples[1] == 1, **choices)
    chosen = [documents for ranks in plan for row in ranks for documents in row]
    packs = [assemble(samples, documents, **padding) for documents in chosen]
    found = pack_lengths(samples, chosen, **padding)
    positions = np.concatenate([first + np.arange(length) for first, length in found.runs])
    assert sorted(positions) == sorted(np.concatenate([pack.positions for pack in packs]))
    assert found.tokens == len(positions)
    assert found.responses == sum(len(pack.rows) for pack in packs)
    if not has_turns:
        assert found.responses == sum(len(sample.tokens) for sample in samples)
    assert found.filled == sum(len(pack.samples) > 0 for pack in packs)
    # A row that is not padding shows one of the samples' tokens, which are all above 0.
    assert found.padding == sum(int((pack.tokens == 0).sum()) for pack in packs)


def test_empty_prompts_and_responses_are_refused():
    """The first response token would be predicted from the last row of the document before it."""
    sample = make_samples([(2, [2])])[0]
    with pytest.raises(AssertionError, match="prompt without tokens"):
        assemble([dataclasses.replace(sample, prompt_tokens=np.zeros(0, np.int32))], [[0]])
    with pytest.raises(AssertionError, match="without response tokens"):
        assemble([dataclasses.replace(sample, tokens=np.zeros(0, np.int32))], [[0]])


def test_few_groups_still_fill_every_mini_batch():
    """A filter may leave two groups for four optimizer steps; sharing prompts would leave two steps without anything."""
    samples = make_samples([(3, [4, 5, 4, 5]), (3, [4, 5, 4, 5])])
    packs = pack_step(samples, pack_length=64, dp=1, num_mini_batches=4, multiple_of=1, share_prompts=True)
    assert [sum(len(pack.samples) for pack in ranks[0]) for ranks in packs] == [2, 2, 2, 2]


def test_a_completion_trains_in_one_mini_batch():
    """The loss weighs its branches together, which it cannot in two optimizer steps."""
    samples = make_samples([(3, [4, 5, 4, 5, 3, 3])])
    samples = [dataclasses.replace(sample, continues=number in (1, 2, 5)) for number, sample in enumerate(samples)]
    found = memberships(samples, num_mini_batches=3)
    assert sorted(found) == [[0, 1, 2], [3], [4, 5]]
