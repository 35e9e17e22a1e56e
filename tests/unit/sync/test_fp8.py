"""Weights in fp8: how far they are from what was trained, and that parts on several ranks give the bytes of the whole."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from mgrpo.layout import InferLayout, Layout
from mgrpo.models.family import shape_of
from mgrpo.models.table import Box, engine_boxes, hf_tensors, training_boxes
from mgrpo.sync import fp8
from mgrpo.sync.digest import digest
from mgrpo.sync.fp8_blocks import cut, is_quantised, scale_box, scale_shape, shared_blocks, wire_bytes
from mgrpo.sync.plan import plan
from tests.unit.models.test_table import MODELS
from tests.unit.sync.ends import sharded_holdings, shipped, view

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "model"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Magnitudes that differ by block, as those of trained matrices do by row and column."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * torch.exp(torch.randn(shape[0], 1, generator=generator))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("shape", [(256, 384), (300, 129), (1, 1), (127, 128), (5, 1000)])
@pytest.mark.parametrize("block", [fp8.WEIGHT, fp8.ACTIVATION])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_is_within_half_a_step_of_its_block(shape, block, dtype):
    """Against float64, element by element: a scale of another block, or a cut-off edge, is off by far more."""
    values = random(*shape).to(dtype)
    scale = fp8.scales(fp8.maxima(values, block=block))
    assert tuple(scale.shape) == tuple(-(-n // side) for n, side in zip(shape, block, strict=True))
    if block == fp8.WEIGHT:
        assert tuple(scale.shape) == scale_shape(shape)
    quantised = fp8.quantised(values, scale, block=block)
    assert quantised.dtype == torch.float8_e4m3fn and quantised.shape == values.shape
    back, exact = fp8.dequantised(quantised, scale, block=block).double(), values.double()
    for row, column in itertools.product(range(0, shape[0], block[0]), range(0, shape[1], block[1])):
        part = (slice(row, row + block[0]), slice(column, column + block[1]))
        step = exact[part].abs().max() / 448
        bound = torch.maximum(exact[part].abs() / 16, step / 1024) * (1 + 1e-6)
        assert ((back[part] - exact[part]).abs() <= bound).all()
        assert quantised[part].float().abs().max() == 448, "the whole range is used"


def test_a_slice_is_quantised_with_the_scales_of_its_place():
    """One that begins inside a block has that block's scale up to the block's end, not for a whole block's width."""
    values = random(300, 300)
    scale = fp8.scales(fp8.maxima(values))
    whole = fp8.quantised(values, scale)
    own = fp8.quantised(values[100:290, 130:], scale[:, 1:], start=(100, 130))
    assert same(own, whole[100:290, 130:])
    back = fp8.dequantised(own, scale[:, 1:], start=(100, 130))
    assert torch.equal(back, fp8.dequantised(whole, scale)[100:290, 130:])
    assert torch.equal(fp8.maxima(values[100:, 130:], start=(100, 130))[1:, 1:], fp8.maxima(values)[1:, 2:])


def test_blocks_of_zeros_and_of_the_least_numbers_stay_what_they_are():
    """A scale of 0 would make them NaN; so would 448 divided by a number that underflows."""
    values = torch.zeros(128, 384)
    values[:, 128:256], values[3, 300] = 1e-44, -1e-38
    back = fp8.rounded(values)
    assert (back[:, :128] == 0).all() and back.isfinite().all()
    assert (back - values).abs().max() < 1e-39


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_its_whole_block_and_no_other(bad):
    """Hidden in one element it would be found nowhere; and a maximum over ranks may lose a NaN, but no infinity."""
    values = random(256, 256)
    values[130, 5] = bad
    assert fp8.maxima(values)[1, 0] == torch.inf
    back = fp8.rounded(values)
    assert back[128:, :128].isnan().all()
    back[128:, :128] = 0
    assert back.isfinite().all()


def test_the_largest_value_does_not_become_nan():
    """e4m3fn has no infinity: what rounding lifts above 448 would be a NaN."""
    for seed in range(200):
        values = random(8, 128, seed=seed) * 10.0 ** (seed % 60 - 30)
        assert fp8.rounded(values, block=fp8.ACTIVATION).isfinite().all()


