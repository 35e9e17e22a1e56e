"""`mgrpo eval`: a model on the held-out prompts of a configuration, with the engines and verifiers of a run and no learner.

The engine loads the exported folder by itself. Everything else is as in an evaluation during training, including settings, order
of the prompts and random streams, so that an export has the same numbers as in its run.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgrpo.checkpoint.folder import MANIFEST
from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import bounded, fitted, widest_cut
from mgrpo.config.validate import problems
from mgrpo.models.cuts import size_of
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.hf_files.weight_files import MEGATRON, TORCH_DIST_INDEX, TRACKER
from mgrpo.models.shape import ModelShape
from mgrpo.moving import parse
from mgrpo.moving.config_doors import with_tools
from mgrpo.rollout.start import machine_problems, serving_gpus
from mgrpo.run.inputs.continuing import look_for_state
from mgrpo.run.inputs.disk_space import output_problems
from mgrpo.run.inputs.lesser_runs import for_evaluation, model_name
from mgrpo.run.inputs.reading import as_functions
from mgrpo.run.inputs.snapshots import located, names_some
from mgrpo.run.report.result import EvaluationResult
from mgrpo.run.start.check import changed_files, file_problems, with_prompts

if TYPE_CHECKING:
    from rich.table import Table

    from mgrpo.run.inputs.reading import Inputs
    from mgrpo.run.produce.production import Production
    from mgrpo.run.report.listener import RunListener


def eval_command(argv: Sequence[str]) -> int:
    """`mgrpo eval`: parse, evaluate, print."""
    try:
        result = evaluate(parse(list(argv), prog="mgrpo eval", defer=True))
    except ConfigError as err:
        sys.stderr.write(f"mgrpo: {err}\n")
        return 2
    from rich.console import Console

    console = Console()
    console.print(summary(result.metrics))
    console.print(f"samples and report are in {result.output_dir}", markup=False, highlight=False, soft_wrap=True)
    return 0


def evaluate(
    config: Config,
    *,
    reward_funcs: Sequence[str | Callable] | str | Callable | None = None,
    eval_dataset: Iterable[Mapping] | Mapping[str, Iterable[Mapping]] | None = None,
    tools: Sequence[str | Callable] | Callable | None = None,
    environment_factory: Callable | Mapping[str, Callable] | None = None,
    rollout_func: Callable | None = None,
    listener: RunListener | None = None,
) -> EvaluationResult:
    """Sample the held-out prompts with the model of `config` and score them; one process, without torchrun.

    Writes to `output_dir/eval/NAME`, where NAME is the model folder's; files of an earlier evaluation there are renamed.

    Args:
        config: as `mgrpo.GRPOConfig(...)` makes it.
        reward_funcs: as in `mgrpo.train`, and likewise the arguments below.
        eval_dataset: held-out rows, or several sets by name, instead of `dataset_mixer_eval_list`.
        tools: functions and environments that the model may call.
        environment_factory: classes and functions of environments.
        rollout_func: a function that samples.
        listener: callbacks of the evaluation.
    Returns:
        Metrics, and the folder of the files.
    Raises:
        ConfigError: every problem with the configuration and the data at once, before anything is started.
    """
    own = {"tools": tools, "environment_factory": environment_factory, "rollout_func": rollout_func}
    config = with_tools(config, own)
    with ready(config, as_functions(reward_funcs), eval_dataset) as (config, production):
        from mgrpo.run.report.reporter import Reporter

        evaluator = production.evaluator
        with closing(Reporter(config, scale=evaluator.rewarder.scale, listener=listener)) as reporter:
            step = re.fullmatch(r"step_([0-9]{1,18})", model_name(config))
            metrics = reporter.evaluation(
                evaluator.evaluate(done=0), step=int(step[1]) if step else 0, policy_version=None
            )
    return EvaluationResult(output_dir=reporter.output_dir, metrics=metrics)


@contextmanager
def ready(
    config: Config,
    functions: list[str | Callable],
    eval_dataset: Iterable[Mapping] | Mapping[str, Iterable[Mapping]] | None = None,
) -> Iterator[tuple[Config, Production]]:
    """Start engines, environments and verifiers for the held-out prompts of `config`; yields them with their configuration.

    Raises:
        ConfigError: see `evaluate`.
    """
    continued, _ = look_for_state(config) if names_some(config) else (None, "")
    config = located(config, continued)
    own, inputs = _check(config, functions, eval_dataset)
    for sentence in config.notes:
        print(f"mgrpo: {sentence}", file=sys.stderr)
    if config.engine.vllm_mode == "server":
        print("mgrpo: starts an engine of its own, because a server may have other weights", file=sys.stderr)
    config = own

    from mgrpo.run.inputs.lock import locked
    from mgrpo.run.produce.production import prepare, started
    from mgrpo.run.ranks import ending
    from mgrpo.run.ranks.process import prepare_environment

    prepare_environment(config)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            locked([config.experiment.output_dir], on_lost=ending.leave),
            started(config, inputs, num_local_learners=0, on_failure=None) as parts,
        ):
            # After ray.init, which sets its own handler.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
            yield config, prepare(config, parts)
    finally:
        signal.signal(signal.SIGTERM, before)


def summary(metrics: Mapping[str, float]) -> Table:
    """The metrics as a table for a terminal, accuracy first."""
    from rich.table import Table

    table = Table(title="evaluation")
    table.add_column("metric")
    table.add_column("value", justify="right")
    first = [name for name in metrics if name.startswith("eval/pass_at_")]
    for name in [*first, *(name for name in metrics if name not in first)]:
        table.add_row(name.removeprefix("eval/"), f"{metrics[name]:.4g}")
    return table


def _check(
    config: Config,
    functions: list[str | Callable],
    eval_dataset: Iterable[Mapping] | Mapping[str, Iterable[Mapping]] | None,
) -> tuple[Config, Inputs]:
    """The evaluation's configuration, held-out data and rewards; all problems in one error."""
    from mgrpo.run.inputs.reading import read_inputs

    own = for_evaluation(config)
    hf_config, about_model = _model(own)
    own = bounded(own, size_of(hf_config or {}, "max_position_embeddings"))
    if serving_gpus():
        own = widest_cut(own, size_of(hf_config or {}, "vocab_size"))
    found = problems(own, world_size=1, hf_config=hf_config, has_dataset=True, num_reward_funcs=len(functions))
    if unloadable := _unloadable(own.model_path):
        found = [problem for problem in found if not problem.startswith("model_name_or_path")] + unloadable
    elif not any(problem.startswith("model_name_or_path") for problem in found):
        found += about_model
    if eval_dataset is None and not own.data.dataset_mixer_eval_list:
        found.append("dataset_mixer_eval_list is empty; name the held-out data: --dataset_mixer_eval_list PATH 1.0")
    inputs, about_inputs = read_inputs(own, functions=functions, eval_dataset=eval_dataset)
    found += [problem for problem in about_inputs if problem not in found]
    if hf_config and not unloadable:
        found += file_problems(own, _shape(hf_config))
        found += changed_files(own, of_weights=True)
        inputs = with_prompts(own, inputs, hf_config, found)
    found += output_problems(own, None)
    if found or inputs is None:
        raise ConfigError(found)
    return fitted(own, inputs.prompts.longest) if inputs.prompts else own, inputs


