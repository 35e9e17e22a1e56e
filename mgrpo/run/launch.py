"""How a run starts, and how it ends.

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
from pathlib import Path
from typing import TYPE_CHECKING

from mgrpo.config import Config
from mgrpo.config.load import as_config
from mgrpo.processes.lifetime import die_with_parent
from mgrpo.run.check import check_run
from mgrpo.run.continuing import state_path
from mgrpo.run.environment import num_local_learners, prepare_environment, rank, world_size
from mgrpo.run.inputs import as_functions
from mgrpo.run.lock import locked
from mgrpo.run.output import owned_folders

if TYPE_CHECKING:
    from mgrpo.algo import LossFunction
    from mgrpo.run.inputs import Inputs
    from mgrpo.run.production import Started
    from mgrpo.run.result import TrainResult


def train(
    config: Config | Mapping[str, object] | str | Path,
    *,
    reward_funcs: Sequence[str | Callable] | str | Callable | None = None,
    dataset: Iterable[Mapping] | None = None,
    loss: LossFunction | None = None,
) -> TrainResult | None:
    """Train a model: the same as the command line. Under torchrun every rank must call it; alone it is one rank.

    Args:
        config: an `mgrpo.GRPOConfig(...)`, a dict of settings, or the path of a YAML file.
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
    config = as_config(config)
    functions = as_functions(reward_funcs)
    inputs = check_run(config, functions=functions, dataset=dataset, loss=loss)
    if config.experiment.cache_dataset_only:
        _prepare_data(config, inputs)
        return None
    return _start(config, inputs, loss)


def try_out(config: Config) -> None:
    """A run of one step into a folder that is deleted, to find problems before a real run. Every rank must call it.

    All data are read and checked; there is no evaluation.
    """
    inputs = check_run(config, functions=[], dataset=None, loss=None)
    leads = rank() == 0
    with tempfile.TemporaryDirectory(prefix="mgrpo-dry-run-") if leads else nullcontext("unused") as folder:
        one_step = dataclasses.replace(
            config,
            experiment=dataclasses.replace(
                config.experiment, total_episodes=config.batch_size, output_dir=folder, local_eval_every=-1
            ),
            data=dataclasses.replace(config.data, dataset_mixer_eval_list=(), dataset_mixer_eval_list_splits=("test",)),
            rollout=dataclasses.replace(config.rollout, save_traces=False),
            # A model that is always right or always wrong must do its step as well.
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
    if leads:
        print("dry run passed: configuration, data, layout and one step; no files were kept")


def _prepare_data(config: Config, inputs: Inputs | None) -> None:
    """Tokenise the data into the cache, and print statistics."""
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
    """SIGTERM on rank 0: the run ends when its state is saved; immediately on a second signal, or before training has begun."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.is_polled = False
        """Whether there is a trainer that polls `event`."""

    def on_signal(self, number: int, frame: object) -> None:
        """The signal handler."""
        if self.event.is_set() or not self.is_polled:
            sys.exit(128 + number)
        self.event.set()


def _start(config: Config, inputs: Inputs | None, loss: LossFunction | None = None) -> TrainResult:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM if rank() == 0 else signal.SIGKILL)
    prepare_environment()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = StopRequest()
    try:
        if inputs is None:
            # Ranks end when rank 0 ends the run: all of them take part in saving its state.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return _run(config, None, stop, loss)
        from mgrpo.run.production import started

        with (
            locked(owned_folders(config)),
            started(config, inputs, num_local_learners=num_local_learners()) as parts,
        ):
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


def _run(config: Config, parts: Started | None, stop: StopRequest, loss: LossFunction | None) -> TrainResult:
    # Importing torch and Megatron makes a million objects that stay: without the collector it takes a fifth less time.
    gc.disable()
    from mgrpo.parallel import backend

    backend.install()
    from mgrpo.run.assembly import make_trainer
    from mgrpo.run.lead import Lead, Stopped

    gc.freeze()
    gc.enable()
    backend.init_process_group(rank=rank(), world_size=world_size(), timeout_minutes=config.experiment.backend_timeout)
    lead = Lead(stop.event)
    trainer = None
    try:
        trainer = make_trainer(config, lead, parts, resume_from=state_path(config) if parts else None, loss=loss)
        stop.is_polled = True
        result = trainer.fit()
    except Stopped as err:
        assert trainer is not None
        reason = str(err)
        if reason and parts:
            print(f"mgrpo: {reason}", file=sys.stderr)
        trainer.close()
        sys.exit(1 if reason else 128 + signal.SIGTERM)
    except BaseException as err:
        if trainer is not None:
            trainer.states.stop()
            trainer.reporter.close()
        lead.fail(f"rank {rank()}: {err!r}")
        lead.close()
        raise
    trainer.close()
    return result
