"""Which metrics a page draws together, and what each chart says about a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mgrpo.telemetry.progress import PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows.

    Args:
        metrics: by their names in its legend; a metric with a `*` stands for all that match, with what matches as the name.
        held_out: names of `metrics`, or further ones, with the metric of evaluations that is drawn as dots.
        lead: the metric with which runs are compared; "" for the first.
    """

    title: str
    metrics: Mapping[str, str]
    note: str = ""
    unit: str = ""
    held_out: Mapping[str, str] = field(default_factory=dict)
    may_be_log: bool = False
    from_zero: bool = False
    is_stacked: bool = False
    is_large: bool = False
    is_smoothed: bool = True
    lead: str = ""


GROUPS: Mapping[str, Sequence[Chart]] = {
    "Learning": (
        Chart(
            title="Reward",
            metrics={"training": "reward"},
            held_out={"held-out": "eval/scores"},
            note="Mean over every sampled completion, and of evaluations. It should rise; noise from step to step is usual.",
            is_large=True,
        ),
        Chart(
            title="Held-out accuracy",
            metrics={},
            held_out={"pass@1": "eval/pass_at_1", "of several": "eval/pass_at_*"},
            note="Share of right answers to prompts that are not trained on; and of prompts that one of several answers solves.",
            unit="%",
            is_large=True,
        ),
        Chart(
            title="Reward by verifier",
            metrics={"*": "objective/*_reward"},
            note="Mean score of each verifier or reward function by itself.",
        ),
        Chart(
            title="Spread of rewards in a group",
            metrics={"standard deviation": "reward_std"},
            note="Groups whose rewards are equal teach nothing.",
            from_zero=True,
        ),
        Chart(
            title="Groups without spread",
            metrics={"of all groups": "frac_reward_zero_std", "solved": "batch/percent_solved_mean"},
            note="Share of groups with equal rewards, and mean reward of a group as a share of the highest possible one.",
            unit="%",
        ),
        Chart(
            title="Entropy",
            metrics={"entropy": "policy/entropy_avg"},
            note="In nats per token. Falling slowly is usual; 0 early means that the model has stopped exploring.",
            from_zero=True,
        ),
        Chart(
            title="KL to the reference",
            metrics={"KL": "objective/kl2_avg"},
            note="In nats per token: how far the policy is from the model that it started from.",
            may_be_log=True,
        ),
        Chart(
            title="KL to the policy that sampled",
            metrics={"approximate KL": "policy/approxkl_avg"},
            note="Within a step: how far its updates move the policy. 0 with a single update per batch.",
            may_be_log=True,
        ),
        Chart(
            title="Clip fraction",
            metrics={
                "clipped": "policy/clipfrac_avg",
                "at the lower bound": "clip_ratio/low_mean",
                "at the upper bound": "clip_ratio/high_mean",
            },
            note="Share of trained tokens whose loss is clipped.",
            unit="%",
            from_zero=True,
        ),
        Chart(
            title="Gradient norm",
            metrics={"before clipping": "optim/grad_norm"},
            note="Of the last update of a step. A rise without end is divergence.",
            may_be_log=True,
        ),
        Chart(
            title="Learning rate", metrics={"learning rate": "lr"}, note="Of the step's last update.", is_smoothed=False
        ),
        Chart(
            title="Loss",
            metrics={"policy": "loss/policy_avg", "KL": "loss/kl_avg"},
            note="Per trained token. It need not fall: rewards say whether a policy learns.",
        ),
    ),
    "Completions": (
        Chart(
            title="Length",
            metrics={
                "mean": "completions/mean_length",
                "longest": "completions/max_length",
                "shortest": "completions/min_length",
            },
            note="In sampled tokens, of every completion.",
            from_zero=True,
        ),
        Chart(
            title="Length by result",
            metrics={"solved": "val/sequence_lengths_solved", "not solved": "val/sequence_lengths_unsolved"},
            held_out={"held-out": "eval/sequence_lengths"},
            note="Mean length in tokens of completions with the highest reward, and of the others.",
        ),
        Chart(
            title="Cut off",
            metrics={"cut off": "completions/clipped_ratio"},
            note="Share of completions that did not end by themselves.",
            unit="%",
            from_zero=True,
        ),
        Chart(
            title="Without a score",
            metrics={"no score": "val/no_score_rate"},
            note="Share of completions that no verifier could score.",
            unit="%",
            from_zero=True,
        ),
        Chart(
            title="Turns",
            metrics={"mean": "turns/mean", "most": "turns/max"},
            note="Of the model in a completion.",
            from_zero=True,
        ),
        Chart(
            title="Tool calls",
            metrics={"*": "tools/*/avg_calls_per_rollout"},
            note="Calls in a completion, by tool.",
            from_zero=True,
            lead="tools/aggregate/avg_calls_per_rollout",
        ),
        Chart(
            title="Failed tool calls",
            metrics={"*": "tools/*/failure_rate"},
            note="Share of calls that failed or were late.",
            unit="%",
            from_zero=True,
            lead="tools/aggregate/failure_rate",
        ),
    ),
    "Engines and speed": (
        Chart(
            title="Mismatch",
            metrics={
                "mean": "debug/vllm_vs_local_logprob_diff_mean",
                "largest": "debug/vllm_vs_local_logprob_diff_max",
            },
            note="Difference between the log-probabilities of trainer and engine under the same weights, in nats.",
            may_be_log=True,
        ),
        Chart(
            title="Difference by age",
            metrics={"*": "async/logprob_diff_age_*"},
            note="The same for tokens that older weights sampled, by the number of versions: what was learned since.",
            may_be_log=True,
        ),
        Chart(
            title="Importance correction",
            metrics={"clamped": "val/rho_clipfrac", "dropped": "val/rho_drop_frac"},
            note="Share of tokens whose weight is clamped or dropped because engine and trainer disagree.",
            unit="%",
            from_zero=True,
        ),
        Chart(
            title="Age of groups",
            metrics={"mean": "async/age_mean", "oldest": "async/age_max"},
            note="Versions of the weights between sampling and training.",
            from_zero=True,
        ),
        Chart(
            title="Engines that serve",
            metrics={"serving": "engines/serving", "failed": "engines/failed"},
            note="Engines that are given groups, and those that died in a step.",
            from_zero=True,
            is_smoothed=False,
        ),
        Chart(
            title="Time by phase",
            metrics={name: f"time/{name}" for name in PHASES},
            note="Seconds of a step, one phase on top of the other.",
            is_stacked=True,
            lead="time/total",
        ),
        Chart(
            title="Tokens per second",
            metrics={
                "engines": "time/actor_tokens_per_second",
                "learners": "time/learner_tokens_per_second_step",
            },
            note="Engines: while they sample. Learners: response tokens over the time of the whole step.",
            from_zero=True,
        ),
        Chart(
            title="Model FLOPs utilization",
            metrics={"learners": "learner_mfu"},
            note="Share of what the learners' GPUs could do.",
            unit="%",
        ),
        Chart(
            title="GPU memory",
            metrics={"in tensors": "perf/max_memory_allocated_gb", "reserved": "perf/max_memory_reserved_gb"},
            note="Largest of any learner, in GiB.",
            from_zero=True,
        ),
        Chart(
            title="Waiting",
            metrics={"engines idle": "async/engine_idle_share"},
            note="Share of a step in which no engine had anything to sample.",
            unit="%",
            from_zero=True,
        ),
    ),
}
