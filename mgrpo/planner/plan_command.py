"""The command `mgrpo plan`: prints the plan of a configuration on given hardware. Needs no GPU and starts nothing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import infer_layout_of
from mgrpo.config.distillation import TEACHERS
from mgrpo.config.help import field_docs
from mgrpo.config.schema import Parallel
from mgrpo.config.validate import problems, warnings
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import is_hub_name, read_hf_config
from mgrpo.models.hf_files.hub import HubError, fetch
from mgrpo.models.hf_files.weight_files import is_hf_format, weight_problems
from mgrpo.models.shape import ModelShape
from mgrpo.moving import parse
from mgrpo.planner import comparison, roles
from mgrpo.planner.engines.answer_lengths import recorded_lengths
from mgrpo.planner.engines.teaching import num_teacher_workers
from mgrpo.planner.hardware import GPUS, Assumptions, Gpu, Hardware
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.plan_report import as_json, show
from mgrpo.planner.suggest import other_splits, suggest

SHIPPED = Path(__file__).with_name("models.json")
"""Sizes of public models: those common to a family, and each model's own, as in their config.json."""


def plan_command(argv: Sequence[str], *, prog: str = "mgrpo plan") -> int:
    """Print the plan; returns 0 when the run fits, 1 when it does not, 2 when the request is wrong."""
    options, rest = _parser(prog).parse_known_args(argv)
    try:
        return _plan(options, parse(rest, prog=prog), rest)
    except ConfigError as err:
        sys.stderr.write(f"{prog}: {err}\n")
    except ValueError as err:
        sys.stderr.write(f"{prog}: 1 problem in the configuration:\n  - {err}\n")
    return 2


def _plan(options: argparse.Namespace, config: Config, argv: Sequence[str]) -> int:
    if (options.rank is not None or options.all_roles) and not options.rehearse:
        raise ValueError("rank and all_roles say what is rehearsed; add --rehearse")
    hf_config = _model_config(options.hf_config, config.model.model_name_or_path, config.hub.model_revision)
    shape = shape_of(hf_config)
    teachers = [_teacher_config(teacher.model) for teacher in config.distillation.loaded_teachers]
    teacher_shapes = [*map(shape_of, teachers)]
    num_learners, nodes = _sizes(config, options.nodes, options.gpus_per_node)
    wrong = problems(config, world_size=num_learners, hf_config=hf_config, has_dataset=True)
    # The model's sizes are known, also without its folder.
    places = ("model_name_or_path", *(f"{TEACHERS}={teacher.model}" for teacher in config.distillation.loaded_teachers))
    wrong = [problem for problem in wrong if not problem.startswith(places)]
    if not options.hf_config:
        wrong += _stored_problems("model_name_or_path", config.model.model_name_or_path or "", shape)
    for teacher, own in zip(config.distillation.loaded_teachers, teacher_shapes, strict=True):
        wrong += _stored_problems(TEACHERS, teacher.model, own)
    if wrong:
        raise ConfigError(wrong)
    for sentence in warnings(config, world_size=num_learners, hf_config=hf_config):
        sys.stderr.write(f"mgrpo: {sentence}\n")
    names = [field.name for field in dataclasses.fields(Assumptions)]
    hardware = Hardware(
        gpu=_other(GPUS[options.gpu], memory_gib=options.gpu_memory_gib, tflops=options.gpu_tflops),
        nodes=nodes,
        gpus_per_node=options.gpus_per_node,
        network_gbps=options.network_gbps,
        assumed=Assumptions(**{name: getattr(options, name) for name in names}),
    )
    plan = plan_run(config, shape, hardware, num_learners=num_learners, teachers=teacher_shapes)
    if options.rehearse:
        return _rehearse(options, plan, argv, hf_config, teachers)
    held = teachers if config.distillation.teacher_mode == "learner" else ()
    layouts = suggest(plan, count=options.suggest, hf_config=hf_config, teachers=held)
    is_divided = options.suggest and not config.engine.shares_gpus
    splits = other_splits(plan, layouts, hf_config=hf_config) if is_divided else []
    show(plan, layouts, splits)
    if options.suggest and not plan.fits and not layouts and not splits:
        sys.stdout.write("No layout and no division of these GPUs fits: use more of them, or some with more memory.\n")
    if options.json:
        Path(options.json).write_text(json.dumps(as_json(plan, layouts, splits), indent=1) + "\n")
    return 0 if plan.fits else 1


