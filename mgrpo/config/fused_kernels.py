"""Fused kernels beside those of Megatron and torch: which are installed, and which of them a run uses."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from mgrpo.config.schema import Config, Parallel

OLDEST, BELOW = (2, 9), (2, 12)
"""Releases of Transformer Engine that megatron-core 0.16 is made for."""
REMEDY = "pip install --no-build-isolation -r requirements/te.txt"
OLDEST_LIGER = (0, 8, 5)
"""Release of Liger Kernel whose SwiGLU takes gate and up as one tensor without a copy."""


def transformer_engine() -> str | None:
    """The installed version of Transformer Engine."""
    return _installed("transformer_engine", "transformer_engine", "transformer_engine_torch")


def liger() -> str | None:
    """The installed version of Liger Kernel."""
    return _installed("liger_kernel", "liger-kernel", "liger-kernel-nightly")


def _installed(module: str, *distributions: str) -> str | None:
    """The version of the first of these distributions, if the module is there; "unknown" without any of them."""
    if find_spec(module) is None:
        return None
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _release(found: str, parts: int) -> tuple[int, ...]:
    """The first numbers of a version; all 0 where they are none."""
    try:
        return tuple(int(part) for part in found.split(".")[:parts])
    except ValueError:
        return (0,) * parts


def transformer_engine_lack() -> str | None:
    """Why Transformer Engine cannot be used on this machine."""
    found = transformer_engine()
    if found is None:
        return "Transformer Engine is not installed"
    if not OLDEST <= _release(found, 2) < BELOW:
        oldest, below = (".".join(map(str, release)) for release in (OLDEST, BELOW))
        return f"Transformer Engine {found} is installed, but Megatron needs at least {oldest} and below {below}"
    return None


def liger_lack() -> str | None:
    """Why the kernels of Liger cannot be used on this machine."""
    found, oldest = liger(), ".".join(map(str, OLDEST_LIGER))
    remedy = f"pip install --no-deps liger-kernel=={oldest}"
    if found is None or find_spec("triton") is None:
        return f"{'Triton' if found else 'liger-kernel'} is not installed; {remedy}"
    if _release(found, 3) < OLDEST_LIGER:
        return f"liger-kernel {found} is installed, but {oldest} or newer is needed; {remedy}"
    return None


def kernel_problems(config: Config, *, has_gpus: bool) -> Iterator[str]:
    """Kernels that the configuration asks for and that this machine does not have, one sentence each."""
    lack = transformer_engine_lack()
    problem = _obstacle(lack and f"{lack}; {REMEDY}", has_gpus=has_gpus)
    if problem and config.parallel.transformer_impl == "transformer_engine":
        yield f"transformer_impl=transformer_engine{problem} use auto or local"
    if problem and config.parallel.fp8 != "none":
        yield f"fp8={config.parallel.fp8}{problem} use none"
    if problem and config.parallel.tp_comm_overlap:
        yield f"tp_comm_overlap=true{problem} use false"
    if problem and config.parallel.use_precision_aware_optimizer:
        yield f"use_precision_aware_optimizer=true{problem} leave it out"
    if config.parallel.fused_layers is True and (problem := _obstacle(liger_lack(), has_gpus=has_gpus)):
        yield f"fused_layers=true{problem} use auto or false"
    name = config.parallel.moe_token_dispatcher_type
    if name != "alltoall":
        lack = exchange_lack(name) if has_gpus else "GPUs, of which there are none here"
        if lack:
            yield f"moe_token_dispatcher_type={name} needs {lack}; {'install it' if has_gpus else 'start where there are'}, or use alltoall"


def _obstacle(lack: str | None, *, has_gpus: bool) -> str:
    """Part of a sentence, between a setting and its alternative; empty if nothing is in the way."""
    if not has_gpus:
        return " needs GPUs, of which there are none here;"
    return f": {lack}, or" if lack else ""


def exchange_lack(backend: str) -> str | None:
    """The package that a dispatcher of one copy for each rank needs and that is not installed."""
    if find_spec("deep_ep") is None:
        branch = ", branch hybrid-ep" if backend == "hybridep" else ""
        return f"the package deep_ep (https://github.com/deepseek-ai/DeepEP{branch}), which is not installed"
    if backend == "hybridep" and find_spec("deep_ep.hybrid_ep_buffer") is None:
        return "the package deep_ep of DeepEP's branch hybrid-ep, another one is installed"
    return None


def uses_transformer_engine(settings: Parallel, *, has_cuda: bool) -> bool:
    """Whether a layer's matrices and norms are those of Transformer Engine."""
    if settings.transformer_impl == "auto":
        return has_cuda and transformer_engine_lack() is None
    return settings.transformer_impl == "transformer_engine"


def uses_liger(settings: Parallel, *, has_cuda: bool) -> bool:
    """True if a layer's norms, SwiGLU and rotary embeddings are Liger's kernels."""
    if settings.fused_layers == "auto":
        return has_cuda and liger_lack() is None
    return settings.fused_layers


def has_apex() -> bool:
    """Whether NVIDIA's apex is installed; the package of that name on PyPI is another one."""
    return find_spec("amp_C") is not None


def kernel_line(settings: Parallel, *, has_cuda: bool) -> str:
    """The kernels of a run's layers and optimizer, in one line."""
    if uses_transformer_engine(settings, has_cuda=has_cuda):
        layers = f"layers of Transformer Engine {transformer_engine()}"
    else:
        layers = "Megatron's own layers"
        if has_cuda:
            chosen = "transformer_impl=local" if settings.transformer_impl == "local" else transformer_engine_lack()
            layers += f" ({chosen})"
    if uses_liger(settings, has_cuda=has_cuda):
        layers += f" with norms, SwiGLU and rotary embeddings of Liger {liger()}"
    source = "Transformer Engine" if transformer_engine() else "apex" if has_apex() else "torch"
    return f"{layers}, Adam of {source}"
