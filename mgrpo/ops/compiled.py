"""Owns the compiled library: loads it, reports its build, registers fake kernels, and picks the implementation
of each call.

Without the library, or for a device it has no kernels for, `ops/reference.py` computes, with one warning.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mgrpo.ops import reference
from mgrpo.ops.settings import COLUMNS, SETTINGS


def _load() -> tuple[ModuleType | None, str | None]:
    """The library, whose import registers torch.ops.mgrpo, or the reason why it is missing."""
    try:
        from mgrpo import _C
    except ImportError as error:  # not built, or built for another Python or an older torch: see the message
        return None, str(error)
    # The settings of the loss travel as numbers without names. kept_stats is the newest op.
    if tuple(getattr(_C, "loss_settings", list)()) != SETTINGS or not hasattr(torch.ops.mgrpo, "kept_stats"):
        return None, "it was built from other sources than this Python code"
    return _C, None


_C, _load_error = _load()


def build_info() -> dict[str, Any]:
    """Facts about the build of the ops.

    Returns:
        compiled: the library is loaded. cuda_archs: TORCH_CUDA_ARCH_LIST of its CUDA kernels, "" without.
        built_with_torch: the version of its headers. error: reason why it is not loaded.
    """
    info = {"cuda_archs": "", "built_with_torch": None} if _C is None else _C.build_info()
    return {"compiled": _C is not None, **info, "error": _load_error}


def ops_for(logits: Tensor) -> Any:
    """The functions that compute on these logits: `torch.ops.mgrpo`, or the reference with the same signatures."""
    if logits.dtype == torch.float64:
        return reference
    if _C is None:
        _warn_once(f"the compiled ops cannot be used ({_load_error})", "python setup.py build_ext --inplace")
        return reference
    if logits.device.type == "cuda" and not build_info()["cuda_archs"]:
        _warn_once("the compiled ops have no CUDA kernels", "MGRPO_CUDA=1 python setup.py build_ext --inplace")
        return reference
    return torch.ops.mgrpo


@functools.cache
def _warn_once(what: str, build: str) -> None:
    warnings.warn(
        f"mgrpo: {what}; the PyTorch reference runs instead: the same results, slower, with several copies of the "
        f"logits in memory. To build them: {build}",
        stacklevel=2,
    )


def _register_fakes() -> None:
    """Shapes of the results, for torch.compile and FakeTensor."""

    @torch.library.register_fake("mgrpo::logprob_stats")
    def _(logits, targets, rows, vocab_start, valid_cols, inv_temp, entropy):
        return logits.new_empty((4, targets.shape[0]), dtype=torch.float32)

    @torch.library.register_fake("mgrpo::logprob_merge")
    def _(stats, inv_temp):
        _, four, n = stats.shape
        return stats.new_empty(n), stats.new_empty(n), stats.new_empty((four, n))

    @torch.library.register_fake("mgrpo::logprob_grad_")
    def _(logits, targets, inv_rows, vocab_start, valid_cols, inv_temp, stats, g_logprob, g_entropy):
        return None

    @torch.library.register_fake("mgrpo::logprob_grad_out")
    def _(logits, out, targets, inv_rows, vocab_start, valid_cols, inv_temp, stats, g_logprob, g_entropy):
        return None

    @torch.library.register_fake("mgrpo::kept_stats")
    def _(values, ids, offsets, targets, inv_temp, entropy):
        return values.new_empty((4, targets.shape[0]))

    @torch.library.register_fake("mgrpo::kept_grad")
    def _(values, ids, offsets, targets, inv_temp, stats, g_logprob, g_entropy):
        return torch.empty_like(values)

    @torch.library.register_fake("mgrpo::policy_loss")
    def _(logprobs, old_logprobs, ref, rollout, advantages, weights, keep, cu_seqlens, *others):
        num_seqs = cu_seqlens.shape[0] - 1
        sums = logprobs.new_empty((num_seqs, len(COLUMNS)))
        return torch.empty_like(logprobs), logprobs.new_empty(num_seqs), sums

    @torch.library.register_fake("mgrpo::segment_sums")
    def _(x, weights, cu_seqlens):
        return x.new_empty((2, cu_seqlens.shape[0] - 1))


if _C is not None:
    _register_fakes()
