"""Logprobs over kept sets against a masked softmax in float64: both heads, values and gradients, shards, bad sets."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from kept_cases import GRAD_TOLERANCE, VALUE_TOLERANCE, Problem, make_problem, make_sets
from logprob_cases import relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mgrpo.ops
from mgrpo.ops import KeptSets, linear_logprobs, reference, token_logprobs
from mgrpo.ops.kept_tokens import WIDE_ENTRIES, picked_logits

HEADS = ("logits", "linear")
DTYPES = tuple(VALUE_TOLERANCE)
IMPLEMENTATIONS = (reference, *([torch.ops.mgrpo] if mgrpo.ops.build_info()["compiled"] else []))


def check_against_float64(problem: Problem) -> None:
    dtype = problem.operands[0].dtype
    results, expected = problem.run(), problem.oracle()
    assert [x.dtype for x in results] == [torch.float32] * 2 + [dtype] * len(problem.operands)
    for got, want in zip(results[:2], expected[:2], strict=True):
        assert relative_error(got, want) < VALUE_TOLERANCE[dtype]
    for got, want in zip(results[2:], expected[2:], strict=True):
        assert relative_error(got, want) < GRAD_TOLERANCE[dtype]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 7, 64, 1003])
def test_values_and_gradients_equal_a_masked_softmax(head: str, dtype: torch.dtype, cols: int) -> None:
    """A ratio is of two probabilities over the tokens that could be sampled: one over others is another policy's."""
    check_against_float64(make_problem(head, dtype=dtype, cols=cols))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_float32_are_not_rounded_to_the_type_of_their_factors(dtype: torch.dtype) -> None:
    """Rounding of a logit is the largest difference between trainer and engine; more entries than fit in one piece."""
    n = WIDE_ENTRIES // 10
    problem = make_problem("linear", n=n, dtype=dtype, sizes=torch.randint(10, 20, (n,)))
    results, expected = problem.run(fp32_logits=True), problem.oracle()
    for got, want in zip(results[:2], expected[:2], strict=True):
        assert relative_error(got, want) < VALUE_TOLERANCE[torch.float32]
    for got, want in zip(results[2:], expected[2:], strict=True):
        assert relative_error(got, want) < GRAD_TOLERANCE[dtype]


@pytest.mark.parametrize("head", HEADS)
def test_random_sets_of_any_size_equal_a_masked_softmax(head: str) -> None:
    """top_p leaves one token here and hundreds there; offsets off by one would move sets to their neighbours."""
    for seed in range(40):
        torch.manual_seed(seed)
        n, cols = int(torch.randint(0, 9, ())), int(torch.randint(1, 90, ()))
        problem = make_problem(head, n=n, cols=cols, padding=seed % 3, sizes=torch.randint(1, cols + 1, (n,)))
        if seed % 2:
            problem = dataclasses.replace(problem, temperature=0.7)
        check_against_float64(problem)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_set_of_one_token_is_certain(head: str, dtype: torch.dtype) -> None:
    """Half of all sets are: rounding there would be a ratio where there was no choice."""
    for result in make_problem(head, dtype=dtype, sizes=torch.ones(11).int()).run():
        assert result.count_nonzero() == 0


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sets_of_the_whole_vocabulary_change_nothing(head: str, dtype: torch.dtype) -> None:
    """Where sampling cut nothing off, the step is the one without sets."""
    problem = make_problem(head, dtype=dtype, sizes=torch.full((11,), 203))
    uncut = dataclasses.replace(problem, kept=None)
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for got, expected in zip(problem.run(), uncut.run(), strict=True):
        assert relative_error(got, expected.double()) < tolerance