def test_only_the_matrices_of_layers_are_quantised():
    """A router or a norm in fp8 changes which experts are chosen, and the head every logit."""
    for hf in MODELS.values():
        for name, shape in hf_tensors(shape_of(hf)).items():
            stays = len(shape) == 1 or name.split(".")[-2] in ("embed_tokens", "lm_head", "gate")
            assert is_quantised(name) != stays, name
    assert is_quantised("model.layers.0.block_sparse_moe.experts.3.w2.weight")
    assert not any(map(is_quantised, ("model.layers.0.self_attn.q_proj.bias", "lm_head.weight", "w1", "weight")))


def test_a_cut_covers_a_box_once_by_whole_blocks_and_rims():
    """What lies between is quantised without asking another rank."""
    for box in (
        Box("w", (3, 0), (20, 16)),
        Box("w", (8, 9), (3, 5)),
        Box("w", (0, 8), (24, 8)),
        Box("w", (7, 7), (2, 2)),
    ):
        parts = list(cut(box, block=8))
        assert len(parts) <= 9 and sum(part.size for part in parts) == box.size
        for one, other in itertools.combinations(parts, 2):
            assert one.intersect(other) is None
        for part in parts:
            assert part.intersect(box) == part
            sides = zip(part.start, part.shape, strict=True)
            assert all((first % 8 == 0 and n % 8 == 0) or first // 8 == (first + n - 1) // 8 for first, n in sides)


PAIRS = [
    (Layout(world_size=1), InferLayout()),
    (Layout(world_size=4, tensor=4), InferLayout(tensor=2)),
    (Layout(world_size=8, tensor=4, pipeline=2), InferLayout(engines=2)),
    (Layout(world_size=8, tensor=2, expert=4, sequence_parallel=True), InferLayout(tensor=4)),
    (Layout(world_size=4, zero_stage=3), InferLayout(engines=2, tensor=2)),
]


@pytest.mark.parametrize(("train", "infer"), PAIRS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_all_ranks_are_the_bytes_of_the_whole(name, train, infer):
    """An engine then holds what one rank with the whole model would have quantised, whatever the two layouts are.

    Blocks are small, so that tensor ranks cut them; the maxima of shared blocks are agreed by a maximum over the ranks listed.
    """
    model, block = shape_of(MODELS[name]), 12
    sides = (block, block)
    if train.expert > 1 and not any(map(model.experts_of, range(model.num_layers))):
        pytest.skip("a model without experts")
    shapes = {tensor: shape for tensor, shape in hf_tensors(model).items() if is_quantised(tensor)}
    whole = {tensor: random(*shape, seed=number) for number, (tensor, shape) in enumerate(shapes.items())}
    scale = {tensor: fp8.scales(fp8.maxima(values, block=sides)) for tensor, values in whole.items()}
    expected = {tensor: fp8.quantised(values, scale[tensor], block=sides) for tensor, values in whole.items()}
    sources = sharded_holdings(model, train) if train.zero_stage == 3 else training_boxes(model, train)

    shared = shared_blocks(sources, shapes, block=block)
    assert train.tensor == 1 or any(len(ranks) > 1 for ranks in shared.values())
    known: list[dict[str, torch.Tensor]] = []
    for boxes in sources:
        own = {tensor: torch.zeros_like(values) for tensor, values in scale.items()}
        for box in (box for box in boxes if is_quantised(box.name)):
            region = scale_box(box, block=block).within(_all(scale[box.name]))
            part = fp8.maxima(view(whole, box), start=box.start, block=sides)
            own[box.name][region] = torch.maximum(own[box.name][region], part)
        known.append(own)
    for place, ranks in shared.items():
        tensor, (row, column) = place.name.removesuffix("_scale_inv"), place.start
        agreed = max(known[rank][tensor][row, column] for rank in ranks)
        for rank in ranks:
            known[rank][tensor][row, column] = agreed

    made = plan(model, train, infer, holdings=sources)
    for worker, incoming in enumerate(made.received_by):
        sums = dict.fromkeys(shapes, torch.zeros((), dtype=torch.int64))
        for source, box in ((source, box) for source, boxes in incoming.items() for box in boxes):
            for part in cut(box, block=block) if is_quantised(box.name) else ():
                mine = fp8.scales(known[source][part.name])[scale_box(part, block=block).within(_all(scale[part.name]))]
                sent = fp8.quantised(view(whole, part), mine, start=part.start, block=sides)
                assert same(mine, scale[part.name][scale_box(part, block=block).within(_all(scale[part.name]))])
                assert same(sent, view(expected, part))
                sums[part.name] = sums[part.name] + digest(part, sent, shapes[part.name])
        held = [box for box in engine_boxes(model, infer)[worker % infer.tensor] if is_quantised(box.name)]
        assert {box.name: int(digest(box, view(expected, box), shapes[box.name])) for box in held} == {
            tensor: int(total) for tensor, total in sums.items()
        }


def _all(scale: torch.Tensor) -> Box:
    return Box("", (0, 0), tuple(scale.shape))


def test_blocks_that_tensor_ranks_cut_are_listed_with_the_ranks():
    """512 key rows under TP 8 are 64 a rank: four rows of blocks, each of two ranks. The maximum of a half is too small."""
    boxes = [[Box("k_proj.weight", (64 * rank, 0), (64, 256))] for rank in range(8)]
    found = shared_blocks(boxes, {"k_proj.weight": (512, 256)})
    assert found == {
        Box("k_proj.weight_scale_inv", (row, column), (1, 1)): (2 * row, 2 * row + 1)
        for row in range(4)
        for column in range(2)
    }
    ragged = [[Box("k_proj.weight", (0, 0), (128, 200))], [Box("k_proj.weight", (128, 0), (30, 200))]]
    assert shared_blocks(ragged, {"k_proj.weight": (158, 200)}) == {}, "the edge of the matrix cuts no block"
    assert shared_blocks([[Box("lm_head.weight", (0, 0), (3, 3))]], {}) == {}


def test_the_bytes_of_a_sync():
    """One a weight and four a block of 16384, and two of what stays as it is: half of bfloat16's, nearly."""
    assert wire_bytes([Box("a.q_proj.weight", (0, 0), (256, 300))], itemsize=2) == 256 * 300 + 4 * 2 * 3
    assert wire_bytes([Box("a.q_proj.weight", (64, 0), (128, 128))], itemsize=2) == 128 * 128 + 4 * 2
    assert wire_bytes([Box("model.norm.weight", (0,), (300,))], itemsize=2) == 600
    model, _, infer = shipped("7b_8gpu")
    boxes = [box for worker in engine_boxes(model, infer) for box in worker]
    total, linear = sum(box.size for box in boxes), sum(box.size for box in boxes if is_quantised(box.name))
    assert wire_bytes(boxes, itemsize=2) == pytest.approx(2 * (total - linear) + linear * (1 + 4 / 128**2), rel=1e-6)


def test_a_model_in_fp8_is_near_the_model():
    """The gap between trainer and engine that the correction has to bridge, on the quickstart's trained model.

    Weights alone, and with activations in fp8 before each linear layer, as an engine computes. It is far above the gap of bfloat16.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sums = [f"{a}+{b}={a + b}" for a in range(10, 30) for b in range(10, 20)]
    tokens = AutoTokenizer.from_pretrained(QUICKSTART)(sums, return_tensors="pt")["input_ids"]
    gaps = {}
    with torch.no_grad():
        for kind in ("bfloat16", "weights", "weights and activations"):
            model = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
            exact = _logprobs(model, tokens)
            for name, layer in model.named_modules():
                if not is_quantised(f"{name}.weight"):
                    continue
                weight = layer.weight
                weight.copy_(weight.bfloat16().float() if kind == "bfloat16" else fp8.rounded(weight))
                if kind == "weights and activations":
                    layer.register_forward_pre_hook(lambda layer, x: (fp8.rounded(x[0], block=fp8.ACTIVATION),))
            gaps[kind] = float((_logprobs(model, tokens) - exact).abs().mean())
    print({kind: f"{gap:.1e}" for kind, gap in gaps.items()})
    assert gaps["bfloat16"] < gaps["weights"] < gaps["weights and activations"] < 0.1
    assert gaps["weights"] > 5 * gaps["bfloat16"]


def _logprobs(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """`[rows, tokens - 1]` of each token after those before it."""
    logprobs = model(tokens).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
