"""The table of metrics: complete, true of the code, and what docs/metrics.md says."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mgrpo.algo.agreement import DRIFT
from mgrpo.algo.loss_metrics import MAXIMA, METRICS
from mgrpo.packing import pack_lengths
from mgrpo.telemetry.batch import batch_metrics, staleness
from mgrpo.telemetry.evaluation import evaluation_metrics
from mgrpo.types import RewardScale, TrajectoryRecord, Turn
from tests import builders
from tools.docs import metrics as catalog

ROOT = Path(__file__).parents[3]

OLD_SCRIPT = """
episode lr epoch objective/kl objective/kl2 objective/kl3 objective/scores objective/rlhf_reward objective/non_score_reward
objective/entropy objective/loss objective/scores_mean objective/reward_std objective/verifiable_correct_rate loss/policy_avg
policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg time/from_scratch time/training val/sequence_lengths
val/num_stop_token_ids val/ratio val/ratio_var val/stop_token_rate val/format_scores other/real_batch_size_ratio other/packed_ratio
"""
OPEN_INSTRUCT = """
objective/kl0_avg objective/kl1_avg objective/kl2_avg objective/kl3_avg loss/kl_avg loss/policy_avg loss/total_avg
policy/clipfrac_avg policy/entropy_avg val/ratio val/ratio_var val/rho_clipfrac val/rho_weight val/rho_drop_frac
val/rho_drop_low_frac val/rho_drop_high_frac val/rho_hist debug/vllm_vs_local_logprob_diff_mean
debug/vllm_vs_local_logprob_diff_max debug/vllm_vs_local_logprob_diff_std debug/vllm_local_reverse_kl lr optim/grad_norm
_token_count
scores real_batch_size_ratio unsolved_batch_size_ratio packed_ratio val/solve_rate_hist val/total_reward_groups
val/sequence_lengths val/sequence_lengths_min val/sequence_lengths_max val/sequence_lengths_unsolved val/sequence_lengths_solved
val/sequence_lengths_unsolved_hist val/sequence_lengths_solved_hist val/stop_rate val/advantages_mean val/advantages_min
val/advantages_max val/advantages_hist val/actor_tokens_per_second val/format_scores objective/verifiable_reward
objective/verifiable_correct_rate objective/{verifier}_reward objective/{verifier}_correct_rate model_step_min model_step_max
model_step_mean num_steps_off_policy stale_results_dropped batch/prompt_lengths batch/response_lengths batch/filtered_prompts
batch/filtered_prompts_zero batch/filtered_prompts_solved batch/filtered_prompts_nonzero batch/filtered_prompts_pct
batch/percent_solved_mean batch/percent_solved_hist batch/no_resampled_prompts batch/total_prompts
batch/per_group_generation_times tools/{name}/avg_calls_per_rollout tools/{name}/failure_rate tools/{name}/avg_runtime
tools/aggregate/avg_calls_per_rollout tools/aggregate/failure_rate tools/aggregate/avg_runtime env/{name}/{metric}
evolving_rubrics/num_new_rubrics evolving_rubrics/num_active_rubrics evolving_rubrics/valid_rate evolving_rubrics/avg_gt_rubrics
evolving_rubrics/skipped evolving_rubrics/num_overrides evolving_rubrics/total_active evolving_rubrics/total_inactive
evolving_rubrics/total_persistent evolving_rubrics/total_rubrics_in_use evolving_rubrics/avg_evolving_reward
evolving_rubrics/std_evolving_reward evolving_rubrics/avg_persistent_reward evolving_rubrics/std_persistent_reward
evolving_rubrics/example_rubrics_table
episode global_step training_step epoch val/num_total_tokens val/num_step_tokens learner_tokens_per_second_overall
learner_tokens_per_second_step actor_mfu actor_mbu learner_mfu time/total time/training time/saving time/health_check
time/trainer_waiting_for_data time/generation_waiting_for_trainer time/weight_sync time/weight_sync_mean time/weight_sync_min
time/weight_sync_max time/weight_sync_median time/group_generation_mean time/group_generation_max time/group_generation_min
eval/scores eval/sequence_lengths eval/sequence_lengths_min eval/sequence_lengths_max eval/stop_rate eval/pass_at_1
eval/pass_at_{n} eval/pass_at_{k}_unbiased eval/actor_tokens_per_second sample_completions
eval/objective/verifiable_reward eval/objective/verifiable_correct_rate eval/objective/{verifier}_reward
eval/objective/{verifier}_correct_rate eval/val/format_scores
"""
TRL = """
num_tokens step_time completions/mean_length completions/min_length completions/max_length completions/mean_terminated_length
completions/min_terminated_length completions/max_terminated_length completions/clipped_ratio rewards/{verifier}/mean
rewards/{verifier}/std reward reward_std frac_reward_zero_std policy_loss entropy entropy_coef kl clip_ratio/low_mean
clip_ratio/low_min clip_ratio/high_mean clip_ratio/high_max clip_ratio/region_mean clip_ratio cispo_clip_ratio
vespo/phi_seq_mean aux_loss sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/mean sampling/importance_sampling_ratio/max
tools/call_frequency tools/failure_frequency ratio training_tok/s forward_time_s train_seq_len weight_sync_time_s
"""
ENTRIES = [metric for section in catalog.SECTIONS.values() for metric in section]


def is_logged(name):
    metric = catalog.find(name)
    return metric is not None and metric.status == "logged"


def groups():
    """One group in which every kind of metric appears."""
    parts = (
        {"gsm8k": 1.0, "correct": 1.0, "format": 1.0, "overlong": 0.0},
        {"gsm8k": math.nan, "correct": math.nan, "format": 0.0, "overlong": -0.5},
    )
    rewards = [part["gsm8k"] for part in parts]
    turn = Turn(start=0, end=1, calls=("search",), failed=(False,), seconds=(0.5,))
    trajectory = TrajectoryRecord(
        is_sampled=np.array([True, False]),
        turns=(turn,),
        messages=(),
        ended_by="stop",
        scored_text="",
        sampled_text="",
        metrics={"game/won": 1.0},
    )
    kept = builders.kept_tokens([1, 2], [])
    completions = [replace(builders.completion(), trajectory=trajectory, kept=kept) for _ in parts]
    return [
        builders.scored_group(rewards, completions=completions, parts=parts, of=builders.prompt(verifiers=("gsm8k",)))
    ]


def produced(scale):
    kept = groups()
    samples = [builders.train_sample(kept[0].group, index) for index in range(2)]
    step = batch_metrics(
        kept,
        [],
        samples=samples,
        packs=pack_lengths(samples, [[[0], [1]]], multiple_of=1, document_multiple_of=1),
        batch_size=2,
        policy_version=0,
        num_excluded_prompts=0,
        engine_s=1.0,
        scale=scale,
    )
    other = replace(kept[0].group.prompt, verifiers=("math",))
    mixture = [*kept, replace(kept[0], group=replace(kept[0].group, prompt=other))]
    return {**step, **evaluation_metrics(mixture, scale=scale, sources=["a", "b"], generate_s=1.0)}


@pytest.mark.parametrize(
    "scale", [None, RewardScale(max_possible_score=1.0, verification_reward=1.0, format_reward=1.0)]
)
def test_every_metric_of_a_batch_and_an_evaluation_is_in_the_catalog(scale):
    """A number that nobody has explained is read as something else."""
    assert [name for name in produced(scale) if not is_logged(name)] == []


def test_every_metric_of_the_loss_is_in_the_catalog():
    """The same for what the loss adds up."""
    names = [*METRICS, *MAXIMA, f"{DRIFT}1", "policy/entropy_avg"]
    assert [name for name in names if not is_logged(name)] == []


def test_every_metric_the_trainer_names_is_in_the_catalog():
    """The keys that the reporter writes as literals; `time/...` among them."""
    names = named_by_the_reporter("step_metrics", "evaluation", "asynchrony")
    assert {"lr", "time/total", "time/eval", "policy_version"} <= names
    assert sorted(name for name in names if not is_logged(name)) == []


def test_every_metric_of_an_asynchronous_run_is_in_the_catalog_and_made():
    """`async/...` is new to whoever reads it: nothing there may be unexplained, and nothing promised may be missing."""
    made = named_by_the_reporter("asynchrony") | staleness([], policy_version=0).keys()
    assert {metric.name for metric in catalog.SECTIONS["Asynchronous runs"]} == made


def named_by_the_reporter(*names):
    """The keys of dicts in these methods."""
    files = (ROOT / "mgrpo" / "run" / name for name in ("reporter.py", "step_metrics.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    functions = [node for node in nodes if getattr(node, "name", "") in names]
    return {
        key.value
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }


def test_what_is_logged_is_produced():
    """A catalog of good intentions: rewards, lengths, batch and evaluation must really come out of the code."""
    made = {
        catalog.find(name).name
        for name in produced(RewardScale(max_possible_score=1.0, verification_reward=1.0, format_reward=1.0))
    }
    sections = ("Rewards", "Lengths", "Batch", "Evaluation")
    promised = {metric.name for title in sections for metric in catalog.SECTIONS[title] if metric.status == "logged"}
    # Of two completions a prompt, n = 2 and k = 1, 2.
    assert promised - made == set()
    # The pool of environments measures these, which a batch knows nothing of.
    of_the_pool = {"time/tools", "time/env_acquire", "env/replaced", "env/timeouts"}
    promised = {
        metric.name for metric in catalog.SECTIONS["Tools, environments and rubrics"] if metric.status == "logged"
    }
    assert promised - made == of_the_pool
    measured = {*METRICS, *MAXIMA, f"{DRIFT}{{n}}", "policy/entropy_avg"}
    sections = ("Loss", "Engine and trainer")
    promised = {metric.name for title in sections for metric in catalog.SECTIONS[title] if metric.status == "logged"}
    assert promised - made == measured


@pytest.mark.parametrize("names", [OLD_SCRIPT, OPEN_INSTRUCT, TRL], ids=["old script", "Open Instruct", "TRL"])
def test_every_name_of_the_peers_has_an_answer(names):
    """Whoever comes from there must find what became of a curve."""
    assert [name for name in names.split() if catalog.find(name) is None] == []


def test_entries_are_whole():
    """One entry a name, aliases that lead somewhere, and a reason for what is missing."""
    names = [metric.name for metric in ENTRIES]
    assert len(names) == len(set(names))
    for metric in ENTRIES:
        if metric.status == "alias":
            assert is_logged(metric.target), metric
        else:
            assert metric.meaning and not metric.target, metric
        assert bool(metric.unit) == (metric.status == "logged"), metric


def test_a_name_is_found_by_its_most_exact_entry():
    """objective/verifiable_reward is no verifier called "verifiable"."""
    assert catalog.find("objective/verifiable_reward").name == "objective/verifiable_reward"
    assert catalog.find("objective/gsm8k_reward").name == "objective/{verifier}_reward"
    assert catalog.find("objective/code_v2_error_rate").name == "objective/{verifier}_error_rate"
    assert catalog.find("eval/pass_at_16").name == "eval/pass_at_{n}"
    assert catalog.find("eval/pass_at_8_unbiased").name == "eval/pass_at_{k}_unbiased"
    assert catalog.find("eval/pass_at_1").name == "eval/pass_at_1"
    assert catalog.find("eval/pass_at_all") is None
    assert catalog.find("objective/a/b_reward") is None
    assert catalog.find("scores2") is None


def test_the_page_is_current():
    """The documentation and the code say the same."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == catalog.to_markdown(), "run python -m tools.docs.metrics > docs/metrics.md"
