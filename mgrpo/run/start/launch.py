"""The start and the end of a run.

All checks come first, on rank 0 with the tokenizer and all data; then rank 0 starts Ray and the engines, because they take
longest; then Megatron is imported. This module imports none of them at its top.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import counts_of, same_counts
from mgrpo.config.user_functions import short_name
from mgrpo.moving.config_doors import as_config, with_tools
from mgrpo.processes.lifetime import die_with_parent
from mgrpo.processes.user_code import UserCodeError
from mgrpo.rollout.start import serving_gpus
from mgrpo.run.inputs.continuing import Continued, look_for_state
from mgrpo.run.inputs.disk_space import owned_folders
from mgrpo.run.inputs.lesser_runs import for_one_step
from mgrpo.run.inputs.lock import in_use, locked
from mgrpo.run.inputs.reading import as_functions
from mgrpo.run.inputs.snapshots import located, names_some, origin
from mgrpo.run.ranks import ending
from mgrpo.run.ranks.engine_requests import controllable
from mgrpo.run.ranks.liveness import Liveness
from mgrpo.run.ranks.process import (
    Store,
    has_launcher,
    meeting_host,
    num_local_learners,
    prepare_environment,
    process_age_s,
    rank,
    store_socket,
    world_size,
)
from mgrpo.run.report.result import NothingTrained
from mgrpo.run.start.check import check_run
from mgrpo.telemetry.progress import StartUp

OTHER_CAUSE_S = 3.0
"""Seconds that an error which another rank may have caused waits for that rank's own error."""
_NUMBERS = itertools.count()
"""Numbers of the runs of this process, which may share torchrun's store."""

if TYPE_CHECKING:
    from mgrpo.algo import AdvantageFunction, LossFunction
    from mgrpo.run.inputs.reading import Inputs
    from mgrpo.run.produce.production import Started
    from mgrpo.run.report.listener import RunListener
    from mgrpo.run.report.result import TrainResult


def train(
    config: Config | Mapping[str, object] | str | Path,
    *,
    reward_funcs: Sequence[str | Callable] | str | Callable | None = None,
    dataset: Iterable[Mapping] | None = None,
    eval_dataset: Iterable[Mapping] | Mapping[str, Iterable[Mapping]] | None = None,
    loss: LossFunction | None = None,
    advantage_fn: AdvantageFunction | None = None,
    tools: Sequence[str | Callable] | Callable | None = None,
    environment_factory: Callable | Mapping[str, Callable] | None = None,
    rollout_func: Callable | None = None,
    listener: RunListener | None = None,
) -> TrainResult | None:
    """Train a model: the same as the command line. Under torchrun every rank must call it; alone it is one rank.

    Args:
        config: an `mgrpo.GRPOConfig(...)`, a dict of settings, or the path of a YAML file.
        reward_funcs: called on rank 0 in place of the rows' verifiers and of the configuration's `reward_funcs`,
            `f(prompts, completions, completion_ids, **columns) -> list[float | None]` as in TRL; several are added up,
            each times its entry of `reward_weights`.
        dataset: rows in the form of a JSONL file, or a `datasets.Dataset`, instead of `dataset_mixer_list`.
        eval_dataset: held-out rows in the same form, instead of `dataset_mixer_eval_list`; or several such sets by name.
        loss: called on every rank in place of the configuration's `policy_loss`, see `mgrpo.algo.LossFunction`.
        advantage_fn: called on rank 0 in place of the configuration's `advantage_normalization_type`, see
            `mgrpo.algo.AdvantageFunction`.
        tools: functions and environments that the model may call, in place of the configuration's; as in TRL. Other processes
            import them, so they stand at the top of a module, or of a script that does its work under `__name__ == "__main__"`.
        environment_factory: as the setting of this name, also such classes and functions.
        rollout_func: as the setting of this name, also such a function.
        listener: callbacks on rank 0, which may also end the run.
    Returns:
        Metrics and files of the run; None with `cache_dataset_only`, which ends when the data are prepared.
    Raises:
        ConfigError: every problem with the configuration and the data at once, before anything is started.
        UserCodeError: a reward function failed; a note names the line.
        NothingTrained: when everything has been written, if no step changed the weights.
    """
    own = {"tools": tools, "environment_factory": environment_factory, "rollout_func": rollout_func}
    config, continued, about_state = _found(_with_estimator(with_tools(as_config(config), own), advantage_fn))
    config, inputs = check_run(
        config,
        continued=continued,
        about_state=about_state,
        functions=as_functions(reward_funcs),
        dataset=dataset,
        eval_dataset=eval_dataset,
        loss=loss,
        advantage_fn=advantage_fn,
    )
    if config.experiment.cache_dataset_only:
        _show_data(config, inputs)
        return None
    try:
        result = _start(config, inputs, continued, loss, listener)
    except UserCodeError as err:
        # The frames between this call and the user's code do not help its author.
        raise err.with_traceback(None) from None
    if rank() == 0:
        print("", *result.where(has_held_out=bool(config.data.dataset_mixer_eval_list)), sep="\n", flush=True)
        if inputs is not None:
            from mgrpo.run.report.publish import publish

            publish(config, inputs, result)
    if not result.has_trained:
        raise NothingTrained(result)
    return result