def _rehearse(
    options: argparse.Namespace,
    plan: RunPlan,
    argv: Sequence[str],
    hf_config: dict[str, Any],
    teachers: Sequence[dict[str, Any]],
) -> int:
    """Rehearse ranks of the planned run and compare; 1 where a step fails."""
    ranks = roles.all_roles(plan.layout) if options.rank is None else [options.rank]
    if not 0 <= ranks[0] < plan.layout.world_size:
        raise ValueError(
            f"rank={ranks[0]} is not a learner: there are {plan.layout.world_size}, from 0 to {plan.layout.world_size - 1}"
        )
    found = []
    for rank in ranks:
        found.append(
            roles.rehearse_rank(
                rank,
                argv=argv,
                hf_config=hf_config,
                teachers=teachers,
                layout=plan.layout,
                memory_bytes=plan.hardware.gpu.memory_bytes,
            )
        )
        comparison.show(plan, found[-1:])
    if options.json:
        Path(options.json).write_text(json.dumps(comparison.as_json(plan, found), indent=1) + "\n")
    return int(any("error" in rank for rank in found))


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s --config FILE.yaml [--gpu H100] [--nodes N] [--suggest N] [--rehearse] [--json FILE] [--name value ...]",
        description="Memory, time and traffic of a run, estimated without a GPU. Accepts every setting of a run.",
        epilog="Exit status: 0 when the run fits, 1 when it does not, 2 when the request is wrong. "
        "docs/planning.md lists the assumptions.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--gpu", type=_gpu, choices=GPUS, default="H100", help="type of all GPUs")
    parser.add_argument(
        "--gpu_memory_gib", type=_positive, default=None, help="another memory of each GPU than its type's"
    )
    parser.add_argument(
        "--gpu_tflops", type=_positive, default=None, help="another peak in bf16 than its type's, dense"
    )
    parser.add_argument("--gpus_per_node", type=_positive_int, default=8, help="GPUs of a node")
    parser.add_argument(
        "--nodes",
        type=_positive_int,
        default=None,
        help="nodes; by default as many as learners and engines need",
    )
    parser.add_argument("--network_gbps", type=_positive, default=400.0, help="network of each GPU, Gbit/s one way")
    parser.add_argument("--suggest", type=_count, default=5, help="layouts to rank; 0 ranks none")
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the plan as JSON")
    parser.add_argument(
        "--hf_config", metavar="FILE", default=None, help="the model's config.json, where its folder is not available"
    )
    rehearsal = parser.add_argument_group(
        "rehearsal",
        "Run a real training step of learner ranks on tensors without values that believe they are on CUDA: does it run, "
        "what does it hold, send and compute, and where does the host wait? Exit status 1 where the step fails.",
    )
    rehearsal.add_argument("--rehearse", action="store_true", help="rehearse, and compare with the plan")
    which = rehearsal.add_mutually_exclusive_group()
    which.add_argument("--rank", type=_count, default=None, metavar="N", help="only this learner")
    which.add_argument(
        "--all_roles",
        "--all-roles",
        action="store_true",
        help="one rank of every kind: of each pipeline stage, and one that reports metrics (the default)",
    )
    assumed = parser.add_argument_group("assumptions", "shares, seconds and sizes that nothing here measures")
    documents = field_docs(Assumptions)
    assumed.add_argument(
        "--response_lengths",
        type=_recorded,
        metavar="FOLDER",
        default=(),
        help="completions that a run has written (save_traces): their lengths in place of response_share and response_spread",
    )
    for field in dataclasses.fields(Assumptions):
        if field.name == "response_lengths":
            continue
        kind = _share if field.name.endswith(("_efficiency", "_share", "_fill")) else _not_negative
        kind = _positive if field.name.endswith("_s") else kind
        assumed.add_argument(
            f"--{field.name}", type=kind, default=field.default, help=documents.get(field.name, "").replace("%", "%%")
        )
    return parser


def _recorded(text: str) -> tuple[float, ...]:
    try:
        return recorded_lengths(Path(text))
    except (OSError, ValueError) as err:
        raise argparse.ArgumentTypeError(str(err)) from None


def _gpu(text: str) -> str:
    """GPU name in any case."""
    return next((name for name in GPUS if name.lower() == text.lower()), text)


