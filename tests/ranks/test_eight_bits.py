"""Layers of Transformer Engine, whose kernels torch stands in for: as they are, and in 8 bits, against transformers."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from mgrpo.config.schema import Parallel
from mgrpo.rehearsal.eight_bits import package
from tests.ranks import cases
from tests.ranks.outcomes import joined
from tests.ranks.rank_pool import RankPool
from tests.ranks.test_layouts import LOSS, check, oracle
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.learners

SAMPLES = cases.random_samples(seed=0)
WIDE = {"intermediate_size": 128}
ENGINE = {"transformer_impl": "transformer_engine"}
LAYOUTS = {
    "alone": {},
    "tp2": {"tensor": 2},
    "tp2+sp": {"tensor": 2, "sequence_parallel": True},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {},
}
EXPERT_LAYOUTS = {
    "alone": {},
    "ep2": {"expert": 2},
    "ep2+tp2+sp": {"expert": 2, "tensor": 2, "sequence_parallel": True},
    "tp2+sp, of each expert a half": {"tensor": 2, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def run_te():
    """As `run_ranks`, on ranks that find Transformer Engine."""
    pools: dict[int, RankPool] = {}

    def run(world_size: int, function, **arguments):
        if world_size not in pools or not pools[world_size].is_usable:
            pools[world_size] = RankPool(world_size, first=package.install)
        return pools[world_size].start(function, **arguments).results()

    yield run
    for pool in pools.values():
        if pool.is_alive:
            pool.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "qwen2": save_tiny(folder, "qwen2", **WIDE),
        "olmo2": save_tiny(folder, "olmo2", **WIDE),
        "qwen3_moe": save_tiny(folder, "qwen3_moe", moe_intermediate_size=64, **WIDE),
    }


@pytest.fixture(scope="module")
def truth(models):
    return {name: oracle(folder, SAMPLES, LOSS) for name, folder in models.items()}


def run(run_te, models, name, layout, settings, **options):
    world_size = 1 if layout == "alone" else 2
    own = (EXPERT_LAYOUTS if name.endswith("moe") else LAYOUTS)[layout]
    arguments = {"model_dir": str(models[name]), "layout": own, "samples": SAMPLES, "loss": LOSS, "pack_length": 64}
    return run_te(world_size, cases.gradients, settings=ENGINE | settings, **arguments, **options)


CASES = [(name, layout) for name in ("qwen2", "olmo2") for layout in LAYOUTS] + [
    ("qwen3_moe", layout) for layout in EXPERT_LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_its_layers_are_the_models(run_te, models, truth, name, layout):
    """Megatron's wrappers get the weights, the norm before a product is in it, and every gradient is summed once."""
    check(run(run_te, models, name, layout, {}), truth[name])


RECIPES = ("tensorwise", "blockwise", "mxfp8")


@pytest.fixture(scope="module")
def alone_in_8_bits(run_te, models):
    """What one rank finds, by model, recipe and format: computed once."""
    return functools.cache(lambda name, recipe, fp8="hybrid": in_8_bits(run_te, models, name, "alone", recipe, fp8))


def in_8_bits(run_te, models, name, layout, recipe, fp8="hybrid", **settings):
    """As `run`, for packs of whole blocks."""
    world_size = 1 if layout == "alone" else 2
    own = (EXPERT_LAYOUTS if name.endswith("moe") else LAYOUTS)[layout] | {"tokens_multiple_of": 32}
    arguments = {"model_dir": str(models[name]), "layout": own, "samples": SAMPLES, "loss": LOSS, "pack_length": 64}
    settings = ENGINE | {"fp8": fp8, "fp8_recipe": recipe} | settings
    return run_te(world_size, cases.gradients, settings=settings, **arguments)


def whole_gradients(ranks, truth):
    """Every gradient as one vector, and the right one, both float64."""
    found = joined(ranks, "gradients", {name: own.shape for name, own in truth.gradients.items()})
    return tuple(np.concatenate([own[name].ravel() for name in sorted(found)]) for own in (found, truth.gradients))


