"""The package `transformer_engine` as Megatron and mgrpo import it: layers, recipes, padding.

Signatures are those of release 2.11, as far as they are used. Importing any other name fails.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from mgrpo.parallel import backend
from mgrpo.rehearsal.eight_bits.multiplied import Copies, Product, copies, placeholders, product
from mgrpo.rehearsal.eight_bits.permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from mgrpo.rehearsal.eight_bits.rounding import Name, Rounding

VERSION = "2.11.0"
EPS = 1e-5


class Format(enum.Enum):
    """Types of activations and weights, and of gradients."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Recipe:
    """Base class of recipes: the numbers that share a scale."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False

    name: ClassVar[Name | None] = None

    @property
    def rounding(self) -> Rounding:
        """Its arithmetic."""
        assert self.name is not None, f"{type(self).__name__} is not rehearsed"
        forward, backward = self.fp8_format.value
        return Rounding(name=self.name, forward=forward, backward=backward)


class Float8CurrentScaling(Recipe):
    name = "tensorwise"


class Float8BlockScaling(Recipe):
    name = "blockwise"


class MXFP8BlockScaling(Recipe):
    name = "mxfp8"


class DelayedScaling(Recipe):
    """A base class of Megatron's."""


class FP8GlobalStateManager:
    """The recipe of the layers that are called."""

    recipe: Recipe | None = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Recipe | None:
        return cls.recipe


@contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None, fp8_group: Any = None
) -> Iterator[None]:
    before = FP8GlobalStateManager.recipe
    FP8GlobalStateManager.recipe = fp8_recipe if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


class UserBufferQuantizationMode(enum.Enum):
    """Types of gathered tensors."""

    NONE = "none"
    FP8 = "fp8"


class Userbuffers:
    """Buffers of `initialize_ub`: for so many rows, of all tensor ranks together."""

    rows: int | None = None
    arguments: ClassVar[dict[str, Any]] = {}
    memory: ClassVar[list[torch.Tensor]] = []
    """On a device: buffers `GATHERING` and `SCATTERING`."""


GATHERING = ("qkv_fprop", "qkv_dgrad", "proj_dgrad", "proj_wgrad", "fc1_fprop", "fc1_dgrad", "fc2_dgrad", "fc2_wgrad")
SCATTERING = ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")


def release() -> None:
    """Free tensors that belong to no layer."""
    placeholders.clear()
    Userbuffers.memory.clear()


def initialize_ub(
    shape: list[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Any = None,
    bootstrap_backend: str | None = None,
) -> None:
    Userbuffers.rows = shape[0]
    if backend.has_cuda():
        gathered = torch.uint8 if UserBufferQuantizationMode.FP8 in (quantization_modes or ()) else dtype
        types = [gathered] * len(GATHERING) + [dtype] * len(SCATTERING)
        Userbuffers.memory[:] = [torch.empty(shape, dtype=each, device="cuda") for each in types]
    Userbuffers.arguments = {
        "shape": shape,
        "tp_size": tp_size,
        "modes": quantization_modes,
        "backend": bootstrap_backend,
    }


class _Layer(torch.nn.Module):
    """Weights and their copies in 8 bits, which are kept while `is_first_microbatch` is False."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: Literal["column", "row"] | None = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self._overlaps = self.sequence_parallel and (ub_overlap_ag or ub_overlap_rs)
        assert not self._overlaps or ub_name in ("qkv", "proj", "fc1", "fc2"), f"there are no buffers for {ub_name}"
        self.copies: list[Copies] | None = None
        self._options: dict[str, Any] = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}

    def _parameter(self, *size: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(*size, **self._options))

    def _multiply(
        self, rows: torch.Tensor, weights: list[torch.Tensor], splits: list[int], is_first: bool | None
    ) -> torch.Tensor:
        recipe = FP8GlobalStateManager.recipe
        rounding = None if recipe is None else recipe.rounding
        kept, trains = self.copies, torch.is_grad_enabled() and weights[0].requires_grad
        # On a device they are written into the same memory.
        is_new = is_first is not False and not rows.is_cuda
        if is_new or kept is None or rounding is None or (trains and kept[0][1] is None):
            kept = [copies(weight.detach(), rounding, trains=trains) for weight in weights]
            self.copies = None if is_first is None or rounding is None else kept
        call = Product(
            rounding=rounding,
            splits=tuple(splits),
            group=self.tp_group,
            mode=self.parallel_mode if self.tp_size > 1 else None,
            sequence=self.sequence_parallel,
            keeps_input=self.save_original_input,
            accumulates=(is_first is not True) if self.fuse_wgrad_accumulation else None,
        )
        return product(call, weights, kept, rows)


class Linear(_Layer):
    """One matrix, which tensor-parallel ranks may share."""

    def __init__(self, in_features: int, out_features: int, *args: Any, **options: Any) -> None:
        super().__init__(in_features, out_features, *args, **options)
        self.weight = self._parameter(self.out_features, self.in_features)
        # Without a bias it has an empty one, which is not a parameter.
        self.bias = self._parameter(self.out_features) if self.use_bias else torch.empty(0, **self._options)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        rows = inp.reshape(-1, inp.shape[-1])
        whole = len(rows) * (self.tp_size if self.sequence_parallel and self.parallel_mode == "column" else 1)
        assert not self._overlaps or whole == Userbuffers.rows, f"{whole} rows in buffers for {Userbuffers.rows}"
        found = self._multiply(rows, [self.weight], [whole], is_first_microbatch).view(
            -1, *inp.shape[1:-1], self.out_features
        )
        if self.return_bias:
            return found, self.bias
        return found + self.bias if self.use_bias else found


class LayerNormLinear(Linear):
    """A norm over the inputs before the matrix."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = EPS,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm" and not return_layernorm_output
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.layer_norm_weight = self._parameter(in_features)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        wide = inp if inp.is_cuda else inp.to(torch.promote_types(torch.float32, inp.dtype))
        weight = self.layer_norm_weight.to(wide) + int(self.zero_centered_gamma)
        normed = F.rms_norm(wide, (wide.shape[-1],), weight, self.eps).to(inp.dtype)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Layer):
    """A matrix for each group of rows."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, *args: Any, **options: Any) -> None:
        super().__init__(in_features, out_features, *args, **options)
        assert not self.use_bias
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            setattr(self, f"weight{number}", self._parameter(self.out_features, self.in_features))
            setattr(self, f"bias{number}", torch.empty(0, **self._options))

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> torch.Tensor:
        assert len(m_splits) == self.num_gemms and sum(m_splits) == len(inp)
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return self._multiply(inp, weights, m_splits, is_first_microbatch)


class Fp8Padding(torch.nn.Module):
    """Rows of 0 after those of each group, up to the multiple that a product in 8 bits needs."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        splits = [-(-size // _unit(self)) * _unit(self) for size in m_splits]
        if splits == m_splits:
            return inp, splits
        parts = zip(inp.split(m_splits), splits, strict=True)
        return torch.cat(
            [each for part, size in parts for each in (part, part.new_zeros(size - len(part), *part.shape[1:]))]
        ), splits


