"""Products in 8 bits as the recipes round their operands, against float64."""

from __future__ import annotations

import pytest
import torch

from mgrpo.rehearsal.eight_bits.multiplied import Product, copies, product
from mgrpo.rehearsal.eight_bits.rounding import E4M3, E5M2, Rounding

RECIPES = ("tensorwise", "blockwise", "mxfp8")
HALF_UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Of the last digit, relatively."""
HALF_SMALLEST = {E4M3: 2.0**-10, E5M2: 2.0**-17}


def matrix(draw: torch.Generator, *size: int) -> torch.Tensor:
    """Values of very different sizes; a block of zeros and an outlier."""
    found = torch.randn(size, generator=draw, dtype=torch.float64) * torch.exp(
        2 * torch.randn(size, generator=draw, dtype=torch.float64)
    )
    found[:32, :32] = 0
    found[-1, -1] = 1e4
    return found


def error(own: torch.Tensor, dtype: torch.dtype, rounding: Rounding) -> torch.Tensor:
    """By how much each number may be off: of the largest with which it can share a scale the whole matrix knows."""
    unit = own.abs().amax() / torch.finfo(dtype).max * (1 if rounding.name == "tensorwise" else 2)
    return torch.maximum(own.abs() * HALF_UNIT[dtype], unit * HALF_SMALLEST[dtype]) * (1 + 1e-6)


def bound(left: torch.Tensor, right: torch.Tensor, left_error: torch.Tensor, right_error: torch.Tensor) -> torch.Tensor:
    return left.abs() @ right_error + left_error @ right.abs() + left_error @ right_error


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backward", [E4M3, E5M2])
def test_a_product_and_its_gradients_are_off_by_the_rounding_of_their_operands(recipe, backward):
    """The bound of the page on precision: nothing else is rounded, and no block is multiplied by another's scale."""
    rounding, draw = Rounding(name=recipe, backward=backward), torch.Generator().manual_seed(1)
    rows, weight, upstream = matrix(draw, 160, 192), matrix(draw, 96, 192), matrix(draw, 160, 96)
    rows.requires_grad_()
    weight.requires_grad_()
    call = Product(rounding=rounding, splits=(160,))
    y = product(call, [weight], [copies(weight.detach(), rounding)], rows)
    y.backward(upstream)
    x, w = rows.detach(), weight.detach()
    x_error, w_error = error(x, E4M3, rounding), error(w, E4M3, rounding)
    dy_error = error(upstream, backward, rounding)
    for found, exact, limit in (
        (y.detach(), x @ w.T, bound(x, w.T, x_error, w_error.T)),
        (rows.grad, upstream @ w, bound(upstream, w, dy_error, w_error)),
        (weight.grad, upstream.T @ x, bound(upstream.T, x, dy_error.T, x_error)),
    ):
        assert ((found - exact).abs() <= limit).all()
        assert not torch.allclose(found, exact, rtol=1e-3)


@pytest.mark.parametrize(
    ("recipe", "operand", "along", "together"),
    [
        ("tensorwise", "activation", 1, "all"),
        ("blockwise", "activation", 1, "128 of a row"),
        ("blockwise", "gradient", 0, "128 of a column"),
        ("blockwise", "weight", 0, "128 x 128"),
        ("mxfp8", "weight", 1, "32 of a row"),
        ("mxfp8", "activation", 0, "32 of a column"),
    ],
)
def test_an_outlier_is_felt_by_those_that_share_its_scale(recipe, operand, along, together):
    """Numbers that are too small beside an outlier become 0."""
    small = torch.full((256, 256), 1e-11, dtype=torch.float64)
    small[0, 0] = 1.0
    values = Rounding(name=recipe)(small, operand, along=along).values()
    lost = (values if along == 1 else values.T) == 0
    expected = torch.zeros_like(lost)
    rows, columns = {
        "all": (256, 256),
        "128 of a row": (1, 128),
        "128 of a column": (128, 1),
        "128 x 128": (128, 128),
        "32 of a row": (1, 32),
        "32 of a column": (32, 1),
    }[together]
    expected[:rows, :columns] = True
    expected[0, 0] = False
    assert torch.equal(lost, expected)


def test_numbers_are_rounded_to_the_nearest_and_ties_to_even():
    """By hand: between 16 and 32 e4m3 has every second number. The largest is 448, with which the scale is 1."""
    row = torch.tensor([[17.0, 17.5, 19.0, 22.9, -19.0, 448.0, 2.0**-9, 2.0**-11]])
    for recipe in RECIPES:
        found = Rounding(name=recipe)(row, "activation", along=1)
        assert found.values().tolist() == [[16.0, 18.0, 20.0, 22.0, -20.0, 448.0, 2.0**-9, 0.0]]
        assert found.scale.tolist() == [[1.0]]
    # 500 wants a scale of 0.896, of which blocks take the power of two below.
    row[0, 5] = 500.0
    scales = [float(Rounding(name=recipe)(row, "activation", along=1).scale) for recipe in RECIPES]
    assert scales == [pytest.approx(500 / 448), 2.0, 2.0]
