"""What the ranks of a test of a run execute: its lead, its engines' weights, its trainer and its learner."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mgrpo.types import TrainSample
from tests.ranks.cases import forget_groups, host_group, make_sharded_policy


def follow_the_lead() -> list[Any]:
    """What each rank gets of rank 0's results, arrays, failure and end."""
    import threading

    from mgrpo.run.ranks.lead import Lead, Stopped

    stop = threading.Event()
    lead = Lead(stop)
    got: list[Any] = [
        lead.run(lambda: 7),
        lead.call(lambda: 8),
        lead.share(lambda: [0, "a", None, {"b": 1.5}]),
    ]
    try:
        lead.run(lambda: 1 // 0)
    except (ZeroDivisionError, RuntimeError) as err:
        got.append(f"{type(err).__name__}: {err}")
    released = threading.Event()
    lead.call(stop.set)
    try:
        # The work is not waited for: it may be a generation that takes an hour.
        lead.work(released.wait, may_stop=True) if dist.get_rank() == 0 else lead.follow()
    except Stopped:
        got.append("stopped")
    released.set()
    lead.close()
    return got


def connect_to_an_engine_that_fails(model_dir: str, meeting_host: str | None = None) -> tuple[str, str]:
    """The error of a learner whose engine fails to join while the learner waits for it, and where it met the others."""
    import dataclasses

    from mgrpo.config.schema import Engine as EngineSettings
    from mgrpo.rollout.engines.fleet import Fleet
    from mgrpo.rollout.engines.roster import Roster
    from mgrpo.run.ranks.lead import Lead
    from mgrpo.run.train.engine_weights import EngineWeights
    from tests.scripted_engine import ScriptedEngine

    settings = dataclasses.replace(EngineSettings(), weight_sync_timeout=2)
    policy = make_sharded_policy(model_dir, {})
    weights = EngineWeights(
        policy,
        shape=policy.shape,
        layout=policy.layout,
        settings=settings,
        lead=Lead(),
        fleet=Fleet(Roster([ScriptedEngine(fails="join")], settings), seed=1, meeting_host=meeting_host),
        host_group=host_group(),
    )
    try:
        weights.connect()
    except RuntimeError as err:
        return str(err), weights.sender.host
    return "", ""


def send_nothing_while_rank_0_sends(patience_s: float) -> list[int]:
    """What this rank sent in a sync in which rank 0 is busy for twice as long as the others wait for its messages."""
    import time
    from types import SimpleNamespace
    from unittest import mock

    from mgrpo.config.schema import Engine as EngineSettings
    from mgrpo.rollout.engines.fleet import Fleet
    from mgrpo.rollout.engines.roster import Roster
    from mgrpo.run.ranks import lead
    from mgrpo.run.train import engine_weights
    from tests.scripted_engine import ScriptedEngine

    def send(version: int, engines: Any) -> dict[int, str]:
        if dist.get_rank() == 0:
            time.sleep(2 * patience_s)
        sent.append(version)
        return {}

    sent: list[int] = []
    settings = EngineSettings()
    with mock.patch.object(lead, "PATIENCE_S", patience_s):
        weights = engine_weights.EngineWeights(
            SimpleNamespace(wait_for_weights=lambda: None),
            shape=SimpleNamespace(),
            layout=SimpleNamespace(),
            settings=settings,
            lead=lead.Lead(),
            fleet=Fleet(Roster([ScriptedEngine()], settings), seed=1),
            host_group=dist.group.WORLD,
        )
    weights.sender = SimpleNamespace(generations={0: 0}, send=send)
    weights.seating.arrange({0: 0})
    weights.send(7, step=1)
    return sent


class GivenGroups:
    """A source that gives every step the same scored groups; rank 0 packs them, as in a run."""

    def __init__(self, trainer_parts: dict[str, Any], groups: list) -> None:
        self.lead, self.parts, self.groups = trainer_parts.pop("lead"), trainer_parts, groups

    def next(self, step: int, policy_version: int, *, is_empty: bool = False) -> Any:
        from mgrpo.algo import load_advantages
        from mgrpo.run.produce.step_batch import make_batch
        from mgrpo.run.records import Batch, Rollouts

        rollouts = Rollouts(groups=[] if is_empty else self.groups, dropped=[])
        function = load_advantages(self.parts["config"].algorithm)
        batch = self.lead.call(
            lambda: make_batch(
                rollouts, reward_weights={}, policy_version=policy_version, advantage_fn=function, **self.parts
            )
        )
        channel = self.lead.channel
        index = channel.arrays(batch and batch.index)
        return Batch(index=index, slice=channel.scatter(self.parts["layout"], batch.slices if batch else ()))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save_tokenizer(self, folder: Any) -> None: ...


class GivenSamples(GivenGroups):
    """The same of samples, which every rank packs."""

    def next(self, step: int, policy_version: int, *, is_empty: bool = False) -> Any:
        from mgrpo import packing
        from mgrpo.run.records import Batch

        config, layout = self.parts["config"], self.parts["layout"]
        padding = {"multiple_of": layout.pack_multiple_of, "document_multiple_of": layout.document_multiple_of}
        plan = packing.plan_step(
            self.groups,
            pack_length=layout.round_up(config.parallel.pack_length),
            dp=layout.data,
            num_mini_batches=config.algorithm.num_mini_batches,
            share_prompts=layout.context == 1,
            **padding,
        )
        index, slices = packing.to_slices(self.groups, plan, **padding)
        return Batch(index=index, slice=slices[layout.coordinate(dist.get_rank()).data].filled())


def trainer_of(model_dir: str, settings: dict[str, Any], groups: list, resume_from: str | None = None) -> Any:
    """A trainer without engines, which is given its rollouts: scored groups, or samples."""
    from mgrpo.config.derived import layout_of
    from mgrpo.models.family import shape_of
    from mgrpo.models.hf_config import read_hf_config
    from mgrpo.moving import from_values
    from mgrpo.run.inputs.continuing import Continued
    from mgrpo.run.ranks.lead import Lead
    from mgrpo.run.report.reporter import SilentReporter
    from mgrpo.run.train.learner import Learner
    from mgrpo.run.train.resume import States
    from mgrpo.run.train.trainer import Trainer

    forget_groups()
    config = from_values({"model_dtype": "float32"} | settings | {"model_name_or_path": model_dir})
    host_group = dist.new_group(backend="gloo")
    layout, shape = layout_of(config, dist.get_world_size()), shape_of(read_hf_config(model_dir))
    lead = Lead()
    states = States(config, lead, host_group)
    checkpoint = states.open(resume_from, shape)
    learner = Learner(config, shape=shape, layout=layout, host_group=host_group, checkpoint=checkpoint)
    parts = {"lead": lead, "config": config, "layout": layout, "hidden": shape.hidden}
    source = GivenSamples if groups and isinstance(groups[0], TrainSample) else GivenGroups
    trainer = Trainer(
        config,
        lead=lead,
        learner=learner,
        source=source(parts, groups),
        weights=None,
        reporter=SilentReporter(),
        states=states,
        has_held_out=False,
    )
    if checkpoint:
        trainer.load_state_dict(Continued.of(checkpoint).state, {})
        checkpoint.close()
    return trainer


def learn(
    model_dir: str,
    settings: dict[str, Any],
    groups: list,
    folder: str,
    steps: int = 2,
    save_after: int = 0,
    resume_from: str | None = None,
) -> dict[str, Any]:
    """`Learner.learn` on given rollouts: metrics of the last step, and the model in `folder`.

    With `save_after` the state is saved after so many steps, in the config's `output_dir`; with `resume_from` only the
    steps after a save are done. "state" is what no export shows, at the time of the save or just after it was loaded.
    """
    from mgrpo.model_io.hf_export import export_hf

    trainer = trainer_of(model_dir, settings, groups, resume_from)
    learner = trainer.learner
    state = hidden_state(learner)
    for step in range(trainer.done + 1, steps + 1):
        batch = trainer.source.next(step, trainer.version)
        learned = learner.learn(batch.index, batch.slice, step=step)
        trainer.done = step
        if step == save_after:
            torch.rand(dist.get_rank() + 1)  # with equal states a mix-up of ranks would not show
            trainer.save()
            state = hidden_state(learner)
    export_hf(learner.policy, model_dir, folder, group=learner.host_group)
    grad_norm = learned.results[-1].grad_norm if learned.results else 0.0
    return learned.metrics | {"steps": len(learned.results), "grad_norm": grad_norm, "state": state}


def mismatch(model_dir: str, settings: dict[str, Any], groups: list) -> dict[str, float]:
    """The first comparison with the engines, and the metrics of the step that then trains on the same tokens."""
    trainer = trainer_of(model_dir, settings, groups)
    batch = trainer.source.next(1, 0)
    found = trainer.learner.mismatch(batch.index, batch.slice)
    learned = trainer.learner.learn(batch.index, batch.slice, step=1)
    return learned.metrics | found._asdict()


def accumulate(model_dir: str, settings: dict[str, Any], groups: list) -> str:
    """The error of a second backward pass before an update; "" if there is none."""
    from mgrpo import packing
    from mgrpo.policy import passes

    trainer = trainer_of(model_dir, settings, groups)
    policy, batch = trainer.learner.policy, trainer.source.next(1, 0)
    (packs,) = packing.from_slice(batch.index, batch.slice)
    microbatches = policy.microbatches(packs)
    policy.optimizer.zero_gradients()
    for _ in range(2):
        try:
            passes.forward_backward(
                policy.chunks, microbatches, lambda logprobs, *rest: (-logprobs.sum(), None), routing=policy.routing
            )
        except AssertionError as err:
            return str(err)
    return ""


def save_again(model_dir: str, settings: dict[str, Any], groups: list, resume_from: str) -> None:
    """Load a state and save it at once, in the config's `output_dir`."""
    trainer = trainer_of(model_dir, settings, groups, resume_from)
    trainer.save()
    trainer.states.wait()


def run_out_of_room(model_dir: str, settings: dict[str, Any], groups: list) -> dict[str, Any]:
    """Exports and saves of a trainer after one step that fail, and what it says and keeps, on this rank."""
    from mgrpo.checkpoint import space
    from mgrpo.checkpoint.space import OutputError
    from mgrpo.model_io.hf_export import export_bytes
    from mgrpo.run.ranks.lead import Stopped

    trainer = trainer_of(model_dir, settings, groups)
    learner, said, leads = trainer.learner, [], dist.get_rank() == 0
    trainer.reporter.say = said.append
    batch = trainer.source.next(1, 0)
    learner.learn(batch.index, batch.slice, step=1)
    trainer.done = 1
    found: dict[str, Any] = {}

    def failing(name: str, action: Any, *, limited: bool = False, free: int | None = None) -> None:
        disk_usage, patience, own = shutil.disk_usage, space.PATIENCE_S, resource.getrlimit(resource.RLIMIT_FSIZE)
        if free is not None:
            shutil.disk_usage, space.PATIENCE_S = lambda path: SimpleNamespace(free=free), 0.1
        if limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, own[1]))
        try:
            found[name] = action()
        except (OutputError, Stopped) as err:
            found[name] = str(err)
        finally:
            shutil.disk_usage, space.PATIENCE_S = disk_usage, patience
            resource.setrlimit(resource.RLIMIT_FSIZE, own)

    failing("export in the middle", trainer.export, limited=leads)
    failing("export at the start", trainer.export, free=1000)
    failing("save in the middle", trainer.save, limited=not leads)
    failing("save at the start", trainer.save, free=1000)
    failing("neither", trainer.keep, free=1000)
    found["left"] = sorted(path.name for path in trainer.output_dir.rglob("*") if path.suffix != ".json")
    found["said"] = said[:]
    dist.barrier()
    umask = os.umask(0o027)
    failing("the model only", trainer.keep, free=2 * export_bytes(learner.policy))
    if leads:
        trainer.reporter = type("Failing", (type(trainer.reporter),), {"failure": "metrics cannot be written"})()
    trainer._fit = lambda: trainer.lead.run(lambda: None) or _raise(Stopped())
    failing("the end", trainer.fit)
    found["exported"] = str(trainer.export())
    os.umask(umask)
    found["modes"] = {oct(path.stat().st_mode & 0o777) for path in trainer.output_dir.rglob("*.safetensors")}
    return found


