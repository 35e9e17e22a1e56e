"""The way of a step's packs to the learners: what each receives, and how few bytes that takes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.packing import assemble, from_slice, plan_step, teacher_packs, to_slices
from mgrpo.types import TeacherScores
from tests.builders import kept_tokens, teacher_scores
from tests.unit.packing.test_document import (
    check_pack,
    equal_packs,
    groups_of_samples,
    make_samples,
    property_test,
    share,
    teaching,
)

PADDINGS = st.sampled_from([(1, 1), (2, 1), (4, 4), (6, 2)])


@property_test
@given(
    groups_of_samples,
    share,
    PADDINGS,
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    teaching,
)
def test_packs_survive_the_wire(groups, share_prompts, multiples, dp, num_mini_batches, has_turns, is_cut, taught):
    """Ranks would train on each other's packs, or divide by a denominator of their own."""
    samples = make_samples(groups, has_turns=has_turns, is_cut=is_cut, taught=taught)
    padding = dict(zip(("multiple_of", "document_multiple_of"), multiples, strict=True))
    choices = {"pack_length": 36, "dp": dp, "num_mini_batches": num_mini_batches} | padding
    plan = plan_step(samples, share_prompts=share_prompts and multiples[1] == 1, **choices)
    index, slices = to_slices(samples, plan, **padding)
    assert len(slices) == dp
    for rank, part in enumerate(slices):
        received = from_slice(index, part.filled())
        assert len(received) == num_mini_batches
        for mini_batch, ranks in zip(received, plan, strict=True):
            packs = [as_others(assemble(samples, documents, **padding), samples) for documents in ranks[rank]]
            assert len(mini_batch) == len(packs)
            assert all(equal_packs(left, right) for left, right in zip(mini_batch, packs, strict=True))


def as_others(pack, samples):
    """Ranks would meet in different collectives if only some of a step's packs had teachers."""
    scores = [sample.taught for sample in samples if sample.taught is not None]
    if pack.teachers is None and any(sample.teacher >= 0 for sample in samples):
        pack = dataclasses.replace(pack, teachers=np.full(len(pack.samples), -1, np.int8))
    if pack.taught is None and scores:
        pack = dataclasses.replace(pack, taught=TeacherScores.none(len(pack.targets), scores[0].num_likeliest))
    return pack


@settings(property_test, max_examples=30)
@given(groups_of_samples, share, PADDINGS, st.integers(1, 3), st.booleans(), st.sampled_from(["scored0", "prompt"]))
def test_a_teacher_reads_the_same_tokens_after_its_own_prompts(groups, share_prompts, multiples, dp, has_turns, taught):
    """Its log-probabilities are laid beside the policy's one by one: another order, or another token, teaches nonsense."""
    samples = make_samples(groups, has_turns=has_turns, taught=taught)
    padding = dict(zip(("multiple_of", "document_multiple_of"), multiples, strict=True))
    share_prompts = share_prompts and multiples[1] == 1
    plan = plan_step(samples, pack_length=36, dp=dp, num_mini_batches=2, share_prompts=share_prompts, **padding)
    index, slices = to_slices(samples, plan, **padding)
    as_read = [
        sample if sample.teacher_prompt is None else dataclasses.replace(sample, prompt_tokens=sample.teacher_prompt)
        for sample in samples
    ]
    for part in slices:
        data = part.filled()
        own = [pack for packs in from_slice(index, data) for pack in packs]
        for teacher in range(2):
            read = [pack for packs in teacher_packs(index, data, teacher) for pack in packs]
            assert len(read) == len(own)
            for ours, theirs in zip(own, read, strict=True):
                check_pack(theirs, as_read)
                expected = [number for number in ours.samples.tolist() if samples[number].teacher == teacher]
                assert theirs.samples.tolist() == expected
                assert 0 < len(theirs.tokens) <= 36 and len(theirs.tokens) % multiples[0] == 0
                of_teacher = np.isin(ours.samples, expected)
                spans = np.repeat(of_teacher, np.diff(ours.response_cu_seqlens))
                assert theirs.targets.tolist() == ours.targets[spans].tolist()