def apart(found, exact):
    """The length of the difference in lengths of `exact`."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("fp8", ["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_gradients_in_8_bits_point_where_exact_ones_do(alone_in_8_bits, truth, name, recipe, fp8):
    """On random weights, which add up errors more than trained ones (docs/precision.md); experts are chosen anew by each."""
    found, exact = whole_gradients(alone_in_8_bits(name, recipe, fp8), truth[name])
    cosine = found @ exact / np.linalg.norm(found) / np.linalg.norm(exact)
    assert 0.1 < apart(found, exact) < 0.45 and cosine > 0.92


REPEATED = {
    "full": {"recompute_granularity": "full"},
    "parts": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "moe")},
}


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [
        ("qwen2", "alone", REPEATED["full"]),
        ("qwen2", "pp2", {}),
        ("qwen2", "tp2+sp", REPEATED["parts"]),
        ("qwen3_moe", "alone", REPEATED["parts"]),
        ("qwen3_moe", "ep2", REPEATED["full"]),
        ("qwen3_moe", "ep2+tp2+sp", REPEATED["parts"]),
        ("qwen3_moe", "tp2+sp, of each expert a half", {}),
    ],
)
def test_gradients_in_8_bits_do_not_depend_on_the_layout(
    run_te, models, alone_in_8_bits, truth, name, layout, settings
):
    """With blocks that no layout cuts every rank rounds the same numbers: all but the order of sums is as on one."""
    alone, exact = whole_gradients(alone_in_8_bits(name, "mxfp8"), truth[name])
    found, _ = whole_gradients(in_8_bits(run_te, models, name, layout, "mxfp8", **settings), truth[name])
    # A sum in another order may round a number the other way.
    assert apart(found, alone) < 0.1 * apart(alone, exact)


def experts_in_8_bits(model_dir: str, recipe: str, rows_per_expert: list[int]) -> dict[str, float]:
    """By how much a layer of experts differs from products of its rounded matrices, one by one."""
    import torch
    import torch.nn.functional as F
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mgrpo.config.schema import Parallel
    from mgrpo.models.family import shape_of
    from mgrpo.models.hf_config import read_hf_config
    from mgrpo.parallel.moe.eight_bit_experts import EightBitExperts
    from mgrpo.policy.layers.architecture import transformer_config
    from mgrpo.rehearsal.eight_bits.multiplied import Product, copies, product
    from mgrpo.rehearsal.eight_bits.rounding import Rounding

    policy = cases.make_policy(model_dir, {})
    settings = Parallel(**ENGINE, fp8="hybrid", fp8_recipe=recipe)
    config = transformer_config(shape_of(read_hf_config(model_dir)), policy.layout, torch.float32, settings)
    experts = EightBitExperts(len(rows_per_expert), config, ProcessGroupCollection.use_mpu_process_groups())
    draw = torch.Generator().manual_seed(3)
    for weight in experts.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=draw) / 8)
    assert [name for name, _ in experts.named_parameters()] == ["linear_fc1.weight", "linear_fc2.weight"]
    rows = torch.randn(sum(rows_per_expert), config.hidden_size, generator=draw)
    weights, upstream = torch.rand(len(rows), generator=draw), torch.randn(rows.shape, generator=draw)
    leaves = [rows, weights, *(own.detach() for own in experts.parameters())]
    rows.requires_grad_()
    weights.requires_grad_()
    with get_fp8_context(config):
        output, _ = experts(rows, torch.tensor(rows_per_expert), weights)
    gradients = torch.autograd.grad(output, [rows, weights, *experts.parameters()], upstream)
    found = dict(zip(("output", "rows", "weights", "fc1", "fc2"), [output.detach(), *gradients], strict=True))

    rounding, unit = Rounding(name=recipe), 32
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    first, second = own[2].unflatten(0, (len(rows_per_expert), -1)), own[3].unflatten(0, (len(rows_per_expert), -1))
    results, start = [], 0
    for expert, count in enumerate(rows_per_expert):
        padding = -count % unit
        part = F.pad(own[0][start : start + count], (0, 0, 0, padding))
        by = F.pad(own[1][start : start + count], (0, padding))

        def times(x, matrix):
            return product(
                Product(rounding=rounding, splits=(len(x),)), [matrix], [copies(matrix.detach(), rounding)], x
            )

        if count:
            gate, up = times(part, first[expert].contiguous()).chunk(2, -1)
            results.append(times(F.silu(gate) * up * by[:, None], second[expert].contiguous())[:count])
        start += count
    result = torch.cat(results)
    expected = [result.detach(), *torch.autograd.grad(result, own, upstream)]
    return {
        name: float((mine - theirs).abs().amax() / theirs.abs().amax())
        for (name, mine), theirs in zip(found.items(), expected, strict=True)
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_round_their_own_rows_and_matrices(run_te, models, recipe):
    """A scale of a neighbour's, or padding that is not taken off again, trains another model; one expert has no rows."""
    (found,) = run_te(
        1, experts_in_8_bits, model_dir=str(models["qwen3_moe"]), recipe=recipe, rows_per_expert=[7, 0, 40, 32]
    )
    assert set(found) == {"output", "rows", "weights", "fc1", "fc2"}
    # A sum in another order may round a number of the second product the other way.
    assert all(math.isfinite(each) and each < 2e-3 for each in found.values()), found