def open_damaged(model_dir: str, settings: dict[str, Any], groups: list) -> list[str]:
    """What every way to continue makes of states of two steps, of which rank 1's share of the newer one is damaged."""
    from mgrpo.config import ConfigError

    trainer = trainer_of(model_dir, settings, groups)
    batch = trainer.source.next(1, 0)
    trainer.learner.learn(batch.index, batch.slice, step=1)
    for trainer.done in (1, 2):
        trainer.save()
    newest, found = f"{trainer.states.root}/step_2", []
    if dist.get_rank() == 1:
        (shard,) = Path(newest).glob("shard-00001-*.safetensors")
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    dist.barrier()
    for choice in ("auto", "intact"):
        states = trainer.states
        states.config = replace(states.config, checkpoint=replace(states.config.checkpoint, resume=choice))
        try:
            checkpoint = states.open(newest, trainer.learner.shape)
            found.append(checkpoint.path)
            checkpoint.close()
        except ConfigError as err:
            found.append(str(err))
    return found


def continue_from_nodes(model_dir: str, settings: dict[str, Any], groups: list, lost: list[list[int]]) -> list[Any]:
    """Where a run goes on that has a state of step 1 on storage and one of step 2 on disks, when the disks of these ranks are lost.

    Returns:
        For each of `lost` the step, that of the state on storage, and whether the learner is that of step 2; then what is left.
    """
    from mgrpo.checkpoint.folder import complete, near_root, resumable

    trainer = trainer_of(model_dir, settings, groups)
    for trainer.done in (1, 2):
        batch = trainer.source.next(trainer.done, 0)
        trainer.learner.learn(batch.index, batch.slice, step=trainer.done)
        trainer.save(near_only=trainer.done == 2)
    trainer.states.wait()
    expected, found = whole_state(trainer.learner), []
    local = trainer.states.near.local.path
    kept = Path(f"{local}.kept")
    # One of the ranks that share a disk.
    has_own = dist.get_rank() == 0 or "$RANK" in settings["checkpoint_local_dir"]
    if has_own:
        shutil.copytree(local, kept)
    for ranks in lost:
        if dist.get_rank() in ranks:
            shutil.rmtree(local)
        dist.barrier()
        trainer.states.near.server.close()
        trainer = trainer_of(model_dir, settings, groups, resumable(trainer.states.root)[0])
        found.append([trainer.done, trainer.saved, whole_state(trainer.learner) == expected])
        dist.barrier()
        if has_own:
            shutil.rmtree(local, ignore_errors=True)
            shutil.copytree(kept, local)
        dist.barrier()
    trainer.states.finish()
    dist.barrier()
    return [*found, local.exists(), complete(near_root(trainer.states.root))]


