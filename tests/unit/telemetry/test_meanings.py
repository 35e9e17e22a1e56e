"""The table of metrics: every name that is logged, nothing else, and what docs/metrics.md says."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mgrpo.algo.agreement import DRIFT
from mgrpo.algo.loss_metrics import MAXIMA, METRICS
from mgrpo.algo.losses.own import PREFIX
from mgrpo.moving import from_values
from mgrpo.packing import pack_lengths
from mgrpo.rewards.rewarder import logged_metrics
from mgrpo.rewards.rubrics.buffer import evolution_metrics
from mgrpo.rewards.verifiers.code import Code
from mgrpo.rewards.verifiers.llm_judge import Quality
from mgrpo.telemetry.metrics import meanings
from mgrpo.telemetry.metrics.batch import batch_metrics
from mgrpo.telemetry.metrics.evaluation import evaluation_metrics
from mgrpo.telemetry.metrics.meanings import PLACEHOLDER
from mgrpo.telemetry.metrics.writer import MetricsWriter
from mgrpo.telemetry.report.charts import groups as groups_of_charts
from mgrpo.types import AgentRecord, RewardScale, TrajectoryRecord, Turn
from tests import builders
from tools.docs import metrics as page

ROOT = Path(__file__).parents[3]
SCALE = RewardScale(max_possible_score=1.0, verification_reward=1.0, format_reward=1.0)

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
        agent=AgentRecord(
            ended="ended", status=0, output="", seconds=1.0, counts={"refused/400": 1.0, "overridden/top_p": 1.0}
        ),
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


def made(tmp_path) -> set[str]:
    """Names that come out of the code without an engine, as a run's file has them."""
    settings = from_values(
        {
            "code_api_url": "http://localhost:1",
            "llm_judge_model": "hosted_vllm/m",
            "llm_judge_base_url": "http://localhost:1/v1",
        }
    )
    (asked,) = (key for key in keys("remote_endpoint.py") if key.startswith("objective/"))
    summed = [
        asked.replace("{}", "math", 1).replace("{}", key)
        for verifier in (Code(settings.reward), Quality(settings.reward))
        for key in verifier.metrics()
    ]
    of_the_loss = [*METRICS, *MAXIMA, f"{DRIFT}1", f"{PREFIX}clipped"]
    with MetricsWriter(tmp_path) as writer:
        for scale in (None, SCALE):
            writer.write(1, produced(scale))
        writer.write(2, dict.fromkeys([*summed, *of_the_loss], 0.0))
        for prefix in ("", "eval/"):
            writer.write(3, logged_metrics({"length": [1.0]}, prefix))
    return {name for line in (tmp_path / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}


KEY = re.compile(r"[a-z_]+(/[a-z0-9_{}]+)+")
"""A key with the shape of a metric; what an f-string fills in is {}."""
READERS = {"alerts.py", "progress.py", "report"}
"""In telemetry: they look for names that others log."""
OTHER_KEYS = {"cpu", "cuda", "tracker/{}", "engines", "agent/{}"}
"""Keys of states of random generators, of the line of engines.jsonl, and of an agent's own metrics, which get a prefix."""


def keys(*names: str, readers: bool = False) -> set[str]:
    """Keys that functions of the package give to dicts, of those in which one has the shape of a metric.

    Args:
        names: of files; empty: of all.
        readers: of those alone that look for names, or of all others.
    """
    found: set[str] = set()
    for path in sorted((ROOT / "mgrpo").rglob("*.py")):
        parts = path.relative_to(ROOT / "mgrpo").parts
        is_reader = parts[0] == "telemetry" and bool(READERS & set(parts))
        # That one gives them TRL's names.
        if parts[0] != "trl" and is_reader == readers and (not names or path.name in names):
            found |= keys_of(path.read_text())
    return found - OTHER_KEYS


def keys_of(source: str) -> set[str]:
    """The same for one file."""
    tree, found = ast.parse(source), set[str]()
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own = {key for node in ast.walk(function) for key in map(partial(spelled, constants), keyed(node)) if key}
            found |= own if any(map(KEY.fullmatch, own)) else set()
    return found


def keyed(node: ast.AST) -> Iterator[ast.expr | None]:
    """The keys of a dict, or those that an assignment adds to one."""
    if isinstance(node, ast.Dict):
        yield from node.keys
    elif isinstance(node, ast.DictComp):
        yield node.key
    elif isinstance(node, (ast.Assign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.slice for target in targets if isinstance(target, ast.Subscript))


def spelled(constants: Mapping[str, object], node: ast.expr | None) -> str:
    """A key with {} for what is not known before the code runs; empty where nothing of it is."""
    if isinstance(node, ast.JoinedStr):
        return "".join(spelled(constants, part) or "{}" for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return spelled(constants, node.value)
    value = constants.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
    return value if isinstance(value, str) else ""


def bare(name: str) -> str:
    """A row's name as `spelled` gives it."""
    return PLACEHOLDER.sub("{}", name)


def without_a_row(names: Iterable[str]) -> list[str]:
    """Of names, those that no row is for; one that an f-string fills in must leave room for a row."""
    rows = {bare(row.name) for row in meanings.metrics()}

    def is_known(name: str) -> bool:
        form = re.compile(".+".join(map(re.escape, name.split("{}"))))
        return name in rows or (any(map(form.fullmatch, rows)) if "{}" in name else meanings.find(name) is not None)

    return sorted(name for name in names if not is_known(name))


def not_logged(sources: Set[str], made: Iterable[str]) -> list[str]:
    """Of the rows, those that neither stand in the sources nor came out of the code."""
    found = {row.name for name in made if (row := meanings.find(name))}
    return [row.name for row in meanings.metrics() if bare(row.name) not in sources and row.name not in found]


def test_every_metric_that_is_logged_has_a_row(tmp_path):
    """A number that nobody has explained is read as something else."""
    sources = keys()
    assert {"lr", "learner_mfu", "time/total", "time/eval", "policy_version", "engines/serving"} <= sources
    assert without_a_row(sources | made(tmp_path)) == []


def test_every_row_is_logged_somewhere(tmp_path):
    """A curve that is promised and never comes is looked for in vain."""
    assert not_logged(keys(), made(tmp_path)) == []


def test_a_name_without_a_row_and_a_row_without_a_name_are_found(tmp_path):
    """The two tests above, of code that is wrong in either way."""
    source = 'def f(kind):\n    found = {"lr": 1, "val/ratios": 2, f"time/{kind}": 3}\n    found["optim/grad"] = 4\n'
    assert without_a_row(keys_of(source)) == ["optim/grad", "val/ratios"]
    assert without_a_row(["objective/a/b_reward", "eval/pass_at_4", "{}/no_such_end"]) == [
        "objective/a/b_reward",
        "{}/no_such_end",
    ]
    rows = {row.name for row in meanings.metrics()}
    assert set(not_logged({"lr"}, {"eval/pass_at_4"})) == rows - {"lr", "eval/pass_at_{n}"}


def test_every_metric_that_a_warning_or_a_page_looks_for_is_logged():
    """A renamed metric would end a warning in silence."""
    first = {row.name.split("/")[0] for row in meanings.metrics() if "/" in row.name}
    files = [p for p in sorted((ROOT / "mgrpo" / "telemetry").rglob("*.py")) if READERS & {p.name, p.parent.name}]
    constants = {n.value for p in files for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.Constant)}
    looked_for = {
        name for name in constants if isinstance(name, str) and KEY.fullmatch(name) and name.split("/")[0] in first
    }
    assert {"optim/steps", "eval/pass_at_1", "policy/entropy_avg"} <= looked_for
    assert without_a_row(looked_for | keys(readers=True)) == []


def test_what_a_batch_and_an_evaluation_promise_comes_out_of_them():
    """A table of good intentions: these must not only stand in the code."""
    found = {meanings.find(name).name for name in [*produced(SCALE), *evolution_metrics([], {})]}

    def promised(*sections: str) -> set[str]:
        return {row.name for row in meanings.metrics() if row.section in sections}

    # Of two completions a prompt, n = 2 and k = 1, 2.
    assert promised("Rewards", "Lengths", "Batch", "Evaluation") - found == set()
    # The pool of environments measures these, which a batch knows nothing of.
    of_the_pool = {"time/tools", "time/env_acquire", "env/replaced", "env/timeouts"}
    assert promised("Tools, environments and rubrics") - found == of_the_pool
    entropies = {"policy/entropy_avg", "policy/entropy_coef", "loss/entropy_avg"}
    experts = {"policy/routing_differs", "moe/load_max/{layer}", "moe/idle_experts"}
    measured = {*METRICS, *MAXIMA, f"{DRIFT}{{n}}"} | entropies | experts
    assert promised("Loss", "Engine and trainer") - found == measured


@pytest.mark.parametrize("names", [OLD_SCRIPT, OPEN_INSTRUCT, TRL], ids=["old script", "Open Instruct", "TRL"])
def test_every_name_of_the_peers_has_an_answer(names):
    """Whoever comes from there must find what became of a curve."""
    assert [name for name in names.split() if page.entry(name) is None] == []


def test_rows_are_whole():
    """One row a name, aliases that lead somewhere, and a reason for what is missing."""
    names = [row.name for row in (*meanings.metrics(), *page.other_names().values())]
    assert len(names) == len(set(names))
    for row in meanings.metrics():
        assert row.unit and row.meaning and row.of in ("own", "Open Instruct", "TRL", "verl", "old script"), row
        assert bool(row.line) == (bool(row.chart) and not row.is_pattern), row
    for row in page.other_names().values():
        assert row.status in ("alias", "not yet", "left out") and bool(row.target) == (row.status == "alias"), row
        assert page.is_logged(row.target) if row.target else row.note, row


def test_charts_draw_something_and_what_is_drawn_has_a_chart():
    """A title that is misspelled in a row takes the metric off the page."""
    charts = [chart for group in groups_of_charts().values() for chart in group]
    assert {chart.title for chart in charts} == {row.chart for row in meanings.metrics()} - {""}
    for chart in charts:
        assert chart.note and {*chart.words} <= {"log", "zero", "stacked", "large", "unsmoothed"}, chart
        assert not chart.compared or page.is_logged(chart.compared), chart


def test_a_name_is_found_by_its_most_exact_row():
    """objective/verifiable_reward is no verifier called "verifiable"."""
    for name, expected in {
        "objective/verifiable_reward": "objective/verifiable_reward",
        "objective/gsm8k_reward": "objective/{verifier}_reward",
        "objective/code_v2_error_rate": "objective/{verifier}_error_rate",
        "eval/pass_at_16": "eval/pass_at_{n}",
        "eval/pass_at_8_unbiased": "eval/pass_at_{k}_unbiased",
        "eval/pass_at_1": "eval/pass_at_1",
    }.items():
        assert meanings.find(name).name == expected
    assert [meanings.find(name) for name in ("eval/pass_at_all", "objective/a/b_reward", "scores2")] == [None] * 3
    assert not page.is_logged("objective/rlhf_reward") and page.is_logged("objective/length_reward")


def test_the_page_is_current():
    """The documentation and the code say the same."""
    written = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert written == page.to_markdown(), "run python -m tools.docs.metrics > docs/metrics.md"