@pytest.mark.parametrize("head", HEADS)
def test_order_within_a_set_does_not_matter(head: str) -> None:
    """An engine returns them by rank, another by id."""
    problem = make_problem(head)
    pairs = problem.kept.entry_targets() * 1000 + problem.kept.ids
    in_order = problem.kept._replace(ids=problem.kept.ids[pairs.argsort()])
    assert not torch.equal(in_order.ids, problem.kept.ids)
    for got, expected in zip(problem.run(kept=in_order), problem.run(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_equals_a_new_buffer_bitwise(dtype: torch.dtype) -> None:
    """In place saves memory; it must not be another training run."""
    problem = make_problem("logits", dtype=dtype)
    for got, expected in zip(problem.run(inplace=True), problem.run(), strict=True):
        assert torch.equal(got, expected)


def test_in_place_gradient_lives_in_the_logits_and_is_taken_once() -> None:
    """The memory plan counts on one buffer; a producer or a second backward that reads it must hear of it."""
    problem = make_problem("logits")
    leaf = problem.operands[0].requires_grad_()
    options = {"rows": problem.rows, "valid_cols": problem.valid_cols, "kept": problem.kept, "inplace": True}
    logits, seen = leaf * 1, []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    loss = token_logprobs(logits, problem.targets, **options)[0].sum()
    loss.backward(retain_graph=True)
    assert seen == [logits.data_ptr()]
    with pytest.raises(RuntimeError, match=r"second backward.*use inplace=False"):
        loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        token_logprobs(torch.tanh(leaf), problem.targets, **options)[0].sum().backward()


def test_logits_outside_the_sets_are_never_read_and_get_no_gradient() -> None:
    """What sampling cut off has no part in the step, also when it overflowed."""
    problem = make_problem("logits")
    is_kept = torch.zeros_like(problem.operands[0], dtype=torch.bool)
    is_kept[problem.rows[problem.kept.entry_targets()], problem.kept.ids.long()] = True
    poisoned = dataclasses.replace(problem, operands=(problem.operands[0].masked_fill(~is_kept, torch.nan),))
    for got, expected in zip(poisoned.run(), problem.run(), strict=True):
        assert torch.equal(got, expected)
    assert poisoned.run()[2][~is_kept].count_nonzero() == 0


def test_nan_in_a_set_shows_and_rows_without_cotangent_are_zero() -> None:
    """The trainer skips a step whose loss is not finite; but tokens outside the loss mask do not matter."""
    logits = torch.randn(4, 9)
    logits[1, 3], logits[2, 3] = torch.nan, torch.inf
    logits.requires_grad_()
    kept = KeptSets(torch.tensor([3, 0] * 4).int(), torch.tensor([0, 2, 4, 6, 8]).int())
    logprobs, entropy = token_logprobs(logits, torch.zeros(4).long(), kept=kept, with_entropy=True)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, True, False]
    (grad,) = torch.autograd.grad((logprobs[0], entropy[3]), logits)
    assert grad.isfinite().all() and grad[[0, 3]].count_nonzero() == 4 and grad[[1, 2]].count_nonzero() == 0


@pytest.mark.parametrize("head", HEADS)
def test_gradient_is_the_derivative_of_the_forward(head: str) -> None:
    """Finite differences in float64 know nothing of the formulas, or of who needs which gradient."""
    sizes = torch.tensor([3, 1, 11, 6])
    problem = make_problem(head, n=4, cols=11, padding=0, sizes=sizes)
    leaves = [x.double().requires_grad_() for x in problem.operands]
    options = {"temperature": problem.temperature, "kept": problem.kept, "with_entropy": True}

    def call(*operands: Tensor) -> tuple[Tensor, Tensor]:
        if head == "logits":
            # token_logprobs takes no float64; its parts do.
            values = picked_logits(operands[0], problem.rows, problem.kept, vocab_start=0, valid_cols=11, inplace=False)
            return mgrpo.ops.kept_tokens.kept_logprobs(
                values, problem.kept, problem.targets, None, 1 / problem.temperature.double(), None, True
            )
        return linear_logprobs(*operands, problem.targets, logits_chunk=4, **options)

    assert torch.autograd.gradcheck(call, leaves)
    if head == "linear":
        assert torch.autograd.gradcheck(call, (leaves[0].detach(), leaves[1]))
        assert torch.autograd.gradcheck(call, (leaves[0], leaves[1].detach()))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("used", ["logprobs", "entropy"])
def test_one_result_alone_has_its_gradient(head: str, used: str) -> None:
    """Entropy is often only a metric, and a bonus may be the only term of a loss."""
    unused = {"logprobs": "g_entropy", "entropy": "g_logprobs"}[used]
    problem = dataclasses.replace(make_problem(head), **{unused: torch.zeros(11)})
    leaves = [x.clone().requires_grad_() for x in problem.operands]
    options = {"temperature": problem.temperature, "valid_cols": problem.valid_cols, "kept": problem.kept}
    with_entropy = used == "entropy"
    if head == "logits":
        results = token_logprobs(*leaves, problem.targets, rows=problem.rows, with_entropy=with_entropy, **options)
    else:
        results = linear_logprobs(*leaves, problem.targets, logits_chunk=64, with_entropy=with_entropy, **options)
    assert (results[1] is None) != with_entropy
    loss = (results[int(with_entropy)] * getattr(problem, f"g_{used}")).sum()
    for got, expected in zip(torch.autograd.grad(loss, leaves), problem.oracle()[2:], strict=True):
        assert relative_error(got, expected) < GRAD_TOLERANCE[torch.float32]


# Also shards that hold hardly any id of any set, or none.
@pytest.mark.parametrize("cuts", [(0, 208), (0, 100, 208), (0, 50, 100, 203, 208), (0, 2, 3, 205, 208)])
def test_vocabulary_shards_merge_to_the_whole(cuts: tuple[int, ...]) -> None:
    """Tensor parallelism must not change a step; a shard may hold none of a set, or nothing but padding."""
    problem = make_problem("logits")
    expected_logprobs, expected_entropy, expected_grad = problem.oracle()
    inv_temp = 1 / problem.temperature
    (logits,), kept, targets = problem.operands, problem.kept, problem.targets
    for op in IMPLEMENTATIONS:
        shards = [logits[:, a:b].clone().requires_grad_() for a, b in itertools.pairwise(cuts)]
        values = [
            picked_logits(x, problem.rows, kept, vocab_start=a, valid_cols=max(0, min(b, 203) - a), inplace=False)
            for x, (a, b) in zip(shards, itertools.pairwise(cuts), strict=True)
        ]
        parts = [op.kept_stats(v.detach(), *kept, targets, inv_temp, True) for v in values]
        logprobs, entropy, merged = op.logprob_merge(torch.stack(parts), inv_temp)
        assert relative_error(logprobs, expected_logprobs) < VALUE_TOLERANCE[torch.float32]
        assert relative_error(entropy, expected_entropy) < VALUE_TOLERANCE[torch.float32]
        grads = []
        for x, v in zip(shards, values, strict=True):
            dv = op.kept_grad(v.detach(), *kept, targets, inv_temp, merged, problem.g_logprobs, problem.g_entropy)
            grads.append(torch.autograd.grad(v, x, dv)[0])
        assert relative_error(torch.cat(grads, 1), expected_grad) < GRAD_TOLERANCE[torch.float32]


@pytest.mark.parametrize("head", HEADS)
def test_results_repeat_bitwise_and_do_not_depend_on_threads(head: str) -> None:
    """Exact resume needs the same numbers from the same inputs, on any number of threads; many sets share tokens."""
    problem = make_problem(head, n=2000, cols=50, sizes=torch.randint(1, 20, (2000,)))
    first = problem.run()
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert all(torch.equal(a, b) for a, b in zip(problem.run(), first, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_a_head_without_logits_computes_only_those_of_the_sets() -> None:
    """It is the point of sets: work and memory of eight dot products a token, not of a vocabulary."""
    n, vocab = 64, 4096
    hidden, weight = torch.randn(n, 8).requires_grad_(), torch.randn(vocab, 8).requires_grad_()
    targets = torch.randint(0, vocab, (n,))
    kept = make_sets(targets, torch.full((n,), 8), vocab)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes = [x.untyped_storage().nbytes() // 4 for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.numel = max(self.numel, *sizes, 0)
            return result

    with Largest() as forward:
        logprobs, entropy = linear_logprobs(hidden, weight, targets, kept=kept, with_entropy=True, logits_chunk=vocab)
    assert forward.numel <= 2 * kept.ids.numel()  # int64 columns
    with Largest() as backward:
        (logprobs.sum() + entropy.sum()).backward()
    assert backward.numel <= weight.numel()


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("head", HEADS)
def test_compiled_graph_equals_eager(compiled: None, head: str) -> None:
    """The op must not break a compiled loss into pieces, and its gradient must be the same to the bit."""
    problem = make_problem(head)
    options = {"temperature": problem.temperature, "valid_cols": problem.valid_cols, "with_entropy": True}

    def score(*operands: Tensor) -> tuple[Tensor, Tensor | None]:
        if head == "logits":
            return token_logprobs(*operands, problem.targets, rows=problem.rows, kept=problem.kept, **options)
        return linear_logprobs(*operands, problem.targets, kept=problem.kept, logits_chunk=64, **options)

    torch.compiler.reset()
    leaves = [x.clone().requires_grad_() for x in problem.operands]
    results = torch.compile(score, fullgraph=True, backend="aot_eager")(*leaves)
    grads = torch.autograd.grad(problem.loss(*results), leaves)
    for got, expected in zip((*results, *grads), problem.run(), strict=True):
        assert torch.equal(got, expected)


Y = torch.arange(4)
KEPT = KeptSets(torch.tensor([0, 9, 1, 5, 2, 3, 7]).int(), torch.tensor([0, 2, 4, 5, 7]).int())


def changed(entry: int, token: int) -> KeptSets:
    return KEPT._replace(ids=KEPT.ids.index_fill(0, torch.tensor(entry), token))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (changed(1, 10), r"kept set 0 holds token 10, expected ids in \[0, 10\); pass group when"),
        (changed(3, -1), r"kept set 1 holds token -1, expected ids in \[0, 10\)"),
        (changed(6, 3), "kept set 3 holds token 3 twice, expected each token once"),
        (changed(4, 8), "kept set 2 does not hold target 2, though it was sampled from that set"),
        (KEPT._replace(offsets=KEPT.offsets[:4]), r"kept.offsets is \[4\] torch.int32, expected \[5\] torch.int32"),
        (KEPT._replace(offsets=KEPT.offsets.long()), r"kept.offsets is \[5\] torch.int64, expected \[5\] torch.int32"),
        (KEPT._replace(offsets=KEPT.offsets + 1), "kept.offsets reach from 1 to 8, expected .* from 0 to 7"),
        (KEPT._replace(offsets=torch.tensor([0, 5, 4, 5, 7]).int()), "kept.offsets .* never decrease"),
        (KEPT._replace(ids=KEPT.ids.long()), r"kept.ids is \[7\] torch.int64, expected \[m\] torch.int32"),
        (KEPT._replace(ids=KEPT.ids.to("meta")), "kept.ids is on meta, targets are on cpu"),
    ],
)
def test_bad_sets_are_refused_with_a_reason(head: str, kept: KeptSets, message: str) -> None:
    """Sets of other tokens, shifted by one, would train on another policy without a word."""
    with pytest.raises(ValueError, match=message):
        if head == "logits":
            token_logprobs(torch.randn(4, 12), Y, valid_cols=10, kept=kept)
        else:
            linear_logprobs(torch.randn(4, 3), torch.randn(12, 3), Y, valid_cols=10, kept=kept, logits_chunk=4)


def test_a_target_outside_its_set_is_minus_infinity_in_the_ops() -> None:
    """Where nobody checks, on a GPU or over shards, it must not become a plausible number."""
    values, sets = torch.randn(7), (*changed(4, 8), Y)
    for op in IMPLEMENTATIONS:
        logprobs = op.logprob_merge(op.kept_stats(values, *sets, torch.ones(1), False)[None], torch.ones(1))[0]
        assert logprobs.isfinite().tolist() == [True, True, False, True] and logprobs[2] == -torch.inf


def raw_arguments() -> tuple[tuple, tuple]:
    """Arguments of kept_stats without the last, and those of kept_grad after them; some values of another shard."""
    problem = make_problem("logits", sizes=torch.arange(1, 12))
    values, rest = torch.randn(66), (*problem.kept, problem.targets, 1 / problem.temperature)
    merged = reference.logprob_merge(reference.kept_stats(values, *rest, True)[None], rest[-1])[2]
    values[::5] = -torch.inf
    return (values, *rest), (merged, problem.g_logprobs, problem.g_entropy)


def test_compiled_ops_equal_the_reference_and_pass_opcheck(compiled: None) -> None:
    """A run on a machine without a compiler must be the same run; a wrong fake is a wrong graph under torch.compile."""
    sets, rest = raw_arguments()
    op = torch.ops.mgrpo
    for arguments in ((*sets, True), (*sets, False)):
        torch.library.opcheck(op.kept_stats.default, arguments)
        torch.testing.assert_close(op.kept_stats(*arguments), reference.kept_stats(*arguments))
    for arguments in ((*sets, *rest), (*sets, *rest[:2], None)):
        torch.library.opcheck(op.kept_grad.default, arguments)
        torch.testing.assert_close(op.kept_grad(*arguments), reference.kept_grad(*arguments))


def test_raw_ops_refuse_what_would_read_foreign_memory(compiled: None) -> None:
    """No caller should pass wrong shapes, but it must not end in a crash or in garbage."""
    (values, ids, offsets, targets, inv_temp), rest = raw_arguments()
    op = torch.ops.mgrpo
    for wrong, message in (
        ((values[:-1], ids, offsets, targets, inv_temp), "ids must have 65 elements, got 66"),
        ((values, ids.long(), offsets, targets, inv_temp), "ids has the wrong dtype"),
        ((values, ids, offsets[:-1], targets, inv_temp), "offsets must have 12 elements, got 11"),
        ((values, ids, offsets + 1, targets, inv_temp), "offsets must reach from 0 to 66, got 1 to 67"),
        ((values, ids, torch.full_like(offsets, 66), targets, inv_temp), "offsets must reach"),
        ((values, ids, offsets, targets, inv_temp[:3]), "inv_temp must have 1 or 11 elements, got 3"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op.kept_stats(*wrong, True)
        with pytest.raises(RuntimeError, match=message):
            op.kept_grad(*wrong, *rest)
    with pytest.raises(RuntimeError, match="g_logprob must have 11 elements, got 10"):
        op.kept_grad(values, ids, offsets, targets, inv_temp, rest[0], rest[1][1:], None)