def _model(config: Config) -> tuple[Mapping[str, Any] | None, list[str]]:
    """The model's config.json, and problems with serving it on this machine.

    Any model that vLLM serves is accepted, also one that cannot be trained here.
    """
    folder = config.model_path
    try:
        hf_config = read_hf_config(folder)
        return hf_config, machine_problems(config, num_local_learners=0, hf_config=hf_config, starts_engines=True)
    except KeyError as err:
        return None, [f"{folder}/config.json lacks {err}"]
    except ValueError as err:
        return None, [f"model_name_or_path={err}"]


def _shape(hf_config: Mapping[str, Any]) -> ModelShape | None:
    try:
        return shape_of(hf_config)
    except ValueError:
        return None


def _unloadable(model: str | None) -> list[str]:
    """Problem of a folder of mgrpo's that an engine cannot load by itself."""
    kinds = dict.fromkeys((TORCH_DIST_INDEX, TRACKER), "a checkpoint of Megatron-core")
    kinds |= {MEGATRON: "a Megatron folder", MANIFEST: "a training state"}
    for mark, kind in kinds.items():
        if model and (Path(model) / mark).is_file():
            return [
                f"model_name_or_path={model} is {kind}, which no engine can load by itself; export it first: "
                f"mgrpo convert megatron-to-hf --checkpoint {model} --out DIR"
            ]
    return []
