"""The order of a run's parts, without what they do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mgrpo.parallel import backend
from mgrpo.run.report.reporter import SilentReporter
from tests.unit.run.producing import config

backend.install()

from mgrpo.run.train import trainer as of_run  # noqa: E402  after the CPU stand-in


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
        weights=None,
        reporter=ears,
        states=SimpleNamespace(wait=lambda: None),
        has_held_out=True,
    )
    result = trainer.fit()
    last = min(end, 3)
    steps = [(kind, step) for step in range(1, last + 1) for kind in ("evaluation", "files", "export")]
    assert ears.heard == [("evaluation", 0), *steps]
    assert result.after == {"eval/scores": float(last)} and result.exported == tmp_path / "hf" / f"step_{last}"