def _other(gpu: Gpu, **values: float | None) -> Gpu:
    """The GPU with the values that are given."""
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(gpu, **given)


def _number(text: str, *, low: float, high: float, is_open: bool, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (low < value if is_open else low <= value) or not value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} must be {wanted}")
    return value


def _positive(text: str) -> float:
    return _number(text, low=0, high=1e9, is_open=True, wanted="a number above 0")


def _not_negative(text: str) -> float:
    return _number(text, low=0, high=1e9, is_open=False, wanted="a number, 0 or more")


def _share(text: str) -> float:
    return _number(text, low=0, high=1, is_open=True, wanted="a share above 0, at most 1")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 0 or more")
    return int(text)


def _positive_int(text: str) -> int:
    if _count(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def _model_config(hf_config: str | None, name: str | None, revision: str | None) -> dict[str, Any]:
    """The model's config.json: the given file, the one in the model's folder, a shipped one, or the Hub's."""
    if hf_config:
        try:
            return json.loads(Path(hf_config).read_text())
        except (OSError, json.JSONDecodeError) as err:
            raise ValueError(f"hf_config={hf_config} cannot be read: {err}") from err
    if not name:
        raise ValueError("model_name_or_path is not set; give it, or --hf_config FILE")
    if Path(name).is_dir():
        return read_hf_config(name)
    shipped = None if revision else shipped_config(name)
    if shipped is None and is_hub_name(name):
        try:
            return read_hf_config(fetch(name, revision=revision, part="config").folder)
        except HubError as err:
            raise ValueError(f"model_name_or_path={err}; or give its config.json: --hf_config FILE") from None
    if shipped is None:
        known = ", ".join(shipped_configs())
        raise ValueError(
            f"model_name_or_path={name} is neither a folder here nor a model known by name ({known}); "
            "give its config.json: --hf_config FILE"
        )
    return shipped


def _stored_problems(setting: str, folder: str, shape: ModelShape) -> list[str]:
    """Reasons why a run would refuse the weights in this folder; none where it has only a config.json."""
    if not any(Path(folder).glob("*.safetensors")) or not is_hf_format(folder):
        return []
    return [f"{setting}={problem}" for problem in weight_problems(folder, shape)]


def _teacher_config(name: str) -> dict[str, Any]:
    """The same of a teacher."""
    try:
        return _model_config(None, name, None)
    except ValueError as err:
        raise ValueError(str(err).replace("model_name_or_path", TEACHERS, 1).partition("; ")[0]) from None


@cache
def shipped_configs() -> dict[str, dict[str, Any]]:
    """config.json of each shipped model, by its name in small letters."""
    families = json.loads(SHIPPED.read_text())
    return {
        name: family["every"] | own for family in families.values() for name, own in family.items() if name != "every"
    }


def shipped_name(model: str) -> str | None:
    """The longest shipped name that begins the model's: `qwen2.5-7b` for `Qwen/Qwen2.5-7B-Instruct`."""
    base = Path(model).name.lower().removeprefix("meta-")
    return max((name for name in shipped_configs() if f"{base}-".startswith(f"{name}-")), key=len, default=None)


def shipped_config(model: str) -> dict[str, Any] | None:
    """A copy of config.json of the model with that name, or None."""
    name = shipped_name(model)
    return None if name is None else dict(shipped_configs()[name])


def _sizes(config: Config, nodes: int | None, gpus_per_node: int) -> tuple[int, int]:
    """Learner ranks and nodes: as configured, or all GPUs that engines do not use, in whole copies of the model.

    Where they share GPUs, there are as many learners as workers of engines.
    """
    infer = infer_layout_of(config.engine)
    engines = infer.engines * infer.workers
    engines += num_teacher_workers(config) if not config.engine.shares_gpus else 0
    if config.engine.shares_gpus:
        learners = sum(config.parallel.num_learners_per_node) or engines
        return learners, nodes or -(-learners // gpus_per_node)
    copy = max(_model_parallel_size(config.parallel), 1)  # `problems` reports sizes below 1
    counts = config.parallel.num_learners_per_node
    if counts:
        return sum(counts), nodes or max(len(counts), -(-(sum(counts) + engines) // gpus_per_node))
    nodes = nodes or -(-(copy + engines) // gpus_per_node)
    return max((nodes * gpus_per_node - engines) // copy, 1) * copy, nodes


def _model_parallel_size(parallel: Parallel) -> int:
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
