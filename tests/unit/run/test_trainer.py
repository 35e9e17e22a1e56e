"""The order of a run's parts, without what they do."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mgrpo.checkpoint.saving.schedule import Schedule
from mgrpo.parallel import backend
from mgrpo.run.records import Learned
from mgrpo.run.report.reporter import SilentReporter
from tests.unit.run.producing import config

backend.install()

from mgrpo.policy.policy import StepResult  # noqa: E402  after the CPU stand-in
from mgrpo.run.train import trainer as of_run  # noqa: E402
from mgrpo.run.train.mismatch import Mismatch  # noqa: E402


class Ears(SilentReporter):
    """Writes down evaluations and exports; wants the end after a step."""

    def __init__(self, end: int) -> None:
        self.heard: list[object] = []
        self.end = end

    def evaluation(self, evaluation, *, step, policy_version, when="", before=None):
        self.heard.append(("evaluation", step))
        return {"eval/scores": float(step)}

    def exported(self, step):
        self.heard.append(("export", step))

    @property
    def wants_end(self):
        return ("evaluation", self.end) in self.heard


class Steps(of_run.Trainer):
    """Steps that train nothing."""

    def step(self, step):
        self.done = self.saved = step
        self.is_followed_up = False
        return True


@pytest.mark.parametrize("end", [2, 9])
def test_no_step_is_evaluated_or_exported_twice(tmp_path, monkeypatch, end):
    """A callback that stops early does so after an evaluation; an upload may still be reading that step's export."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    own = config(
        model_name_or_path="m",
        output_dir=str(tmp_path),
        total_episodes=24,
        local_eval_every=1,
        save_freq=1,
        checkpoint_state_freq=-1,
    )
    assert own.num_training_steps == 3
    ears = Ears(end)
    monkeypatch.setattr(of_run, "export_hf", lambda *_, **__: ears.heard.append(("files", trainer.done)))
    trainer = Steps(
        own,
        lead=SimpleNamespace(share=lambda make: make(), pulse=SimpleNamespace(at=lambda name: None)),
        learner=SimpleNamespace(policy=None, host_group=None),
        source=SimpleNamespace(evaluate=lambda done: None, save_tokenizer=None),
        weights=SimpleNamespace(version=0),
        reporter=ears,
        states=SimpleNamespace(finish=lambda: None, wait=lambda: None),
        has_held_out=True,
    )
    result = trainer.fit()
    last = min(end, 3)
    steps = [(kind, step) for step in range(1, last + 1) for kind in ("evaluation", "files", "export")]
    assert ears.heard == [("evaluation", 0), *steps]
    assert result.after == {"eval/scores": float(last)} and result.exported == tmp_path / "hf" / f"step_{last}"


class Handed:
    """Implements what a trainer asks of `EngineWeights`, and of a source: what comes of each step, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple] = []
        self.version: int | None = None
        self.bytes_moved = 0

    def send(self, version, *, step, check):
        self.heard.append(("send", version, step, check))
        self.version = version

    def keep(self, version, *, step, reseed):
        self.heard.append(("keep", version, step, reseed))

    def next(self, step, version):
        self.heard.append(("sample", step))
        return SimpleNamespace(index={}, slice=None)

    def pause(self):
        self.heard.append(("pause",))
        return True

    def begin(self, done): ...

    def evaluate(self, done):
        self.heard.append(("evaluate", done, self.version))


def learned(step: int) -> Learned:
    """Step 2 has no update."""
    results = [StepResult(measured=[], grad_norm=1.0, learning_rate=0.0, is_finite=step != 2)]
    return Learned(results=results, metrics={}, learning_rate=0.0, not_finite=[])


def seven_steps(tmp_path, monkeypatch, found=None, **settings) -> of_run.Trainer:
    """The trainer of a run of seven steps, whose weights and source are one object; learner and engines differ by `found`."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(of_run, "export_hf", lambda *_, **__: None)
    own = config(
        model_name_or_path="m",
        output_dir=str(tmp_path),
        total_episodes=7 * 8,
        save_freq=-1,
        weight_sync_check_every=2,
        **settings,
    )
    hands = Handed()
    pulse = SimpleNamespace(at=lambda name: None)
    trainer = of_run.Trainer(
        own,
        lead=SimpleNamespace(share=lambda make: make(), pulse=pulse),
        learner=SimpleNamespace(
            policy=None,
            host_group=None,
            shape=SimpleNamespace(experts=None),
            mismatch=lambda *batch: hands.heard.append(("compare",)) or found,
            learn=lambda *_, step: learned(step),
        ),
        source=hands,
        weights=hands,
        reporter=Ears(99),
        states=SimpleNamespace(
            finish=lambda: None, wait=lambda: None, last_good=lambda: "", how_to_go_on=lambda step: f"from step {step}"
        ),
        has_held_out=True,
    )
    trainer.profiler = SimpleNamespace(step=lambda step: nullcontext())
    monkeypatch.setattr(trainer, "export", lambda: None)
    return trainer