def scores_after_an_update(model_dir: str, layout: dict, folder: str) -> bool:
    """Whether the policy scores after a step what one that is built anew from its weights scores."""
    import torch

    from mgrpo.config.schema import Optimizer
    from mgrpo.model_io.hf_export import export_hf

    settings = ENGINE | {"fp8": "hybrid"}
    policy = cases.make_policy(model_dir, layout, settings=settings)
    policy.prepare_training(Optimizer(learning_rate=1e-2), num_optimizer_steps=2)
    packs, _ = cases.own_packs(policy, SAMPLES, share_prompts=True, pack_length=64)

    def scores(of):
        batches = of.microbatches(packs)
        of.score(batches, "old")
        return torch.cat([batch.logprobs["old"] for batch in batches])

    before = scores(policy)
    policy.train_step(policy.microbatches(packs), lambda logprobs, entropy, batch: (-logprobs.sum() / 1e3, None))
    after = scores(policy)
    export_hf(policy, model_dir, folder, group=cases.host_group())
    again = scores(cases.make_policy(folder, layout, settings=settings))
    assert (before - after).abs().max() > 1e-2
    return torch.equal(after, again)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_weights_are_rounded_again_after_an_update(run_te, models, tmp_path, name):
    """Rounded copies are kept from micro-batch to micro-batch; beside them there is no state that a checkpoint could lack."""
    arguments = {"model_dir": str(models[name]), "layout": {"tokens_multiple_of": 16}}
    assert run_te(1, scores_after_an_update, folder=str(tmp_path / "trained"), **arguments) == [True]


def overlapped(**arguments):
    """`cases.gradients`, and what buffers were made for."""
    cases.forget_groups()
    package.Userbuffers.rows = None
    return cases.gradients(**arguments) | {"buffers": package.Userbuffers.arguments}


@pytest.mark.parametrize(("name", "fp8"), [("qwen2", "none"), ("qwen2", "hybrid"), ("qwen3_moe", "none")])
def test_buffers_of_one_size_take_every_pack(run_te, models, truth, name, fp8):
    """Packs differ in length until they are padded; a pack of another length than the buffers would end the first step."""
    settings = ENGINE | {"tp_comm_overlap": True, "fp8": fp8, "pack_length": 60}
    parallel = Parallel(tensor_model_parallel_size=2, **settings)
    layout = {"tensor": 2, "sequence_parallel": True, "tokens_multiple_of": parallel.tokens_multiple_of}
    arguments = {"model_dir": str(models[name]), "samples": SAMPLES, "loss": LOSS, "pack_length": 60}
    ranks = run_te(2, overlapped, layout=layout, settings=settings, **arguments)
    mode = package.UserBufferQuantizationMode.NONE if fp8 == "none" else package.UserBufferQuantizationMode.FP8
    length = 60 if fp8 == "none" else 64
    for rank in ranks:
        assert rank["buffers"] == {"shape": [length, 64], "tp_size": 2, "modes": [mode], "backend": "nccl"}
    if fp8 == "none":
        check(ranks, truth[name])
        with pytest.raises(AssertionError, match="rows in buffers for 60"):
            run_te(2, overlapped, layout=layout | {"tokens_multiple_of": 1}, settings=settings, **arguments)