def _raise(err: Exception) -> None:
    raise err


def broken_weights(model_dir: str, broken: str, settings: dict[str, Any], groups: list) -> list[str]:
    """The errors of loading `broken`, and of a step with a learning rate that is far too high."""
    from mgrpo.config import ConfigError

    errors = []
    try:
        trainer_of(broken, settings, groups)
    except ConfigError as err:
        errors.append(str(err))
    trainer = trainer_of(model_dir, settings | {"learning_rate": 1e30, "max_grad_norm": 0.0}, groups)
    batch = trainer.source.next(1, 0)
    learned = trainer.learner.learn(batch.index, batch.slice, step=1)
    try:
        trainer.health.check(learned, 1)
    except RuntimeError as err:
        errors.append(str(err))
    return errors


def largest_figures(figures: list[dict[str, float]]) -> dict[str, float]:
    """What a learner reports of figures of each rank when no update was made."""
    from mgrpo.algo import MetricSums
    from mgrpo.run.train.learner import Learner

    forget_groups()
    learner = SimpleNamespace(host_group=host_group())
    return Learner._reduce(learner, [], beside=MetricSums({}, figures[dist.get_rank()]))


def digest(tensor: torch.Tensor) -> str:
    """Of its bytes."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def whole_state(learner: Any) -> list[Any]:
    """`hidden_state`, and digests of the float32 weights and moments."""
    from mgrpo.policy.shards import MOMENTS

    values = [[shard.main, *(shard.moment(kind) for kind in MOMENTS)] for shard in learner.policy.shards]
    return [hidden_state(learner), [[digest(tensor) for tensor in own] for own in values]]


def hidden_state(learner: Any) -> dict[str, Any]:
    """Random states, Adam's step counts, the loss scale, and weights and float32 copies of the models that follow, on this rank, as digests."""
    from mgrpo.parallel import backend

    following = learner.models.following
    return {
        "random": {name: digest(state) for name, state in backend.random_states().items()},
        "adam": sorted(
            {float(shard.optimizer.state[shard.parameter].get("step", 0)) for shard in learner.policy.shards}
        ),
        "loss_scale": learner.policy.loss_scale and learner.policy.loss_scale.state(),
        "following": {
            f"{kind} {name}": digest(parameter.data)
            for kind, model in following.items()
            for name, parameter in model.parameters.live.items()
        },
        "masters": {
            f"{kind} {box}": digest(view)
            for kind, model in following.items()
            if model.has_moved
            for box, view in model.master_boxes()
        },
    }


def rates(model_dir: str, settings: dict[str, Any], is_empty: list[int]) -> list[float]:
    """Learning rate at the start of each step that trains, given which steps have no group to train on."""
    from tests.ranks.test_learning import scored_groups

    trainer = trainer_of(model_dir, settings, scored_groups())
    found = []
    for step, empty in enumerate(is_empty, start=1):
        batch = trainer.source.next(step, 0, is_empty=bool(empty))
        found += [
            result.learning_rate for result in trainer.learner.learn(batch.index, batch.slice, step=step).results[:1]
        ]
    return found


def export_at_once(model_dir: str, settings: dict[str, Any], folder: str) -> None:
    """The model as a learner has it before the first step, in `folder`."""
    from mgrpo.model_io.hf_export import export_hf

    learner = trainer_of(model_dir, settings, []).learner
    export_hf(learner.policy, model_dir, folder, group=learner.host_group)