def test_a_pack_has_room_for_the_longer_prompt_of_a_teacher():
    """The teacher's pack would not fit into the memory that packs were measured for."""
    samples = make_samples([(4, [3, 3]), (4, [3])])
    long, short = np.arange(20, dtype=np.int32), np.arange(3, dtype=np.int32)
    choices = {"dp": 1, "num_mini_batches": 1, "multiple_of": 1, "share_prompts": True}

    def packs(prompts, pack_length):
        own = [
            dataclasses.replace(sample, teacher=0, teacher_prompt=prompt)
            for sample, prompt in zip(samples, prompts, strict=True)
        ]
        ((rows,),) = plan_step(own, pack_length=pack_length, **choices)
        return sorted(sorted(pack) for pack in rows)

    assert packs([short] * 3, 14) == [[[0, 1], [2]]]
    # One prompt of 20 for both of the first group, then one for each of them.
    assert packs([long, long, short], 24 + 6) == [[[0, 1], [2]]]
    assert packs([long, long, short], 24 + 5) == [[[0, 1]], [[2]]]
    assert packs([long, long[1:], short], 24) == [[[0]], [[1]], [[2]]]
    with pytest.raises(ValueError, match="22 tokens, more than the 21"):
        packs([long, long, short], 21)


def test_the_index_counts_over_all_ranks():
    """The loss's denominator: a rank that knew its own tokens only would weigh them dp times too much."""
    samples = make_samples([(2, [3, 4]), (3, [5, 2, 6]), (1, [4])])
    choices = {"pack_length": 16, "dp": 2, "num_mini_batches": 2, "multiple_of": 1, "share_prompts": False}
    plan = plan_step(samples, **choices)
    index, _ = to_slices(samples, plan, multiple_of=1, document_multiple_of=1)
    members = [[number for row in ranks for pack in row for own in pack for number in own] for ranks in plan]
    trained = [[int(samples[number].loss_mask.sum()) for number in own] for own in members]
    assert index["num_trained_tokens"].tolist() == [sum(own) for own in trained]
    assert index["num_sequences"].tolist() == [len(own) for own in members]
    assert index["samples"].tolist() == members[0] + members[1]
    assert index["trained_tokens"].tolist() == trained[0] + trained[1]
    assert all(array.dtype.kind == "i" and array.flags.c_contiguous for array in index.values())


def test_the_index_knows_the_teachers_of_all_ranks():
    """Ranks would run different teachers, and wait for each other for ever."""
    samples = make_samples([(2, [3, 4]), (3, [5, 2, 6])])
    choices = {"pack_length": 16, "dp": 2, "num_mini_batches": 1, "multiple_of": 1, "share_prompts": False}
    plan = plan_step(samples, **choices)
    index, _ = to_slices(samples, plan, multiple_of=1, document_multiple_of=1)
    assert "teachers" not in index and "num_likeliest" not in index
    owners = [-1, 0, 1, 2, -1]
    taught = [dataclasses.replace(sample, teacher=teacher) for sample, teacher in zip(samples, owners, strict=True)]
    index, _ = to_slices(taught, plan, multiple_of=1, document_multiple_of=1)
    assert index["teachers"].tolist() == [owners[number] for number in index["samples"]]
    assert index["samples"].tolist() != sorted(index["samples"]) and "num_likeliest" not in index


def test_the_index_knows_which_branches_are_of_one_completion():
    """They lie in the packs of several ranks, and count as one completion in the loss."""
    samples = make_samples([(2, [3, 4]), (3, [5, 2, 6])])
    samples = [dataclasses.replace(sample, continues=number in (1, 3)) for number, sample in enumerate(samples)]
    choices = {"pack_length": 16, "dp": 2, "num_mini_batches": 1, "multiple_of": 1, "share_prompts": False}
    index, _ = to_slices(samples, plan_step(samples, **choices), multiple_of=1, document_multiple_of=1)
    assert sorted(zip(index["samples"].tolist(), index["completions"].tolist(), strict=True)) == [
        *((0, 0), (1, 0), (2, 1), (3, 1), (4, 2))
    ]


def bytes_of(samples, plan):
    _, (part,) = to_slices(samples, plan, multiple_of=1, document_multiple_of=1)
    return part.num_bytes


def test_a_response_token_takes_nine_bytes_and_a_shared_prompt_is_sent_once():
    """At 10^8 tokens a step each further byte is a tenth of a gigabyte through rank 0."""
    samples = make_samples([(50, [10, 20])])
    samples = [dataclasses.replace(sample, prompt_tokens=samples[0].prompt_tokens) for sample in samples]
    apart, shared = [[[[[0], [1]]]]], [[[[[0, 1]]]]]
    longer = [samples[0], make_samples([(50, [10, 1020])])[1]]
    longer[1] = dataclasses.replace(longer[1], prompt_tokens=samples[0].prompt_tokens)
    assert bytes_of(longer, apart) - bytes_of(samples, apart) == 9 * 1000
    prompt = np.ones(1050, np.int32)
    grown = [dataclasses.replace(sample, prompt_tokens=prompt) for sample in samples]
    for plan in (apart, shared):
        assert bytes_of(grown, plan) - bytes_of(samples, plan) == 4 * 1000
    # A second pass adds which documents it has, and no token.
    assert bytes_of(samples, apart * 2) - bytes_of(samples, apart) < 32