def try_out(config: Config) -> None:
    """Run one step into a folder that is deleted, to find problems before a real run. Every rank must call it.

    All data are read and checked; there is no evaluation.
    """
    config, continued, about_state = _found(config)
    config, inputs = check_run(
        config,
        continued=continued,
        about_state=about_state,
        functions=[],
        dataset=None,
        eval_dataset=None,
        loss=None,
    )
    leads = rank() == 0
    with tempfile.TemporaryDirectory(prefix="mgrpo-dry-run-") if leads else nullcontext("unused") as folder:
        tried = dataclasses.replace(inputs, evaluates=False) if inputs else None
        _start(for_one_step(config, folder), tried)
    if leads:
        print("dry run passed: configuration, data, layout and one step; no files were kept")


def _found(config: Config) -> tuple[Config, Continued | None, str]:
    """`config` with the folders of the models that it names on the Hub; the state that the run continues, or its problem.

    Other ranks look for the state only if they need its commits; rank 0's is used.
    """
    continued, about_state = None, ""
    if rank() == 0 or names_some(config):
        # A run that is about to end there may save one more state. Problems of the folders are reported later.
        with suppress(ValueError, OSError):
            for folder in owned_folders(config) if rank() == 0 and config.checkpoint.resume != "never" else ():
                in_use(folder)
        continued, about_state = look_for_state(config)
    return located(config, continued), continued, about_state


def _with_estimator(config: Config, function: AdvantageFunction | None) -> Config:
    """`config`, which names the function as the source of its advantages; it is not imported by that name."""
    if function is None:
        return config
    # An object without a name of its own, such as a partial function, has another representation in every process.
    own = function if hasattr(function, "__qualname__") else type(function)
    name = f"{own.__module__}:{short_name(own)}"
    return dataclasses.replace(
        config, algorithm=dataclasses.replace(config.algorithm, advantage_normalization_type=name)
    )


def _show_data(config: Config, inputs: Inputs | None) -> None:
    """Print the folders and statistics of the tokenized data."""
    if inputs is None or inputs.prompts is None:
        return
    from mgrpo.data.statistics import statistics_lines

    for name, prompts in (("training", inputs.prompts.train), ("held-out", inputs.prompts.held_out)):
        if prompts is not None:
            print(f"{name} data in {prompts.folder}", *statistics_lines(prompts.statistics), sep="\n  ")


class StopRequest:
    """SIGTERM on rank 0: end the run once its state is saved; at once on a second signal, or before training has begun."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.is_polled = False
        """True once a trainer polls `event`."""

    def on_signal(self, number: int, frame: object) -> None:
        """The signal handler."""
        if self.event.is_set() or not self.is_polled:
            sys.exit(128 + number)
        self.event.set()


def _start(
    config: Config,
    inputs: Inputs | None,
    continued: Continued | None = None,
    loss: LossFunction | None = None,
    listener: RunListener | None = None,
) -> TrainResult:
    if has_launcher():
        die_with_parent(signal.SIGTERM if rank() == 0 else signal.SIGKILL)
    prepare_environment(config)
    ending.begin()
    watch = Liveness(
        rank=rank(),
        world_size=world_size(),
        timeout_s=config.experiment.learner_timeout,
        on_failure=ending.leave,
        on_goodbye=ending.follow,
    )
    with ending.bounded(partial(watch.leave, is_failing=True)):
        return _run_with_engines(config, inputs, continued, watch, loss, listener)


def _run_with_engines(
    config: Config,
    inputs: Inputs | None,
    continued: Continued | None,
    watch: Liveness,
    loss: LossFunction | None,
    listener: RunListener | None,
) -> TrainResult:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()
    try:
        if inputs is None:
            return _run(config, None, None, stop, watch, loss, listener)
        from mgrpo.run.produce.production import started

        # The main thread may be in a collective that waits for the engines.
        leave = partial(ending.leave_within, seconds=ending.CLEAN_UP_S)

        def lost(reason: str) -> None:
            """End the process at once: nothing more may be written to the folder."""
            watch.leave(is_failing=True)
            ending.leave(reason)

        with (
            locked(owned_folders(config), on_lost=lost) as release,
            started(
                config, inputs, num_local_learners=num_local_learners(), on_failure=leave, startup=_startup()
            ) as parts,
            controllable(parts.fleet.roster, config.experiment.output_dir),
        ):
            # After ray.init, which sets its own handler.
            signal.signal(signal.SIGTERM, stop.on_signal)
            try:
                return _run(config, parts, continued, stop, watch, loss, listener)
            finally:
                # A second signal must not cut the clean-up short.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                # While Ray shuts down, SIGTERM ends this process for a moment all the same.
                release()
    finally:
        signal.signal(signal.SIGTERM, before)


def _startup() -> StartUp:
    """Start-up clock, from the start of this process if the run owns it."""
    return StartUp(began=time.monotonic() - process_age_s()) if has_launcher() else StartUp()


def _meet(config: Config, watch: Liveness) -> str:
    """Form the process group of all ranks and start their heartbeats; returns this machine's address for other ranks."""
    from torch.distributed import DistError, PrefixStore

    from mgrpo.parallel import backend

    limit_s = config.experiment.learner_timeout
    try:
        store = backend.meeting_store(rank=rank(), world_size=world_size(), timeout_s=limit_s, socket=store_socket())
        store = PrefixStore(f"run {next(_NUMBERS)}", store)
        host = meeting_host(store)
        if world_size() > 1 and rank() == 0:
            store.set("watch", watch.listen(host))
        elif world_size() > 1:
            watch.connect(store.get("watch").decode())
        _compare_commits(config, store)
    except (DistError, OSError) as err:
        raise RuntimeError(
            f"rank {rank()} has not met the others within learner_timeout={limit_s} s of the start: {err}"
        ) from err
    backend.init_process_group(
        rank=rank(), world_size=world_size(), timeout_minutes=config.experiment.backend_timeout, store=store
    )
    return host


