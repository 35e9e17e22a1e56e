"""Makes a rank's parts of a run and connects them. No work of the run itself is done here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from mgrpo import ops
from mgrpo.algo import LossFunction
from mgrpo.config import Config, ConfigError
from mgrpo.config.derived import layout_of
from mgrpo.config.fused_kernels import kernel_line
from mgrpo.data.pieces import TokenPieces
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.parallel import backend
from mgrpo.parallel.gather import gather_json
from mgrpo.run.inputs.continuing import Continued
from mgrpo.run.produce.production import Production, Started, prepare
from mgrpo.run.produce.source import SilentSource, Source
from mgrpo.run.ranks.lead import Lead
from mgrpo.run.ranks.process import local_rank, num_local_learners
from mgrpo.run.report.listener import RunListener
from mgrpo.run.report.reporter import Reporter, SilentReporter
from mgrpo.run.report.throughput import Throughput
from mgrpo.run.start.check import changed_files
from mgrpo.run.train.engine_weights import EngineWeights
from mgrpo.run.train.gpu_turns import GpuTurns
from mgrpo.run.train.learner import Learner
from mgrpo.run.train.resume import States, saved_rollouts
from mgrpo.run.train.trainer import Trainer
from mgrpo.telemetry.versions import package_versions


def make_trainer(
    config: Config,
    lead: Lead,
    started: Started | None,
    *,
    host: str,
    continued: Continued | None = None,
    loss: LossFunction | None = None,
    listener: RunListener | None = None,
) -> Trainer:
    """Build a trainer whose engines have the policy's weights. Collective over all learners.

    Args:
        started: the sampling half, on rank 0.
        host: address of this machine for other learners.
        continued: the state that the run continues; rank 0's is used.
        loss: in place of the configuration's `policy_loss`.
        listener: callbacks on rank 0.
    """
    host_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=config.experiment.backend_timeout))
    layout = layout_of(config, dist.get_world_size())
    shape = shape_of(read_hf_config(config.model_path))
    states = States(config, lead, host_group, host=host)
    checkpoint = states.open(continued.path if continued else None, shape)
    # It may be an earlier one, see `States.open`.
    continued = Continued.of(checkpoint) if checkpoint else None
    if config.engine.shares_gpus:
        # An engine refuses to start on a GPU that is not nearly empty, and both at once may not fit.
        lead.pulse.at("waiting for the engines")
        lead.run(partial(_wait_for_engines, started, sleep=config.engine.takes_turns))
    _say(started, f"loading the weights into {_learners()}", "weights")
    lead.pulse.at("loading the model")
    _check_weights(config, host_group)
    learner = Learner(
        config,
        shape=shape,
        layout=layout,
        host_group=host_group,
        checkpoint=checkpoint,
        loss=loss,
        on_progress=lead.pulse.go_on,
    )
    lead.pulse.at("waiting for the engines")
    # Ranks load at their own speed; after this, none keeps rank 0 waiting for long.
    dist.barrier(group=host_group)
    fleet = started.fleet if started else None
    weights = EngineWeights(
        learner.policy,
        shape=shape,
        layout=layout,
        settings=config.engine,
        lead=lead,
        fleet=fleet,
        host_group=host_group,
        host=host,
    )
    remarks: Sequence[str] = ()
    source: Source | SilentSource
    reporter: Reporter | SilentReporter
    if started is None:
        lead.follow()
        source, reporter = SilentSource(lead, config, layout=layout, rejoining=weights), SilentReporter()
    else:
        throughput = Throughput(config, shape, num_learners=layout.world_size, device_name=backend.device_name())
        production, reporter = lead.work(partial(_get_ready, config, started, throughput, continued, listener))
        source = Source(production, lead, config, layout=layout, hidden=shape.hidden, rejoining=weights)
        remarks = production.remarks
    turns = GpuTurns(learner, lead, fleet) if config.engine.takes_turns else None
    if turns:
        turns.make_room()
    _say(started, "connecting learners and engines, which then receive the weights", "sync")
    weights.connect()
    trainer = Trainer(
        config,
        lead=lead,
        learner=learner,
        source=source,
        weights=weights,
        reporter=reporter,
        states=states,
        turns=turns,
        has_held_out=lead.share(lambda: _has_held_out(started)),
    )
    if checkpoint and continued:
        trainer.load_state_dict(continued.state, saved_rollouts(checkpoint) if started else {})
        checkpoint.close()
    for line in (*remarks, *_facts(learner, weights)):
        reporter.say(line)
    trainer.send_weights(check=True)
    if started:
        started.startup.enter("sample")
    if continued:
        steps = config.num_training_steps
        reporter.say(f"continues from {continued.path}, {trainer.done} of {steps} steps are done")
    return trainer


def _check_weights(config: Config, group: dist.ProcessGroup) -> None:
    """Compare the weights with the checksums beside them, if any: each machine its own files, each rank its share.

    Raises:
        ConfigError: on all ranks, when any has changed.
    """
    found = changed_files(config, of_weights=True, rank=local_rank(), world_size=num_local_learners())
    if problems := list(dict.fromkeys(itertools.chain.from_iterable(gather_json(found, group)))):
        raise ConfigError(problems)


def _facts(learner: Learner, weights: EngineWeights) -> Iterator[str]:
    """Lines for the user about the software, the learners and the weight sync."""
    yield package_versions(
        is_extension_compiled=ops.build_info()["compiled"],
        kernels=kernel_line(learner.policy.parallel, has_cuda=backend.has_cuda()),
    )
    yield from learner.remarks()
    plan = weights.plan
    yield (
        f"weight sync: {plan.num_slices} slices, {plan.bytes_moved / 1e6:.2f} MB per step "
        f"(lower bound {plan.lower_bound / 1e6:.2f} MB)"
    )


def _has_held_out(started: Started | None) -> bool:
    """Rank 0: True if there are prompts to evaluate with."""
    assert started is not None, "rank 0 has the inputs"
    return started.inputs.evaluates and len(started.inputs.held_out) > 0


def _say(started: Started | None, text: str, phase: str) -> None:
    """Rank 0: print the next part of the start-up."""
    if started:
        started.startup.say(text, phase)


def _wait_for_engines(started: Started | None, *, sleep: bool) -> None:
    """Rank 0: wait for the engines, which then release their devices' memory if they are to sleep."""
    assert started is not None, "rank 0 has the engines"
    started.startup.say("waiting for the engines, with which the learners share their devices", "engines")
    started.fleet.wait_ready()
    if started.teachers is not None:
        started.teachers.wait_ready()
    if sleep:
        started.fleet.sleep()


def _learners() -> str:
    count = dist.get_world_size()
    return "the learner" if count == 1 else f"{count} learners"


def _get_ready(
    config: Config,
    started: Started,
    throughput: Throughput,
    continued: Continued | None,
    listener: RunListener | None,
) -> tuple[Production, Reporter]:
    """Rank 0: data and engines first, because opening the files moves those of an earlier run aside."""
    production = prepare(config, started)
    reporter = Reporter(
        config,
        scale=started.rewarder.scale,
        throughput=throughput,
        continued=continued,
        engines=started.fleet.roster.describe,
        pieces=TokenPieces(production.tokenizer),
        listener=listener,
        start=started.startup.seconds,
    )
    return production, reporter