def test_a_token_between_turns_takes_four_bytes_and_a_bit():
    """It is an input only: nothing else about it is read."""
    (sample,) = make_samples([(50, [1000])])
    turns = dataclasses.replace(sample, is_sampled=np.arange(1000) < 400, loss_mask=np.arange(1000) < 400)
    assert bytes_of([turns], [[[[[0]]]]]) - bytes_of([sample], [[[[[0]]]]]) == 1000 // 8 - 5 * 600
    credited = dataclasses.replace(turns, token_advantages=np.ones(1000, np.float32))
    assert bytes_of([credited], [[[[[0]]]]]) - bytes_of([turns], [[[[[0]]]]]) == 4 * 400


def test_a_set_takes_four_bytes_a_token_and_nothing_where_there_is_none():
    """With top_k of 64 sets are most of what is sent; tokens between turns have none."""
    (sample,) = make_samples([(50, [1000])])
    sets = kept_tokens(*([[7, 8, 9]] * 400 + [[]] * 600))
    cut = dataclasses.replace(sample, kept=sets)
    assert bytes_of([cut], [[[[[0]]]]]) - bytes_of([sample], [[[[[0]]]]]) == 4 * 1000 + 4 * 3 * 400
    turns = {"is_sampled": np.arange(1000) < 400, "loss_mask": np.arange(1000) < 400}
    plain, cut = (dataclasses.replace(each, **turns) for each in (sample, cut))
    assert bytes_of([cut], [[[[[0]]]]]) - bytes_of([plain], [[[[[0]]]]]) == 4 * 400 + 4 * 3 * 400


def test_what_teachers_say_takes_bytes_only_where_they_do():
    """A run without teachers sends nothing for them; one with k likeliest tokens sends 4 + 8 k bytes a token of theirs."""
    (sample,) = make_samples([(50, [1000])])
    pair, plan = [sample, sample], [[[[[0], [1]]]]]
    plain, rng = bytes_of(pair, plan), np.random.default_rng(0)
    _, (part,) = to_slices(pair, plan, multiple_of=1, document_multiple_of=1)
    assert not any(part.counts[name] for name in part.counts if "teacher" in name or name in ("taught", "likeliest"))
    for k in (0, 4):
        taught = dataclasses.replace(sample, teacher=1, taught=teacher_scores(1000, k, rng))
        assert bytes_of([taught, sample], plan) - plain == 2 + (4 + 8 * k) * 1000
    hint = np.ones(70, np.int32)
    hinted = dataclasses.replace(sample, teacher=0, teacher_prompt=hint)
    assert bytes_of([dataclasses.replace(sample, teacher=0), sample], plan) - plain == 2
    # For each sample which prompt it is, and the shared prompt once, with its length.
    assert bytes_of([hinted, hinted], plan) - plain == 2 + 2 * 4 + 4 + 4 * 70


def test_mask_and_age_of_a_token_share_a_byte():
    """An age read as the mask would train what is masked; a sample without ages may lie beside one that has some."""
    aged, plain = make_samples([(3, [5, 7])])
    ages = np.array([0, 1, 2, 127, 64], np.uint8)
    samples = [dataclasses.replace(aged, ages=ages), dataclasses.replace(plain, ages=None)]
    index, (part,) = to_slices(samples, [[[[[0], [1]]]]], multiple_of=1, document_multiple_of=1)
    ((pack,),) = from_slice(index, part.filled())
    assert pack.ages.dtype == np.uint8 and pack.ages.tolist() == ages.tolist() + [0] * 7
    assert pack.loss_mask.tolist() == [*aged.loss_mask.tolist(), *plain.loss_mask.tolist()]


def test_a_slice_of_the_wrong_size_is_noticed():
    """Arrays cut from the wrong bytes are still arrays."""
    index, (part,) = to_slices(make_samples([(3, [5])]), [[[[[0]]]]], multiple_of=1, document_multiple_of=1)
    with pytest.raises(AssertionError, match="a slice of"):
        from_slice(index, part.filled()[:-1])