def handed(tmp_path, monkeypatch, **settings) -> list[tuple]:
    """What engines and source hear of such a run."""
    trainer = seven_steps(tmp_path, monkeypatch, **settings)
    trainer.send_weights(check=True)
    trainer.fit()
    return [entry for entry in trainer.weights.heard if entry != ("compare",)]


@pytest.mark.parametrize(
    ("dtype", "mean", "limit", "outcome"),
    [
        ("float32", 9e-5, "auto", "silent"),
        ("float32", 2e-4, "auto", "warned"),
        ("float32", 2e-3, "auto", "ended"),
        ("float32", 2e-3, None, "warned"),
        ("float32", math.nan, None, "ended"),
        ("bfloat16", 0.05, "auto", "silent"),
        ("bfloat16", 0.3, "auto", "warned"),
        ("bfloat16", 0.3, 0.2, "ended"),
    ],
)
def test_a_run_whose_engines_have_another_model_ends_before_its_first_update(
    tmp_path, monkeypatch, dtype, mean, limit, outcome
):
    """Every ratio of such a run is wrong from the first step, and nothing else shows it."""
    found = Mismatch(mean=mean, largest=3.5, token=17, position=5, learner=-4.0, engine=-0.5, num_tokens=40)
    trainer = seven_steps(tmp_path, monkeypatch, found, model_dtype=dtype, max_initial_mismatch=limit)
    said: list[str] = []
    monkeypatch.setattr(trainer.reporter, "say", said.append, raising=False)
    trainer.send_weights(check=True)
    if outcome == "ended":
        with pytest.raises(
            ValueError, match=r"learner and engines differ .* 3\.5, of token 17 at position 5.*max_initial_mismatch"
        ):
            trainer.fit()
        assert trainer.done == 0
        return
    trainer.fit()
    assert trainer.weights.heard.count(("compare",)) == 1
    assert [text[:36] for text in said if "differ" in text] == ["warning: learner and engines differ "] * (
        outcome == "warned"
    )


def test_engines_receive_weights_every_few_steps_and_before_each_evaluation(tmp_path, monkeypatch):
    """An evaluation by older weights would describe another policy; a comparison that falls between two syncs would never be made."""
    heard = handed(tmp_path, monkeypatch, weight_sync_steps=3, local_eval_every=4)
    assert heard == [
        ("send", 0, 1, True), ("evaluate", 0, 0),
        ("sample", 1), ("keep", 1, 2, True), ("sample", 2), ("keep", 1, 3, True), ("sample", 3), ("send", 2, 4, True),
        ("sample", 4), ("send", 3, 5, True), ("evaluate", 4, 3),
        ("sample", 5), ("keep", 4, 6, True), ("sample", 6), ("send", 5, 7, True),
        ("sample", 7), ("send", 6, 8, True), ("evaluate", 7, 6),
    ]  # fmt: skip
    every_step = handed(tmp_path, monkeypatch, local_eval_every=-1)
    assert [each for each in every_step if each[0] in ("send", "keep")] == [
        ("send", 0, 1, True), ("send", 1, 2, False), ("keep", 1, 3, True), ("send", 2, 4, False), ("send", 3, 5, True),
        ("send", 4, 6, False), ("send", 5, 7, True), ("send", 6, 8, False),
    ]  # fmt: skip


