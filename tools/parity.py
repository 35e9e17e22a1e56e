"""Compare every parallel layout with one rank: log-probabilities, loss, and the gradient of every parameter.

    python tools/parity.py                          # the whole matrix on 4 gloo ranks (or GPUs)
    python tools/parity.py tp2+sp cp2xtp2+zero3     # these layouts, on every model they fit
    python tools/parity.py --markdown docs/parity.md

A layout is its axes joined by x (tp, pp, vpp, cp, ep, dp), then options joined by +: sp, zero0 to zero3, shard2 (HSDP),
first1 / last1 (layers of the first or last stage), a2a, full / selective (recompute), offloaded (activations), chunked (LM
head by columns), unpacked, packs512, kept (tokens sampled from sets), lora (adapters are trained). Ranks that no axis names are data
parallel.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ranks import cases
from tests.ranks.lora_oracle import LORA, lora_oracle
from tests.ranks.outcomes import Difference, Outcome, collect, compare
from tests.ranks.rank_pool import RankPool
from tests.tiny_models import save_tiny

LOSS = {"beta": 0.05, "kl_estimator": 2, "clip_lower": 0.2, "clip_higher": 0.28}
SAMPLES = cases.random_samples(seed=0, groups_of_turns=2)
CUT_SAMPLES = cases.with_sets(SAMPLES)

MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "qwen3 (QK norm)": {"family": "qwen3"},
    "llama, tied": {"family": "llama", "tied": True},
    "qwen3-moe": {"family": "qwen3_moe"},
    "qwen3-moe, 6 layers": {"family": "qwen3_moe", "layers": 6},
    "glm-4.5": {"family": "glm4_moe"},
    "glm-4.7-flash": {"family": "glm4_moe_lite"},
    "deepseek-v3": {"family": "deepseek_v3"},
    "kimi-k2": {"family": "kimi_k2"},
    "moonlight, dense": {"family": "deepseek_v3", "q_lora_rank": None, "first_k_dense_replace": 4},
    "gpt-oss": {"family": "gpt_oss"},
    "qwen3-next": {"family": "qwen3_next"},
    "qwen3.5": {"family": "qwen3_5_text"},
    "qwen3.5-moe": {"family": "qwen3_5_moe_text"},
    "seed-oss": {"family": "seed_oss"},
    "olmo-3": {"family": "olmo3"},
    "gemma-3": {"family": "gemma3_text"},
}
_DENSE = ("qwen2", "qwen3 (QK norm)", "llama, tied")
_MOE = ("qwen3-moe", "glm-4.5", "glm-4.7-flash", "deepseek-v3", "gpt-oss", "qwen3-next", "qwen3.5-moe")
_DEEP = "qwen3-moe, 6 layers"
_OTHERS, _LATENT = ("kimi-k2", "qwen3.5", "seed-oss", "olmo-3", "gemma-3"), ("moonlight, dense",)

MATRIX: dict[str, tuple[str, ...]] = {
    "dp1": (*_DENSE, *_MOE, *_LATENT, _DEEP),
    "pp2xvpp2+first3+last3": (_DEEP,),
    "pp2xvpp2+first3+last3+full": (_DEEP,),
    "pp2xvpp2+first2": (_DEEP,),
    "dp1+zero3": (*_DENSE, *_LATENT),
    "dp1+unpacked": _DENSE,
    "dp1+packs512": _DENSE,
    "dp1+full": (*_DENSE, *_MOE, *_LATENT),
    "dp1+selective": (*_DENSE, *_MOE, *_LATENT),
    "tp2": (*_DENSE, *_LATENT),
    "tp2+sp": (*_DENSE, *_MOE, *_OTHERS, *_LATENT),
    "pp2": (*_DENSE, *_MOE, *_OTHERS),
    "cp2": (*_DENSE, *_MOE, *_OTHERS),
    "cp2+a2a": ("qwen2", "gpt-oss", "qwen3.5", *_LATENT),
    "dp2": (*_DENSE, *_MOE),
    "dp2+zero0": _DENSE,
    "dp2+zero2": (*_DENSE, *_LATENT),
    "dp2+zero3": (*_DENSE, *_OTHERS, *_LATENT, "gpt-oss"),
    "ep2": (*_MOE, "kimi-k2"),
    "pp2xvpp2": (*_DENSE, *_MOE, *_OTHERS),
    "pp2+first1": _DENSE,
    "tp2+sp+full": ("qwen2",),
    "pp2+full": ("qwen2",),
    "tp2+chunked": ("qwen2", "qwen3.5", "seed-oss", "olmo-3", *_LATENT),
    "tp2+sp+chunked": (*_MOE, "kimi-k2"),
    "tp2+zero2": ("qwen2", *_LATENT),
    "pp2+zero3": ("llama, tied", *_LATENT),
    "dp2+kept": ("qwen2",),
    "tp2+sp+kept": _DENSE,
    "pp2+kept": ("qwen2",),
    "cp2xtp2+kept": _DENSE,
    "cp2xtp2+sp+chunked+kept": _DENSE,
    "tp4": ("qwen2",),
    "tp4+sp": ("qwen2",),
    "pp4": _DENSE,
    "tp2xpp2": _DENSE,
    "tp2xpp2+sp": (*_DENSE, *_MOE, *_OTHERS),
    "tp2xpp2xvpp2+sp": ("qwen2", "llama, tied"),
    "tp2xpp2+sp+last1": ("llama, tied",),
    "cp2xdp2+a2a+full": ("gemma-3",),
    "cp2xpp2+full": ("olmo-3",),
    "cp2xtp2": (*_DENSE, *_LATENT),
    "cp2xtp2+sp": (*_DENSE, *_MOE),
    "cp2xpp2": _DENSE,
    "cp2xdp2": _DENSE,
    "cp2xdp2+zero3": ("qwen2",),
    "cp4": ("qwen2",),
    "tp2xdp2+sp": _DENSE,
    "tp2xdp2+sp+zero0": ("qwen2",),
    "tp2xdp2+sp+zero2": (*_DENSE, *_LATENT),
    "tp2xdp2+sp+zero3": (*_DENSE, *_LATENT),
    "pp2xdp2": _DENSE,
    "pp2xdp2+zero2": ("qwen2", "llama, tied"),
    "pp2xdp2+zero3": ("qwen2", "llama, tied"),
    "pp2xdp2+zero2+selective": ("qwen2",),
    "pp2xdp2+zero2+full": ("llama, tied",),
    "pp2xdp2+zero3+selective": ("qwen2",),
    "pp2xvpp2xdp2": ("qwen2",),
    "dp4": ("qwen2",),
    "dp4+zero3": ("qwen2",),
    "dp4+zero3+shard2": ("qwen2",),
    "ep2xtp2+sp": _MOE,
    "ep2xpp2": _MOE,
    "ep2xcp2": _MOE,
    "ep2xcp2xtp2+sp": _MOE,
    "ep2xtp2xpp2+sp": _MOE,
    "ep4xtp2+sp": _MOE,
    "ep2xdp4": _MOE,
    "ep2xdp4+zero3": _MOE,
    "ep4xdp4": _MOE,
    "dp1+lora": ("qwen2", "llama, tied", "qwen3-moe", "qwen3-next", "qwen3.5", *_LATENT),
    "dp1+lora+full": ("qwen2", "qwen3-moe"),
    "tp2+lora": ("qwen2", *_LATENT),
    "tp2+sp+lora": (*_DENSE, *_MOE, *_OTHERS, *_LATENT),
    "pp2+lora+full": ("qwen2", "llama, tied"),
    "pp2xvpp2+lora": ("qwen2",),
    "cp2+lora": ("qwen2", "qwen3-moe", "qwen3-next"),
    "dp2+lora+zero0": ("qwen2", "qwen3-moe"),
    "dp2+lora": ("qwen2",),
    "tp4+sp+lora": ("qwen2",),
    "tp2xpp2+sp+lora": ("qwen2", "llama, tied", "qwen3-moe"),
    "ep2+lora": _MOE,
    "ep2xtp2+sp+lora": _MOE,
}
"""The published matrix: the models that each layout is compared on."""


@dataclass(frozen=True, slots=True)
class Case:
    """One layout and how its batch is packed."""

    name: str
    ranks: int
    layout: dict[str, Any]
    options: dict[str, Any]

    @property
    def reference(self) -> str:
        """The case of one rank that trains the same samples and parameters."""
        return "dp1+kept" if "samples" in self.options else "dp1+lora" if "lora" in self.options else "dp1"


def parse(name: str) -> Case:
    """A layout from its name; a ValueError names the part that is not understood."""
    axes, *marks = name.split("+")
    sizes = {}
    for axis in axes.split("x"):
        match = re.fullmatch(r"(tp|pp|vpp|cp|ep|dp)(\d+)", axis)
        if match is None:
            raise ValueError(f"{name}: {axis!r} is not an axis; write for example tp2xpp2+sp")
        sizes[match[1]] = int(match[2])
    layout: dict[str, Any] = {
        field: sizes[axis]
        for axis, field in (
            ("tp", "tensor"),
            ("pp", "pipeline"),
            ("vpp", "virtual_pipeline"),
            ("cp", "context"),
            ("ep", "expert"),
        )
        if axis in sizes
    }
    model = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    data = sizes.get("dp") or max(sizes.get("ep", 1) // (sizes.get("tp", 1) * sizes.get("cp", 1)), 1)
    if sizes.get("ep", 1) > 1 and "dp" not in sizes and len(sizes) > 1:
        data = max(4 // model, 1)
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for mark in marks:
        match = re.fullmatch(r"(a2a|[a-z]+)(\d*)", mark)
        kind, number = (match[1], int(match[2] or 0)) if match else ("", 0)
        match kind:
            case "sp":
                layout["sequence_parallel"] = True
            case "zero":
                layout["zero_stage"] = number
            case "shard":
                layout["shard_size"] = number
            case "first" | "last" as end:
                layout[f"{end}_stage_layers"] = number
            case "a2a":
                settings["cp_comm_type"] = "a2a"
            case "full" | "selective" as granularity:
                settings["recompute_granularity"] = granularity
            case "offloaded":
                settings["activation_offloading"] = True
            case "chunked":
                options["logits_chunk"] = 17
            case "unpacked":
                options |= {"share_prompts": False, "pack_length": 16}
            case "lora":
                options["lora"] = LORA
            case "packs":
                options["pack_length"] = number
            case "kept":
                options["samples"] = CUT_SAMPLES
            case _:
                raise ValueError(f"{name}: {mark!r} is not an option")
    return Case(name, model * data, layout, options | {"settings": settings})


def run(pools: dict[int, RankPool], case: Case, folder: Path, shapes: dict[str, tuple[int, ...]]) -> Outcome:
    """Run one case on its ranks."""
    if case.ranks in pools and not pools[case.ranks].is_usable:
        pools.pop(case.ranks).close()
    if case.ranks not in pools:
        pools[case.ranks] = RankPool(case.ranks)
    arguments = {"model_dir": str(folder), "layout": case.layout, "samples": SAMPLES, "loss": LOSS, **case.options}
    return collect(pools[case.ranks].start(cases.gradients, **arguments).results(), shapes)


def report(rows: Iterable[tuple[str, str, int, Difference | str]]) -> str:
    """The table in Markdown."""
    lines = [
        "| layout | ranks | model | max logprob difference | loss difference | worst gradient | worst row "
        "| its tensor | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layout, model, ranks, result in rows:
        if isinstance(result, str):
            lines.append(f"| {layout} | {ranks} | {model} | | | | | {result} | **fails** |")
        else:
            verdict = "equal" if result.is_equal else "**differs**"
            lines.append(
                f"| {layout} | {ranks} | {model} | {result.logprob:.1e} | {result.loss:.1e} | {result.gradient:.1e} | "
                f"{result.row:.1e} | {result.tensor if not result.is_equal else ''} | {verdict} |"
            )
    return "\n".join(lines)


def main() -> int:
    from mgrpo.models.adapters import LoraShape, adapter_tensors
    from mgrpo.models.family import shape_of
    from mgrpo.models.hf_config import read_hf_config
    from mgrpo.models.table import trained_tensors

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help="names of layouts; default: the whole matrix")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), help="compare these models only")
    parser.add_argument("--markdown", type=Path, help="also write the table into this file, between the markers")
    options = parser.parse_args()
    wanted = {name: MATRIX.get(name, _DENSE) for name in options.layouts} or MATRIX
    parsed = [parse(name) for name in wanted]
    pools: dict[int, RankPool] = {}
    rows: list[tuple[str, str, int, Difference | str]] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        for model, arguments in MODELS.items():
            chosen = [case for case in parsed if model in wanted[case.name]]
            if not chosen or (options.models and model not in options.models):
                continue
            folder = save_tiny(Path(scratch), **arguments)
            shape = shape_of(read_hf_config(folder))
            tensors = {False: trained_tensors(shape), True: adapter_tensors(shape, LoraShape(**LORA))}
            references: dict[str, Outcome] = {}
            for case in chosen:
                has_adapters = "lora" in case.options
                against = case.reference
                try:
                    if against not in references:
                        references[against] = run(pools, parse(against), folder, tensors[has_adapters])
                    outcome, reference = run(pools, case, folder, tensors[has_adapters]), references[against]
                    if case.name == "dp1+lora":
                        reference, _ = lora_oracle(folder, SAMPLES, LOSS, Path(scratch) / "merged" / folder.name)
                    result: Difference | str = compare(outcome, reference)
                except (AssertionError, ValueError, OSError, EOFError) as err:
                    result = str(err).strip().splitlines()[-1][:160]
                rows.append((case.name, model, case.ranks, result))
                print(report(rows[-1:]).splitlines()[-1], flush=True)
        for pool in pools.values():
            if pool.is_alive:
                pool.close()
    order = list(wanted)
    rows.sort(key=lambda row: order.index(row[0]))
    table = report(rows)
    equal = sum(not isinstance(result, str) and result.is_equal for *_, result in rows)
    summary = (
        f"{equal} of {len(rows)} cases equal one rank, {len(wanted)} layouts, {time.perf_counter() - started:.0f} s"
    )
    print(f"\n{table}\n\n{summary}")
    if options.markdown:
        head, begin, rest = options.markdown.read_text().partition("<!-- matrix -->\n")
        _, end, tail = rest.partition("<!-- end of matrix -->")
        options.markdown.write_text(f"{head}{begin}{table}\n\n{summary}.\n{end}{tail}")
    return 0 if equal == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
