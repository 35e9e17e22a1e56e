"""What a trainer of TRL's remembers of a run, and what callbacks of transformers hear of it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from mgrpo.run.records import Rollouts
from mgrpo.run.report.best import Best
from mgrpo.run.report.result import TrainResult
from mgrpo.telemetry.metrics.evaluation import evaluation_metrics
from mgrpo.trl import GRPOConfig
from mgrpo.trl.callbacks import Callbacks
from mgrpo.trl.held_out import loss
from mgrpo.trl.history import RunHistory
from tests.builders import completion, scored_group
from tests.unit.run.producing import collect, config, evaluator, producer

STEP = {
    "reward": 1.0,
    "loss/total_avg": 0.5,
    "optim/grad_norm": 2.0,
    "lr": 1e-3,
    "policy/entropy_avg": 1.5,
    "objective/length_reward": 3.0,
    "rewards/length/std": 0.5,
    "custom/accuracy": 0.75,
    "completions/mean_terminated_length": math.nan,
    "val/advantages_hist": [1, 2],
    "batch/total_prompts": 4,
}
ROLLOUTS = Rollouts(groups=[], dropped=[])


class Ears(TrainerCallback):
    """Writes down what it hears; asks for something at a step."""

    def __init__(self, ask: str = "", at: int = 0) -> None:
        self.heard: list[object] = []
        self.ask, self.at = ask, at

    def on_train_begin(self, args, state, control, **kwargs):
        self.heard.append(("begin", state.max_steps))

    def on_step_end(self, args, state, control, **kwargs):
        self.heard.append(state.global_step)
        if self.ask and state.global_step == self.at:
            setattr(control, self.ask, True)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.heard.append(("log", sorted(logs)))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.heard.append(("evaluate", metrics["eval_reward"]))

    def on_save(self, args, state, control, **kwargs):
        self.heard.append(("save", state.best_model_checkpoint))

    def on_train_end(self, args, state, control, **kwargs):
        self.heard.append("end")


def history(*callbacks, settings=None, **args) -> RunHistory:
    own = config(beta=0.0, **(settings or {}))
    made = Callbacks(callbacks, args=GRPOConfig(**args), processing_class="tokenizer")
    return RunHistory(own, made, num_rows=20)


def finish(own: RunHistory, steps: int):
    return own.finish(TrainResult(output_dir=Path("out"), steps=steps, before={}, after={}, exported=None), 2.0)


def test_the_log_has_the_newest_weight_of_the_entropy_bonus():
    """A mean of the last steps is a weight that no step had, and `trainer.entropy_coef` is read from the log."""
    own = history(logging_steps=2, settings={"use_adaptive_entropy": True, "entropy_coef": 0.01})
    own.begin(own.config, done=0)
    for step, weight in ((1, 0.015), (2, 0.02)):
        own.step(step, STEP | {"policy/entropy_coef": weight}, ROLLOUTS)
    assert own.state.log_history[-1]["entropy_coef"] == 0.02


def test_the_log_has_trls_names_and_means(tmp_path):
    """Scripts and notebooks plot `log_history`."""
    own = history(logging_steps=2, settings={"num_mini_batches": 2})
    own.begin(own.config, done=0)
    for step in (1, 2, 3):
        own.step(step, STEP | {"reward": float(step), "lr": step * 1e-3}, ROLLOUTS)
    output = finish(own, 3)
    first, second, third, last = own.state.log_history
    assert [line["step"] for line in own.state.log_history] == [2, 4, 6, 6] and own.state.global_step == 6
    assert own.state.max_steps == 200 and first["epoch"] == 4 / 20
    assert second == {
        "reward": 2.0, "loss": 0.5, "grad_norm": 2.0, "learning_rate": 2e-3, "entropy": 1.5, "rewards/length/mean": 3.0,
        "rewards/length/std": 0.5, "accuracy": 0.75, "completions/mean_terminated_length": None, "num_tokens": 0.0,
        "epoch": 0.4, "step": 4,
    }  # fmt: skip
    assert third["reward"] == 3.0
    assert last["train_loss"] == output.training_loss == output.metrics["train_loss"] == 0.5
    assert (output.global_step, output.metrics["train_runtime"], output.metrics["epoch"]) == (6, 2.0, 0.6)
    assert output.metrics["train_steps_per_second"] == 3.0


def test_steps_after_the_last_line_are_in_the_summary():
    """TRL puts them there, so that the last line of any run has a reward."""
    own = history(logging_steps=2)
    own.begin(own.config, done=0)
    for step in (1, 2, 3):
        own.step(step, STEP | {"reward": float(step)}, ROLLOUTS)
    finish(own, 3)
    assert [line["step"] for line in own.state.log_history] == [2, 3]
    assert own.state.log_history[-1]["reward"] == 3.0 and "train_loss" in own.state.log_history[-1]


def test_every_run_has_a_state_of_its_own():
    """An evaluation outside of training is no best one, and the next run does not go on with the numbers of the last."""
    own = history(logging_steps=1)
    scored = evaluator().evaluate(0)
    own.evaluation(0, evaluation_metrics(scored.groups), scored)
    assert own.state.best_metric is None and len(own.state.log_history) == 1
    for _ in range(2):
        own.begin(own.config, done=0)
        own.step(1, STEP, collect(producer()))
        finish(own, 1)
        assert [line["step"] for line in own.state.log_history] == [1, 1]
    assert own.state.log_history[0]["num_tokens"] == own.state.num_input_tokens_seen


def test_a_run_in_which_nothing_was_trained_has_a_loss_of_0():
    """The metrics of such a step have none."""
    own = history(logging_strategy="no")
    own.begin(own.config, done=0)
    own.step(1, {"reward": math.nan}, ROLLOUTS)
    assert finish(own, 1).training_loss == 0.0 and own.state.log_history[-1]["reward"] is None


def test_the_entropy_bonus_is_part_of_the_loss():
    """As TRL logs it: the loss with the bonus, and without it as policy_loss."""
    own = history(logging_steps=1, settings={"entropy_coef": 0.1})
    own.begin(own.config, done=0)
    own.step(1, STEP | {"loss/entropy_avg": 0.15}, ROLLOUTS)
    (line,) = own.state.log_history
    assert (line["policy_loss"], line["loss"], line["entropy_coef"]) == (0.5, pytest.approx(0.35), 0.1)
    own.step(2, STEP | {"loss/entropy_avg": 0.15, "policy/entropy_coef": 0.2}, ROLLOUTS)
    assert own.state.log_history[-1]["entropy_coef"] == 0.2


def test_callbacks_hear_of_a_run_in_order(tmp_path):
    """A tracker or a bar of a script must see what it sees in TRL."""
    ears = Ears()
    own = history(ears, logging_steps=2)
    own.begin(own.config, done=0)
    own.step(1, STEP, ROLLOUTS)
    own.step(2, STEP, ROLLOUTS)
    scored = evaluator().evaluate(2)
    own.evaluation(2, evaluation_metrics(scored.groups), scored)
    best = Best(step=2, metric="eval/scores", value=1.0, greater_is_better=True)
    own.exported(2, tmp_path / "hf" / "step_2", best)
    finish(own, 2)
    logged, evaluated, summed = [heard for heard in ears.heard if isinstance(heard, tuple) and heard[0] == "log"]
    assert ears.heard == [
        ("begin", 100), 1, 2, logged, evaluated, ("evaluate", 1.0), ("save", str(tmp_path / "hf" / "step_2")), summed, "end"
    ]  # fmt: skip
    assert "reward" in logged[1] and "eval_reward" in evaluated[1] and "train_loss" in summed[1]
    assert (own.state.best_metric, own.state.best_global_step) == (1.0, 2)


def test_a_callback_may_end_the_run():
    """Early stopping is the callback that scripts have most."""
    own = history(Ears("should_training_stop", at=2), logging_steps=10)
    own.begin(own.config, done=0)
    own.step(1, STEP, ROLLOUTS)
    assert not own.wants_end
    own.step(2, STEP, ROLLOUTS)
    assert own.wants_end
    own.begin(own.config, done=0)
    assert not own.wants_end, "the next run is not ended by the last one's wish"

    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    own = history(stopping, logging_steps=10, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
                  metric_for_best_model="eval_reward")  # fmt: skip
    own.begin(own.config, done=0)
    scored = evaluator().evaluate(0)
    ends = []
    for step, value in enumerate((0.5, 0.6, 0.6, 0.4)):
        own.evaluation(step, evaluation_metrics(scored.groups) | {"eval/scores": value}, scored)
        ends.append(own.wants_end)
    assert ends == [False, False, False, True] and own.state.best_metric == 0.6


def test_what_a_callback_cannot_have_is_said(caplog):
    """A wish that is passed over in silence is waited for."""

    class Deaf(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            raise AssertionError

    own = history(Deaf, Ears("should_save", at=1), logging_steps=10)
    assert "on_substep_end of Deaf is never called" in caplog.text
    own.begin(own.config, done=0)
    own.step(1, STEP, ROLLOUTS)
    assert "should_save of Ears has no effect" in caplog.text
    assert own.callbacks.remove(Deaf) is not None and own.callbacks.remove(Deaf) is None


def test_completions_without_any_reward_are_warned_of_once(caplog):
    """TRL's warning: a function that fits no row trains nothing, and the run looks like any other."""
    own = history(logging_steps=10)
    own.begin(own.config, done=0)
    rollouts = collect(producer())
    own.step(1, STEP, rollouts)
    assert not caplog.text
    group = rollouts.groups[0]
    unscored = scored_group([math.nan], of=group.group.prompt)
    for step in (2, 3):
        own.step(step, STEP, dataclasses.replace(rollouts, dropped=[unscored]))
    assert caplog.text.count("All reward functions returned None for the following kwargs: {'prompt': ") == 1
    assert own.state.num_input_tokens_seen > 0