def test_engines_that_run_ahead_pause_for_weights_and_where_the_run_repeats(tmp_path, monkeypatch):
    """A pause in every step waits for its longest answer, which is what few syncs are to save; without it a random stream begins somewhere."""
    ahead = {"async_steps": 1, "use_rho_correction": True, "weight_sync_steps": 3, "local_eval_every": -1}
    in_order = handed(tmp_path, monkeypatch, **ahead)
    assert [each[0] for each in in_order].count("pause") == 7
    free = handed(tmp_path, monkeypatch, **ahead, max_staleness=4)
    assert free[2:] == [
        ("sample", 1), ("keep", 1, 2, False), ("sample", 2), ("keep", 1, 3, False),
        ("sample", 3), ("pause",), ("send", 2, 4, True), ("sample", 4), ("keep", 3, 5, False),
        ("sample", 5), ("keep", 4, 6, False), ("sample", 6), ("pause",), ("send", 5, 7, True),
        ("sample", 7), ("pause",), ("send", 6, 8, True), ("evaluate", 7, 6),
    ]  # fmt: skip


def test_a_run_that_ends_between_two_syncs_is_evaluated_with_its_own_weights(tmp_path, monkeypatch):
    """A callback may end a run after any step; engines that sample meanwhile must stand still to take over weights."""
    monkeypatch.setattr(Ears, "wants_end", True)
    heard = handed(tmp_path, monkeypatch, weight_sync_steps=3, local_eval_every=-1)
    assert heard[-4:] == [("keep", 1, 2, True), ("pause",), ("send", 1, 2, False), ("evaluate", 1, 1)]


def test_a_run_that_is_stopped_between_two_syncs_says_what_it_goes_on_with(tmp_path, monkeypatch):
    """Its engines had older weights: nobody would know why the run that goes on is not the one that was never stopped."""
    trainer = seven_steps(tmp_path, monkeypatch, weight_sync_steps=3, local_eval_every=-1)
    monkeypatch.setattr(trainer, "save", lambda: setattr(trainer, "saved", trainer.done))
    for trainer.done in (3, 4):
        clauses, is_kept = trainer.keep()
        assert is_kept and clauses[0] == f"from step {trainer.done}"
        more = [
            "weight_sync_steps=3: its engines then begin with the weights of step 4, and not with older ones as in a run that was not stopped"
        ]
        assert clauses[1:] == (more if trainer.done == 4 else [])


@pytest.mark.parametrize("leads", [True, False])
def test_every_rank_saves_when_rank_0s_clock_says_so(tmp_path, monkeypatch, leads):
    """A save is collective: a rank whose own clock is ahead would wait for the others for ever, or they for it."""
    trainer = seven_steps(tmp_path, monkeypatch, save_every_minutes=1, weight_sync_steps=2, local_eval_every=-1)
    now, saved = [0.0], []
    trainer.schedule = Schedule(every_steps=-1, every_s=60, clock=lambda: now[0])
    decisions = iter([[kind, False] for kind in ("nothing", "storage", *(["nothing"] * 4), "storage")])
    trainer.lead.share = (lambda make: make()) if leads else (lambda make: next(decisions, None))
    train = trainer.step

    def step(number):
        now[0] += 45 if leads else 1000
        return train(number)

    def save(*, near_only):
        assert not near_only
        trainer.schedule.saved()
        saved.append(trainer.done)
        trainer.saved = trainer.done

    monkeypatch.setattr(trainer, "step", step)
    monkeypatch.setattr(trainer, "save", save)
    monkeypatch.setattr(Ears, "wants_end", False)
    monkeypatch.setattr(trainer, "evaluate", lambda when: {})
    trainer.config = replace(trainer.config, checkpoint=replace(trainer.config.checkpoint, save_final=False))
    trainer.fit()
    # 60 s are over after step 2; after step 4 again; step 7 is the last, after which weights are always sent.
    assert saved == ([2, 4, 6] if leads else [2, 7])
