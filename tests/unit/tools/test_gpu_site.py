"""What tools/gpu_site.py adds to torch 2.11, whose signatures the stand-ins here have; torch itself is never that old in these tests."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.attention import varlen

from tests.unit.parallel import varlen_stand_ins

TOOLS = Path(__file__).resolve().parents[3] / "tools"
SOURCE = """
def _varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None):
    return "out", "lse", key

def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    return key, scale, window_size

def _varlen_attn_backward(
    grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state, scale=None, window_size=None
):
    return "dq", "dk", "dv"
"""
"""torch.nn.attention.varlen of torch 2.11, in its signatures."""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("gpu_site")


def test_the_op_of_an_older_torch_takes_fewer_key_heads(site: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom op whose function has the signature of torch 2.11: repeated heads would slow down every figure taken there."""
    from mgrpo.parallel.packed import varlen as calls

    op = torch.library.custom_op("mgrpo_tests::_varlen_attn", varlen_stand_ins.forward_2_11, mutates_args=())
    monkeypatch.setattr(varlen, "_varlen_attn", op)
    assert not calls.can_attend(with_lse=True)
    site.complete(varlen)
    assert calls.can_attend(with_lse=True)
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 6, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    out, lse, _ = calls.forward(query, key, value, (ends, ends, 3, 3), scale=0.3, window=None)
    heads = (x[2:].transpose(0, 1) for x in (query, key, value))
    truth = torch.nn.functional.scaled_dot_product_attention(*heads, scale=0.3, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out[2:], truth.transpose(0, 1))
    scores = 0.3 * torch.einsum("hd,khd->hk", query[4], key[2:].repeat_interleave(3, 1))
    torch.testing.assert_close(lse[:, 4], scores.logsumexp(1))


def test_the_torch_that_is_required_stays_as_it_is(site: ModuleType) -> None:
    """It checks the heads itself."""
    before = dict(vars(varlen))
    site.complete(varlen)
    assert vars(varlen) == before


def test_an_older_torch_is_completed_when_it_is_imported(site: ModuleType, tmp_path: Path) -> None:
    """And only then: the import would cost each of Ray's processes seconds. The functions have the signatures of torch 2.11."""
    package = tmp_path / "torch" / "nn" / "attention"
    package.mkdir(parents=True)
    (package / "varlen.py").write_text(SOURCE)
    (tmp_path / "sitecustomize.py").write_text((TOOLS / "gpu_site.py").read_text())
    program = """
import inspect, sys, sitecustomize
assert 'torch' not in sys.modules
from torch.nn.attention import varlen
operands = 'q', 'k', 'v', 'cu_q', 'cu_k', 3, 4
print(varlen.varlen_attn(*operands, scale=0.5, window_size=(7, 0), enable_gqa=True), varlen.varlen_attn(*operands))
names = 'query', 'key', 'value', 'cu_seq_q', 'cu_seq_k', 'max_q', 'max_k'
print(varlen._varlen_attn(**dict(zip(names, operands)), is_causal=True, scale=0.5, window_size=[-1, 0], enable_gqa=True))
print(*('enable_gqa' in inspect.signature(getattr(varlen, name)).parameters
        for name in ('varlen_attn', '_varlen_attn', '_varlen_attn_backward')))
"""
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "('k', 0.5, (7, 0)) ('k', None, (-1, -1))",
        "('out', 'lse', 'k')",
        "True True False",
    ], done.stderr