def _compare_commits(config: Config, store: Store) -> None:
    """Raise RuntimeError if machines resolved a model to different commits: a branch may move between their requests."""
    own = origin(config)["commits"]
    if rank() == 0:
        store.set("commits", json.dumps(own))
    elif (others := json.loads(store.get("commits"))) != own:
        name = next(name for name in own.keys() | others.keys() if own.get(name) != others.get(name))
        raise RuntimeError(
            f"{name} leads to {own.get(name, 'a folder')} here, but to {others.get(name, 'a folder')} on rank 0's machine; "
            "start again, or give a commit as revision"
        )


def _run(
    config: Config,
    parts: Started | None,
    continued: Continued | None,
    stop: StopRequest,
    watch: Liveness,
    loss: LossFunction | None,
    listener: RunListener | None,
) -> TrainResult:
    if parts:
        parts.startup.say("importing torch and Megatron", "import")
    # Importing torch and Megatron makes a million objects that stay: without the collector it takes a fifth less time.
    gc.disable()
    from mgrpo.parallel import backend

    backend.install()
    _check_gpus()
    from mgrpo.run.ranks.lead import Lead, Stopped
    from mgrpo.run.start.assembly import make_trainer

    gc.freeze()
    gc.enable()
    if parts:
        parts.startup.enter("meet")
    host = _meet(config, watch)
    if parts is None:
        # Ranks end when rank 0 ends the run: all of them take part in saving its state.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lead = Lead(stop.event, watch.pulse)
    trainer = None
    try:
        # Rank 0 has counted the prompts.
        config = same_counts(config, lead.share(lambda: counts_of(config)))
        trainer = make_trainer(config, lead, parts, host=host, continued=continued, loss=loss, listener=listener)
        stop.is_polled = True
        result = trainer.fit()
    except Stopped as err:
        assert trainer is not None
        reason = str(err)
        if reason and parts:
            ending.report(reason)
        trainer.close(reason)
        watch.leave(is_failing=False)
        sys.exit(1 if reason else 128 + signal.SIGTERM)
    except BaseException as err:
        if trainer is not None:
            trainer.states.stop()
            trainer.reporter.close("" if isinstance(err, KeyboardInterrupt) else f"{type(err).__name__}: {err}")
            if isinstance(err, KeyboardInterrupt) and parts:
                ending.report_interrupt(f" after step {trainer.done}; {trainer.states.how_to_go_on_from_newest()}")
        if not isinstance(err, KeyboardInterrupt):
            if _may_follow_from_another(err) and watch.has_other_cause(OTHER_CAUSE_S):
                ending.silence()
            # Before the other ranks end, because their launcher then ends this one during its clean-up.
            if has_launcher() and not isinstance(err, SystemExit):
                ending.report_error(err)
            watch.leave(is_failing=True)
            lead.fail(f"rank {rank()}: {err!r}")
        lead.close()
        raise
    trainer.close()
    watch.leave(is_failing=False)
    return result


def _check_gpus() -> None:
    """Refuse learners on the CPU if engines would use this machine's GPUs, and learners on GPUs that engines would not find."""
    from mgrpo.parallel import backend

    gpus = serving_gpus()
    if gpus and not backend.has_cuda():
        raise ConfigError(
            [
                f"this machine has {len(gpus)} GPUs for engines, but torch finds none for learners: {backend.why_no_cuda()}"
            ]
        )
    if backend.has_cuda() and not gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        raise ConfigError(
            [
                "torch finds GPUs for learners, but engines would run on the CPU: nvidia-smi or /dev/nvidia0 is missing here, or vLLM is "
                "its CPU build; set CUDA_VISIBLE_DEVICES to the numbers of the GPUs, such as 0,1"
            ]
        )


def _may_follow_from_another(err: BaseException) -> bool:
    """True if another rank may have the cause: on any rank but 0, and on rank 0 for errors of collectives."""
    return rank() != 0 or any(name in str(err) for name in ("gloo", "NCCL"))