@pytest.mark.parametrize("has_sets", [False, True])
def test_an_evaluation_has_a_loss_and_each_set_its_own_metrics(has_sets):
    """TRL's `evaluate` of a dict returns eval_NAME_loss; of rows eval_loss."""
    own = history(logging_steps=10)
    own.report_sets({"a": [], "b": []} if has_sets else [], "eval")
    scored = evaluator().evaluate(0)
    rewards = ((1.0, 0.0), (0.0, 0.0), (0.0, 1.0))
    groups = [
        scored_group(own, parts=[{"f": reward} for reward in own], of=group.group.prompt)
        for own, group in zip(rewards, scored.groups, strict=True)
    ]
    scored = dataclasses.replace(scored, groups=groups, scale=None)
    own.evaluation(0, evaluation_metrics(groups), scored)
    found = own.evaluated
    names = ["eval_a_", "eval_b_"] if has_sets else ["eval_"]
    for name in names:
        assert math.isfinite(found[name + "loss"])
        assert {name + "reward", name + "rewards/f/mean", name + "completions/mean_length"} <= found.keys()
    assert [found[name + "reward"] for name in names] == pytest.approx([0.25, 0.5] if has_sets else [1 / 3])


def test_parts_of_a_verifiers_reward_are_no_functions():
    """A set by name has the metrics of rows without one: a verifier's score and the format are no rewards of functions."""
    own, scored = history(logging_steps=10), evaluator().evaluate(0)
    groups = [
        scored_group(
            [1.0, 0.0], parts=[{"correct": 1.0, "format": 0.0}, {"correct": 0.0, "format": 0.0}], of=g.group.prompt
        )
        for g in scored.groups
    ]
    scored = dataclasses.replace(scored, groups=groups, sources=["a"] * len(groups))
    own.evaluation(0, evaluation_metrics(groups, scale=scored.scale), scored)
    plain = {name.removeprefix("eval_") for name in own.evaluated}
    own.report_sets({"a": []}, "eval")
    own.evaluation(0, evaluation_metrics(groups, scale=scored.scale), scored)
    by_name = {name.removeprefix("eval_").removeprefix("a_") for name in own.evaluated}
    assert plain - by_name == {"runtime", "samples_per_second"} and by_name <= plain


def test_the_loss_of_an_evaluation_is_that_of_its_advantages():
    """At ratio 1 the policy term is the mean of -advantage over tokens: by hand, for completions of unequal length."""
    scored = scored_group([1.0, 0.0], completions=[completion(3), completion(1)])
    own = config(beta=0.5, advantage_normalization_type="centered", aggregation="token")
    assert loss(own, [scored]) == pytest.approx(-(3 * 0.5 - 1 * 0.5) / 4)
