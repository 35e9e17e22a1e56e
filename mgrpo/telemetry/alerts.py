"""Warnings about a run whose steps have no signal, with the likely cause.

Pure functions over the metrics of a step, so that a running training and the report of its metrics.jsonl give the same warnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PATIENCE = 3
"""Steps in a row with a sign before a warning; in a shorter run, all of its steps."""
REPEAT_AFTER = 100
"""Steps before the same warning is repeated."""
MOST = 0.99
"""Smallest fraction that counts as "almost every"."""
HALF_UNSCORED = 0.5
"""Smallest fraction of completions without a score that leads to a warning."""
_PAGES = {
    "objective/": "docs/rewards.md",
    "val/no_score_rate": "docs/rewards.md",
    "tools/": "docs/environments.md",
}
"""Pages of the documentation by prefix of a metric's name; by default docs/troubleshooting.md."""

Metrics = Mapping[str, object]


class AlertWatch:
    """Counts the steps in a row that show each sign.

    Args:
        total_steps: the number of steps of the whole run.
    """

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.patience = max(1, min(PATIENCE, total_steps))
        self.has_worked = False
        """True once a step has shown no sign."""
        self.lasting: dict[str, int] = {}
        self.said_at: dict[str, int] = {}

    def after(self, step: int, metrics: Metrics) -> list[str]:
        """The warnings that are due after training step `step`, one sentence each."""
        return list(self.due(step, metrics).values())

    def due(self, step: int, metrics: Metrics) -> dict[str, str]:
        """The warnings of `after` by the metric that shows each sign."""
        found = signs(metrics)
        self.has_worked |= not found
        # A run whose steps had no signal, each for a different reason, must not end without a warning.
        is_over = step >= self.total_steps and not (self.has_worked or self.said_at)
        self.lasting = {name: self.lasting.get(name, 0) + 1 for name in found}
        due = {}
        for name, sentence in found.items():
            is_new = step - self.said_at.get(name, step - REPEAT_AFTER) >= REPEAT_AFTER
            if (is_over or self.lasting[name] >= self.patience) and is_new:
                self.said_at[name] = step
                due[name] = f"{_steps(self.lasting[name])}: {sentence}"
        return due


def replay(lines: Iterable[Metrics], total_steps: int) -> list[tuple[int, str, str]]:
    """The warnings of a run as `(step, metric, warning)`, from the lines of its metrics.jsonl."""
    watch = AlertWatch(total_steps)
    return [
        (step, name, text)
        for line in lines
        if isinstance(step := line.get("step"), int) and "optim/steps" in line
        for name, text in watch.due(step, line).items()
    ]


def help_page(metric: str) -> str:
    """The page of the documentation that helps with a sign."""
    return next((page for start, page in _PAGES.items() if metric.startswith(start)), "docs/troubleshooting.md")


def signs(metrics: Metrics) -> dict[str, str]:
    """The signs of one training step: a sentence with the likely cause, by the metric that shows the sign."""
    found = _unscored(metrics) | _truncated(metrics) | _uncalled(metrics)
    if not found:
        found |= _without_spread(metrics)
    if not found:
        found |= _untrained(metrics)
    return found


def _unscored(metrics: Metrics) -> dict[str, str]:
    found = {}
    for name in metrics:
        if name.startswith("objective/") and name.endswith("_error_rate") and _value(metrics, name) == 1:
            verifier = name.removeprefix("objective/").removesuffix("_error_rate")
            found[name] = (
                f"verifier {verifier} scored no completion ({name} is 1); look at its service, its time-out or the form of "
                "the ground truths"
            )
    rate, lost = _value(metrics, "val/no_score_rate"), _value(metrics, "turns/ended_by/error")
    if not found and rate >= HALF_UNSCORED:
        which = "no completion has a score" if rate == 1 else f"{100 * rate:.0f} % of the completions have no score"
        causes = []
        if lost > 0:
            causes.append(
                f"environments were lost, late or not free (turns/ended_by/error is {lost:.3g}), for the reasons in the log"
            )
        if not lost >= rate:
            causes.append("the reward functions return NaN or None, or a verifier fails")
        found["val/no_score_rate"] = f"{which} (val/no_score_rate is {rate:.3g}); {', and '.join(causes)}"
    return found


