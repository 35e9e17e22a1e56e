"""Which fused kernels a run uses, and what it says about those that it cannot have."""

from __future__ import annotations

import pytest

from mgrpo.config import fused_kernels
from mgrpo.config.derived import layout_of
from mgrpo.config.fused_kernels import kernel_line, kernel_problems, uses_liger, uses_transformer_engine
from mgrpo.config.schema import Parallel
from mgrpo.moving import from_values

WRONG = "Transformer Engine 2.20.2 is installed, but Megatron needs at least 2.9 and below 2.12"


@pytest.fixture
def installed(monkeypatch):
    def install(transformer_engine: str | None, *others: str) -> None:
        names = {"transformer_engine"} - ({"transformer_engine"} if transformer_engine is None else set()) | set(others)
        monkeypatch.setattr(fused_kernels, "find_spec", lambda name: object() if name in names else None)
        monkeypatch.setattr(fused_kernels, "version", lambda name: transformer_engine)

    return install


@pytest.mark.parametrize(
    ("found", "reason"),
    [(None, "Transformer Engine is not installed"), ("2.20.2", WRONG), ("2.9.0", None), ("2.11.0+abc", None)],
)
@pytest.mark.parametrize(
    "asked", [{"transformer_impl": "transformer_engine"}, {"use_precision_aware_optimizer": True}, {}]
)
def test_what_is_asked_for_and_missing_is_said(installed, asked, found, reason):
    """Megatron would say it when the engines are up and the weights are loaded, and only in a stack trace."""
    installed(found)
    sentences = list(kernel_problems(from_values(asked), has_gpus=True))
    assert len(sentences) == (reason is not None and bool(asked))
    for sentence in sentences:
        name, value = next(iter(asked.items()))
        assert sentence.startswith(f"{name}={str(value).replace('True', 'true')}: {reason}; pip install ")
        assert " requirements/te.txt, or " in sentence


@pytest.mark.parametrize("found", [None, "2.11.0"])
def test_without_gpus_no_kernel_is_offered(installed, found):
    """Transformer Engine's kernels are CUDA's alone: to install it there costs an hour and changes nothing."""
    installed(found)
    config = from_values({"transformer_impl": "transformer_engine", "use_precision_aware_optimizer": True})
    assert list(kernel_problems(config, has_gpus=False)) == [
        "transformer_impl=transformer_engine needs GPUs, of which there are none here; use auto or local",
        "use_precision_aware_optimizer=true needs GPUs, of which there are none here; leave it out",
    ]


@pytest.mark.parametrize(
    ("backend", "modules", "lack"),
    [
        (
            "deepep",
            (),
            "needs the package deep_ep (https://github.com/deepseek-ai/DeepEP), which is not installed; install it",
        ),
        ("deepep", ("deep_ep",), None),
        (
            "hybridep",
            (),
            "(https://github.com/deepseek-ai/DeepEP, branch hybrid-ep), which is not installed; install it",
        ),
        (
            "hybridep",
            ("deep_ep",),
            "needs the package deep_ep of DeepEP's branch hybrid-ep, another one is installed; install it",
        ),
        ("hybridep", ("deep_ep", "deep_ep.hybrid_ep_buffer"), None),
    ],
)
def test_the_package_of_the_dispatcher_is_named(monkeypatch, backend, modules, lack):
    """Megatron would name it when the model is built, on every rank at once."""
    monkeypatch.setattr(fused_kernels, "find_spec", lambda name: name in modules or None)
    config = from_values({"moe_token_dispatcher_type": backend, "transformer_impl": "local"})
    found = list(kernel_problems(config, has_gpus=True))
    assert len(found) == (lack is not None) and all(lack in sentence for sentence in found)
    (sentence,) = kernel_problems(config, has_gpus=False)
    assert sentence.endswith("needs GPUs, of which there are none here; start where there are, or use alltoall")


def test_eight_bits_need_transformer_engine(installed):
    """Megatron's own layers would be built, and no product would be in 8 bits."""
    installed(None)
    (sentence,) = kernel_problems(from_values({"fp8": "hybrid"}), has_gpus=True)
    assert sentence.startswith("fp8=hybrid: Transformer Engine is not installed; pip install ") and sentence.endswith(
        "or use none"
    )


