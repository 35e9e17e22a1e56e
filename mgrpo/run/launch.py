"""The order in which a run comes up, and how it goes down.

Everything that can be wrong is checked first; then, on rank 0, Ray and the engines are started, because they take longest;
then torch and Megatron are imported. This module imports none of them at its top.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from mgrpo.checkpoint.folder import check_complete, check_root, latest, split_path
from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import state_root
from mgrpo.config.rules import too_few_prompts
from mgrpo.config.validate import check, warnings
from mgrpo.models.family import read_hf_config, shape_of
from mgrpo.processes.lifetime import die_with_parent
from mgrpo.rollout.vllm.arguments import machine_problems
from mgrpo.run.inputs import as_functions

if TYPE_CHECKING:
    from mgrpo.algo import LossFunction
    from mgrpo.run.inputs import Inputs
    from mgrpo.run.production import Started
    from mgrpo.run.result import TrainResult


def train(
    config: Config,
    *,
    reward_funcs: Sequence[str | Callable] | str | Callable | None = None,
    dataset: Iterable[Mapping] | None = None,
    loss: LossFunction | None = None,
) -> TrainResult | None:
    """Train a model: the same as the command line. Under torchrun every rank must call it; alone it is one rank.

    Args:
        reward_funcs: called on rank 0 in place of the rows' verifiers and of the configuration's `reward_funcs`,
            `f(prompts, completions, completion_ids, **columns) -> list[float | None]` as in TRL; several are added up,
            each times its entry of `reward_weights`.
        dataset: rows in the form of a JSONL file, or a `datasets.Dataset`, instead of `dataset_mixer_list`.
        loss: called on every rank in place of the configuration's `policy_loss`, see `mgrpo.algo.LossFunction`.
    Returns:
        None with `cache_dataset_only`, which ends when the data are prepared.
    Raises:
        ConfigError: every problem with the configuration and the data at once, before anything is started.
    """
    functions = as_functions(reward_funcs)
    inputs = _check(config, functions=functions, dataset=dataset, loss=loss)
    if config.experiment.cache_dataset_only:
        _prepare_data(config, inputs)
        return None
    return _start(config, inputs, loss)


def try_out(config: Config) -> None:
    """Everything a run does, for one step and into a folder that is deleted: what is wrong shows before GPUs wait for it.

    All data are read and checked; no evaluation is run. Every rank must call it.
    """
    inputs = _check(config, functions=[], dataset=None)
    is_head = _rank() == 0
    with tempfile.TemporaryDirectory(prefix="mgrpo-dry-run-") if is_head else nullcontext("unused") as folder:
        one_step = dataclasses.replace(
            config,
            experiment=dataclasses.replace(
                config.experiment, total_episodes=config.batch_size, output_dir=folder, local_eval_every=-1
            ),
            data=dataclasses.replace(config.data, dataset_mixer_eval_list=(), dataset_mixer_eval_list_splits=("test",)),
            rollout=dataclasses.replace(config.rollout, save_traces=False),
            # A model that is always right or always wrong has to do its step, too.
            algorithm=dataclasses.replace(config.algorithm, filter_zero_std_samples=False, active_sampling=False),
            checkpoint=dataclasses.replace(
                config.checkpoint,
                save_final=False,
                checkpoint_state_freq=-1,
                checkpoint_state_dir=None,
                gs_checkpoint_state_dir=None,
                resume="never",
            ),
        )
        _start(one_step, inputs)
    if is_head:
        print("dry run: configuration, data, layout and one step are sound; nothing was kept")


def _prepare_data(config: Config, inputs: Inputs | None) -> None:
    """Tokenise the data into the cache, and say what came of it."""
    if inputs is None:
        return
    from mgrpo.data.statistics import statistics_lines
    from mgrpo.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer_path)
    for name, mixture in (("training", inputs.train), ("held-out", inputs.held_out)):
        if len(mixture):
            prompts = mixture.encode(tokenizer)
            print(f"{name} data in {prompts.folder}", *statistics_lines(prompts.statistics), sep="\n  ")


class StopRequest:
    """What SIGTERM asks of rank 0: to end once the state is saved; or at once, when it comes again or nothing is trained yet."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.is_heeded = False
        """Whether there is a trainer that looks at `event`."""

    def on_signal(self, number: int, frame: object) -> None:
        """The signal handler."""
        if self.event.is_set() or not self.is_heeded:
            sys.exit(128 + number)
        self.event.set()