def _truncated(metrics: Metrics) -> dict[str, str]:
    cut, longest = _value(metrics, "completions/clipped_ratio"), _value(metrics, "completions/max_length")
    if cut >= MOST:
        return {
            "completions/clipped_ratio": f"almost every completion is cut off, the longest at {longest:.0f} tokens "
            f"(completions/clipped_ratio is {cut:.3g}); response_length is too small, or the model ends its answers with a "
            "token that is not among the stop tokens: look at eos_token_id in generation_config.json, or set stop_strings"
        }
    if cut == 0 and longest <= 1:
        return {
            "completions/max_length": "every completion is empty (completions/max_length is 1); the chat template does not "
            "suit the model, or ends the answer itself"
        }
    return {}


def _uncalled(metrics: Metrics) -> dict[str, str]:
    calls, failed = "tools/aggregate/avg_calls_per_rollout", "tools/aggregate/failure_rate"
    if _value(metrics, failed) == 1:
        return {
            failed: f"every call of a tool fails ({failed} is 1); rollouts/train_samples.jsonl has what the tools answered"
        }
    if _value(metrics, calls) != 0:
        return {}
    unreadable, unknown = (_value(metrics, f"turns/{kind}_calls") for kind in ("unreadable", "unknown"))
    if unreadable > 0:
        cause = (
            f"begins calls that cannot be read (turns/unreadable_calls is {unreadable:.3g}); look at tool_parser_type"
        )
    elif unknown > 0:
        cause = f"calls only tools that do not exist (turns/unknown_calls is {unknown:.3g}); look at tool_call_names"
    elif _value(metrics, "turns/max") <= 1:
        cause = "never begins a call; look at pass_tools_to_chat_template, tool_parser_type and the prompts"
    else:
        return {}
    return {calls: f"no tool is called ({calls} is 0): the model {cause}"}


def _without_spread(metrics: Metrics) -> dict[str, str]:
    if _value(metrics, "frac_reward_zero_std") != 1:
        return {}
    reward = _value(metrics, "reward")
    num_filtered = _value(metrics, "batch/filtered_prompts")
    if num_filtered > 0 and _value(metrics, "batch/filtered_prompts_solved") == num_filtered:
        cause = "every sampled prompt is solved; take harder data or end the run"
    elif reward == 0:
        cause = (
            "the data are too hard for the model, or the verifier does not find the answer in the form that it expects "
            "(string_matcher wants <answer> tags); compare rollouts/train_samples.jsonl with docs/rewards.md"
        )
    else:
        cause = "the reward function returns one value for everything, or the temperature is too low for answers that differ"
    return {
        "frac_reward_zero_std": f"the rewards within each group are equal, on average {reward:.3g} (frac_reward_zero_std is 1), "
        f"so there is nothing to learn from; {cause}"
    }


def _untrained(metrics: Metrics) -> dict[str, str]:
    if _value(metrics, "optim/steps") == 0:
        return {
            "optim/steps": "nothing was trained (optim/steps is 0): no sampled completion has an advantage and a trained "
            "token; look at batch/filtered_prompts and real_batch_size_ratio"
        }
    if _value(metrics, "optim/grad_norm") == 0:
        return {
            "optim/grad_norm": "the gradient is 0 (optim/grad_norm), so the weights do not change; look at the advantages"
        }
    return {}


def _value(metrics: Metrics, name: str) -> float:
    """A metric's value; NaN if missing or null, so that no comparison with it holds."""
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _steps(number: int) -> str:
    return "in this step" if number == 1 else f"{number} steps in a row"