@pytest.mark.parametrize(("fp8", "length"), [("none", 1000), ("hybrid", 1024)])
def test_buffers_of_one_size_want_whole_packs(fp8, length):
    """What is sent while a product is computed has the length of a full pack on every rank."""
    config = from_values(
        {
            "tp_comm_overlap": True,
            "fp8": fp8,
            "pack_length": 1000,
            "tensor_model_parallel_size": 4,
            "context_parallel_size": 2,
        }
    )
    layout = layout_of(config, 8)
    assert layout.round_up(config.parallel.pack_length) == layout.pack_multiple_of == length


@pytest.mark.parametrize(("recipe", "tokens"), [("tensorwise", 16), ("blockwise", 16), ("mxfp8", 32)])
def test_eight_bits_want_whole_blocks_on_every_rank(recipe, tokens):
    """A pack of another length would end in the first product."""
    config = from_values(
        {"fp8": "hybrid", "fp8_recipe": recipe, "tensor_model_parallel_size": 2, "context_parallel_size": 2}
    )
    layout = layout_of(config, 4)
    assert layout.pack_multiple_of == 4 * tokens and config.loss.use_rho_correction
    assert layout_of(from_values({}), 4).pack_multiple_of == 1


@pytest.mark.parametrize(
    ("setting", "found", "has_cuda", "expected"),
    [
        ("auto", "2.11.0", True, "layers of Transformer Engine 2.11.0, Adam of Transformer Engine"),
        ("auto", "2.11.0", False, "Megatron's own layers, Adam of Transformer Engine"),
        ("auto", None, True, "Megatron's own layers (Transformer Engine is not installed), Adam of torch"),
        ("auto", "2.20.2", True, f"Megatron's own layers ({WRONG}), Adam of Transformer Engine"),
        ("local", "2.11.0", True, "Megatron's own layers (transformer_impl=local), Adam of Transformer Engine"),
        ("transformer_engine", "2.11.0", True, "layers of Transformer Engine 2.11.0, Adam of Transformer Engine"),
    ],
)
def test_a_run_says_what_its_layers_are_made_of(installed, setting, found, has_cuda, expected):
    """Two machines that differ in it have other speeds and other rounding."""
    installed(found)
    settings = Parallel(transformer_impl=setting)
    assert kernel_line(settings, has_cuda=has_cuda) == expected
    assert uses_transformer_engine(settings, has_cuda=has_cuda) == expected.startswith("layers of")


LIGER = " with norms, SwiGLU and rotary embeddings of Liger"


@pytest.mark.parametrize(
    ("setting", "found", "has_triton", "has_cuda", "is_used", "problem"),
    [
        ("auto", "0.8.5", True, True, True, None),
        ("auto", "0.8.5", True, False, False, None),
        ("auto", "0.8.4", True, True, False, None),
        ("auto", None, True, True, False, None),
        ("auto", "0.8.5", False, True, False, None),
        (True, "0.9.0.dev1", True, True, True, None),
        (True, "0.10", True, True, True, None),
        (True, None, True, True, True, "liger-kernel is not installed;"),
        (True, "0.8.5", False, True, True, "Triton is not installed;"),
        (True, "0.8.4", True, True, True, "liger-kernel 0.8.4 is installed, but 0.8.5 or newer is needed;"),
        (True, "0.8.5", True, False, True, "needs GPUs, of which there are none here; use auto or false"),
        (False, "0.8.5", True, True, False, None),
    ],
)
def test_layers_are_ligers_where_its_kernels_run(monkeypatch, setting, found, has_triton, has_cuda, is_used, problem):
    """A Triton kernel on a CPU, or a release without the fused SwiGLU, ends a run in its first layer."""
    modules = {name for name, is_there in {"triton": has_triton, "liger_kernel": found}.items() if is_there}
    monkeypatch.setattr(fused_kernels, "find_spec", lambda name: object() if name in modules else None)
    monkeypatch.setattr(fused_kernels, "version", lambda name: found)
    settings = Parallel(fused_layers=setting)
    assert uses_liger(settings, has_cuda=has_cuda) == is_used
    problems = list(kernel_problems(from_values({"fused_layers": setting}), has_gpus=has_cuda))
    assert len(problems) == (problem is not None)
    if problem:
        assert problems[0].startswith("fused_layers=true") and problem in problems[0]
    else:
        assert (f"{LIGER} {found}," in kernel_line(settings, has_cuda=has_cuda)) == is_used


def test_the_apex_of_pypi_is_not_nvidias(installed):
    """They share nothing but the name."""
    installed(None, "apex")
    assert kernel_line(Parallel(), has_cuda=True).endswith("Adam of torch")
    installed(None, "apex", "amp_C")
    assert kernel_line(Parallel(), has_cuda=True).endswith("Adam of apex")