class Fp8Unpadding(torch.nn.Module):
    """The rows before `Fp8Padding`."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        splits = [-(-size // _unit(self)) * _unit(self) for size in m_splits]
        if splits == m_splits:
            return inp
        return torch.cat([part[:size] for part, size in zip(inp.split(splits), m_splits, strict=True)])


def _unit(padding: Fp8Padding | Fp8Unpadding) -> int:
    if padding.align_size is None:
        assert FP8GlobalStateManager.recipe is not None
        padding.align_size = FP8GlobalStateManager.recipe.rounding.rows_multiple_of
    return padding.align_size


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """No-op: only recipes with a state need it, and none here has one."""
    yield


def checkpoint(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Compute `function` again in the backward pass, with the recipe of now."""
    recipe = FP8GlobalStateManager.recipe

    def run(*own: Any) -> Any:
        with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return function(*own)

    return torch_checkpoint(run, *args, use_reentrant=True)


class _Named:
    """Placeholder for a name in annotations and base classes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("Transformer Engine itself is not here")


def _absent(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("Transformer Engine itself is not here")


RECIPES = (Recipe, Format, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, DelayedScaling)
LAYERS = (Linear, LayerNormLinear, GroupedLinear, Fp8Padding, Fp8Unpadding, fp8_autocast)
SORTED = (
    moe_permute,
    moe_permute_with_probs,
    moe_unpermute,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
)
ROUTED = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
OPERATIONS = "Sequential FusibleOperation SwiGLU GEGLU ReGLU GELU ReLU SiLU LayerNorm RMSNorm BasicLinear Bias ReduceScatter AllReduce"


def install() -> None:
    """`import transformer_engine` finds this package. Before Megatron is imported."""
    assert "megatron.core" not in sys.modules, "Megatron has already looked for Transformer Engine"
    named = {name: type(name, (_Named,), {}) for name in ("LayerNorm", "RMSNorm", "DotProductAttention")}
    contents: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        "common": {},
        "common.recipe": _by_name(*RECIPES),
        "pytorch": _by_name(*LAYERS) | named,
        "pytorch.fp8": _by_name(FP8GlobalStateManager, fp8_autocast),
        "pytorch.distributed": _by_name(checkpoint, activation_recompute_forward)
        | {"CudaRNGStatesTracker": type("CudaRNGStatesTracker", (_Named,), {})},
        "pytorch.module": {},
        "pytorch.module.base": _by_name(UserBufferQuantizationMode, initialize_ub),
        "pytorch.ops": {name: type(name, (_Named,), {}) for name in OPERATIONS.split()},
        "pytorch.permutation": _by_name(*SORTED),
        "pytorch.router": dict.fromkeys(ROUTED, _absent),
        "pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (_Named,), {})},
    }
    for path, names in contents.items():
        name = f"transformer_engine.{path}".rstrip(".")
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(names)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def _by_name(*objects: Any) -> dict[str, Any]:
    return {each.__name__: each for each in objects}
