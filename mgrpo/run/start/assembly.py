"""Makes a rank's parts of a run and connects them. Nothing here knows what the parts do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from mgrpo import ops
from mgrpo.algo import LossFunction
from mgrpo.config import Config
from mgrpo.config.derived import layout_of
from mgrpo.config.fused_kernels import kernel_line
from mgrpo.data.pieces import TokenPieces
from mgrpo.models.family import read_hf_config, shape_of
from mgrpo.parallel import backend
from mgrpo.run.produce.production import Production, Started, prepare
from mgrpo.run.produce.source import SilentSource, Source
from mgrpo.run.ranks.lead import Lead
from mgrpo.run.report.reporter import Reporter, SilentReporter
from mgrpo.run.report.throughput import Throughput
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
    resume_from: str | None = None,
    loss: LossFunction | None = None,
) -> Trainer:
    """A trainer whose engines have the policy's weights. Collective over all learners.

    Args:
        started: on rank 0.
        host: where other learners reach this machine.
        resume_from: path or URL of the state that the run continues; rank 0's counts.
        loss: in place of the configuration's `policy_loss`.
    """
    host_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=config.experiment.backend_timeout))
    layout = layout_of(config, dist.get_world_size())
    shape = shape_of(read_hf_config(config.model_path))
    states = States(config, lead, host_group)
    checkpoint = states.open(resume_from, shape)
    if config.engine.shares_gpus:
        # An engine refuses to start on a GPU that is not nearly empty, and both at once may not fit.
        lead.pulse.at("waiting for the engines")
        lead.run(partial(_wait_for_engines, started, sleep=config.engine.takes_turns))
    if started:
        started.startup.say(f"loading the weights into {_learners()}")
    lead.pulse.at("loading the model")
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
    remarks: Sequence[str] = ()
    source: Source | SilentSource
    reporter: Reporter | SilentReporter
    if started is None:
        lead.follow()
        source, reporter = SilentSource(lead, config, layout=layout), SilentReporter()
    else:
        state = checkpoint.state if checkpoint else None
        resume_from = checkpoint.path if checkpoint else None
        throughput = Throughput(config, shape, num_learners=layout.world_size, device_name=backend.device_name())
        get_ready = partial(_get_ready, config, started, throughput, resumed=state, resume_from=resume_from)
        production, reporter = lead.work(get_ready)
        source = Source(production, lead, config, layout=layout, hidden=shape.hidden)
        remarks = production.remarks
    weights = EngineWeights(
        learner.policy,
        shape=shape,
        layout=layout,
        settings=config.engine,
        lead=lead,
        fleet=started.fleet if started else None,
        host_group=host_group,
        host=host,
    )
    turns = None
    if config.engine.takes_turns:
        turns = GpuTurns(learner, lead, started.fleet if started else None)
        turns.make_room()
    if started:
        started.startup.say("connecting learners and engines, which then receive the weights")
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
        has_held_out=_has_held_out(lead, started),
    )
    if checkpoint:
        rollouts = saved_rollouts(checkpoint) if started else {}
        trainer.load_state_dict(checkpoint.state | {"head": checkpoint.state["head"] | {"rollouts": rollouts}})
        checkpoint.close()
    for line in (
        *remarks,
        package_versions(
            is_extension_compiled=ops.build_info()["compiled"],
            kernels=kernel_line(learner.policy.parallel, has_cuda=backend.has_cuda()),
        ),
        *learner.remarks(),
        f"weight sync: {weights.plan.num_slices} slices, {weights.plan.bytes_moved / 1e6:.2f} MB per step "
        f"(lower bound {weights.plan.lower_bound / 1e6:.2f} MB)",
    ):
        reporter.say(line)
    trainer.send_weights(check=True)
    if checkpoint:
        steps = config.num_training_steps
        reporter.say(f"continues from {resume_from}, {trainer.done} of {steps} steps are done")
    return trainer


def _has_held_out(lead: Lead, started: Started | None) -> bool:
    """Whether rank 0 has prompts to evaluate with. Collective."""

    def own() -> dict[str, np.ndarray]:
        assert started is not None, "rank 0 has the inputs"
        return {"held_out": np.array(started.inputs.evaluates and len(started.inputs.held_out) > 0)}

    return bool(lead.share(own)["held_out"])


def _wait_for_engines(started: Started | None, *, sleep: bool) -> None:
    """Rank 0: wait for the engines, which then give up their devices' memory if they are to sleep."""
    assert started is not None, "rank 0 has the engines"
    started.startup.say("waiting for the engines, with which the learners share their devices")
    started.fleet.wait_ready()
    if sleep:
        started.fleet.sleep()


def _learners() -> str:
    count = dist.get_world_size()
    return "the learner" if count == 1 else f"{count} learners"


def _get_ready(
    config: Config,
    started: Started,
    throughput: Throughput,
    *,
    resumed: Mapping[str, Any] | None,
    resume_from: str | None,
) -> tuple[Production, Reporter]:
    """Rank 0: data and engines first, because opening the files moves those of an earlier run aside."""
    production = prepare(config, started)
    reporter = Reporter(
        config,
        scale=started.rewarder.scale,
        throughput=throughput,
        resumed=resumed,
        resume_from=resume_from,
        engines=started.fleet.roster.describe,
        pieces=TokenPieces(production.tokenizer),
    )
    return production, reporter