def _start(config: Config, inputs: Inputs | None, loss: LossFunction | None = None) -> TrainResult:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM if _rank() == 0 else signal.SIGKILL)
    prepare_environment()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = StopRequest()
    try:
        if inputs is None:
            # Rank 0 saves the run's state with the help of all, and says when the run is over.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return _run(config, None, stop, loss)
        from mgrpo.run.production import started

        with started(config, inputs, num_local_learners=_num_local_learners()) as parts:
            # After ray.init, which sets its own handler.
            signal.signal(signal.SIGTERM, stop.on_signal)
            try:
                return _run(config, parts, stop, loss)
            finally:
                # A second signal must not cut the clean-up short.
                for number in handlers:
                    signal.signal(number, signal.SIG_IGN)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _resume_from(config: Config) -> str | None:
    """The checkpoint that the run continues."""
    choice = config.checkpoint.resume
    return latest(state_root(config)) if choice == "auto" else None if choice == "never" else choice


def _check(
    config: Config,
    *,
    functions: list[str | Callable],
    dataset: Iterable[Mapping] | None,
    loss: LossFunction | None = None,
) -> Inputs | None:
    """Configuration on every rank, on rank 0 data and rewards too, which it returns; all problems in one error."""
    world_size, is_head = _world_size(), _rank() == 0
    problems = []
    hf_config, about_model = None, []
    try:
        hf_config = read_hf_config(config.model.model_name_or_path or "")
        head_dim = shape_of(hf_config).head_dim
        about_model = machine_problems(config, num_local_learners=_num_local_learners(), head_dim=head_dim)
    except ValueError as err:
        about_model = [str(err)]
    inputs = None
    try:
        check(
            config,
            world_size=world_size,
            hf_config=hf_config,
            has_dataset=dataset is not None,
            num_reward_funcs=len(functions),
        )
    except ConfigError as err:
        problems = list(err.problems)
    if not any("model_name_or_path" in problem for problem in problems):
        problems += about_model
    problems += _loss_problems(config, loss)
    if is_head:
        try:
            check_root(state_root(config))
            is_path = config.checkpoint.resume not in ("auto", "never")
            if is_path and not any(problem.startswith("resume=") for problem in problems):
                check_complete(*split_path(config.checkpoint.resume))
        except ValueError as err:
            problems.append(str(err))
        from mgrpo.run.inputs import read_inputs

        inputs, found = read_inputs(config, functions=functions, dataset=dataset)
        problems += [problem for problem in found if problem not in problems]
        if inputs and len(inputs.train):
            problems += too_few_prompts(config, len(inputs.train))
    if problems:
        raise ConfigError(problems)
    if inputs is not None:
        found = warnings(config, world_size=world_size, hf_config=hf_config, num_reward_funcs=len(functions))
        for sentence in (*config.notes, *found, *inputs.notes(config)):
            print(f"mgrpo: {sentence}", file=sys.stderr)
    return inputs


def _loss_problems(config: Config, loss: LossFunction | None) -> list[str]:
    """What is wrong with a loss of the user's own, whose module imports torch; named losses do without that here."""
    if loss is None and not config.loss.is_own_function:
        return []
    prepare_environment()
    from mgrpo.algo import loss_problems

    return loss_problems(config.loss, loss)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _num_local_learners() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def prepare_environment() -> None:
    """Set what must be set before torch is imported; what the user has set stays."""
    defaults = {
        # Spinning OpenMP threads on a busy machine make a matmul 20 times slower.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if os.environ.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _run(config: Config, parts: Started | None, stop: StopRequest, loss: LossFunction | None) -> TrainResult:
    # What torch and Megatron make while they are imported stays: without the collector that takes a fifth less time.
    gc.disable()
    from mgrpo.parallel import backend

    backend.install()
    from mgrpo.run.assembly import make_trainer
    from mgrpo.run.lead import Lead, Stopped

    gc.freeze()
    gc.enable()
    rank = _rank()
    backend.init_process_group(rank=rank, world_size=_world_size(), timeout_minutes=config.experiment.backend_timeout)
    lead = Lead(stop.event)
    trainer = None
    try:
        trainer = make_trainer(config, lead, parts, resume_from=_resume_from(config) if parts else None, loss=loss)
        stop.is_heeded = True
        result = trainer.fit()
    except Stopped:
        assert trainer is not None
        trainer.close()
        sys.exit(128 + signal.SIGTERM)
    except BaseException as err:
        if trainer is not None:
            trainer.states.stop()
            trainer.reporter.close()
        lead.fail(f"rank {rank}: {err!r}")
        raise
    trainer.close()
    return result
