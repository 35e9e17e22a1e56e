"""Every metric by name, its own and the peers': what it means and whether a run logs it.

The one table behind docs/metrics.md, which `python -m tools.docs.metrics > docs/metrics.md` writes. A name in braces
stands for many: {verifier} for any without a slash, {n} and {k} for numbers.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mgrpo.telemetry.alerts import HALF_UNSCORED, MOST, PATIENCE, REPEAT_AFTER
from mgrpo.telemetry.batch import LENGTH_BINS, MAGNITUDES, RATE_BINS
from tools.docs.markdown import table

OI, OLD, TRL, VERL, OWN = "Open Instruct", "old script", "TRL", "verl", "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One name."""

    name: str
    status: Literal["logged", "alias", "not yet", "left out"]
    source: str
    """Whose name it is."""
    unit: str
    """Empty unless logged."""
    meaning: str
    """Of an alias, where it differs from its target; of what is missing, why."""
    target: str = ""
    """The name under which an alias is logged."""


def logged(name: str, source: str, unit: str, meaning: str) -> Metric:
    return Metric(name=name, status="logged", source=source, unit=unit, meaning=meaning)


def alias(name: str, source: str, target: str, note: str = "") -> Metric:
    return Metric(name=name, status="alias", source=source, unit="", meaning=note, target=target)


def not_yet(name: str, source: str, reason: str) -> Metric:
    return Metric(name=name, status="not yet", source=source, unit="", meaning=reason)


def left_out(name: str, source: str, reason: str) -> Metric:
    return Metric(name=name, status="left out", source=source, unit="", meaning=reason)


_RUNNING = "needs a total over the run that a resumed run continues"
_PER_GROUP = "engines sample groups at the same time and do not report the time of one"
_ENDED = (
    ("stop", "the model answered without a call"),
    ("length", "no further token was allowed"),
    ("max_calls", "no further call was allowed"),
    ("done", "the environment said so"),
    ("error", "the environment was lost or late; they have no score"),
)
_CALLING = (
    (
        "tools/{name}/avg_calls_per_rollout",
        OI,
        "count",
        "calls of a tool, which the model knows by this name, in a completion, mean over all sampled",
    ),
    ("tools/{name}/failure_rate", OI, "fraction", "of its calls, those that failed or were late; null without any"),
    ("tools/aggregate/avg_calls_per_rollout", OI, "count", "calls of all tools together"),
    ("tools/aggregate/failure_rate", OI, "fraction", "of all calls, those that failed or were late"),
    ("turns/mean", OWN, "count", "turns of the model in a completion, mean over all sampled"),
    ("turns/max", OWN, "count", "most turns of a completion"),
    *((f"turns/ended_by/{how}", OWN, "fraction", f"completions that ended because {why}") for how, why in _ENDED),
    (
        "turns/sampled_token_share",
        OWN,
        "fraction",
        "of their tokens, those that the model has sampled; the others are what it was answered",
    ),
    (
        "turns/unreadable_calls",
        OWN,
        "count",
        "calls that were begun and could not be read, in a completion; many: another tool_parser_type",
    ),
    ("turns/unknown_calls", OWN, "count", "calls of tools that do not exist, in a completion"),
    (
        "env/{name}/{metric}",
        OI,
        "any",
        "what an environment reports by itself, the last value of a completion, mean over completions",
    ),
)
_RUBRICS = "rubrics do not evolve; the verifier rubric judges by those in the row"
_FLOPS = "which GPUs the engines have is not asked"
_EXTREME = "a minimum or maximum over ranks would change with the layout; the mean is logged"
_SUM = "the sum over a completion's tokens there, a mean over tokens here"

# fmt: off
SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Step": (
        logged("step", OWN, "count", "training step, the first is 1; 0 for an evaluation before it"),
        logged("policy_version", OWN, "version", "version of the weights after the step"),
        logged("episode", OI, "count", "completions sampled for so far: step x prompts x samples"),
        alias("global_step", OI, "episode"),
        alias("training_step", OI, "step"),
        not_yet("epoch", OI, "the sampler's epoch is not reported; Open Instruct: episode / samples / rows of the dataset"),
        logged("lr", OI, "1", "learning rate of the step's last update; of the next one where it had none"),
        logged("optim/grad_norm", OI, "1", "norm of the whole gradient of the step's last update, before clipping"),
        logged("lora/update_ratio", OWN, "1", "with adapters: norm of scale B A / norm of W after the step, the mean over adapted layers. In bfloat16 an update below 1e-3 is mostly rounded away, in trainer and engines alike"),
        logged("optim/steps", OWN, "count", "updates of the step; a mini-batch without a trained token has none"),
        logged("optim/skipped_steps", OWN, "count", "of these, skipped because the gradient was not finite; in float16 also because it overflowed, which halves policy/loss_scale"),
        logged("policy/loss_scale", OWN, "1", "what the loss of the step's last update was multiplied by; only with model_dtype=float16"),
        logged("sync/bytes", OWN, "bytes", "moved by the weight sync, over all learners and engines"),
        logged("val/num_step_tokens", OI, "tokens", "in the step's packs, padding included; Open Instruct counts each prompt once and no padding"),
        not_yet("val/num_total_tokens", OI, _RUNNING),
        not_yet("num_tokens", TRL, _RUNNING),
        left_out("_token_count", OI, "internal there: the weight of a rank's averages"),
    ),
    "Rewards": (
        logged("scores", OI, "reward", "mean reward of the groups trained on"),
        alias("objective/scores", OLD, "scores"),
        alias("objective/scores_mean", OLD, "scores"),
        logged("reward", TRL, "reward", "mean reward of every completion sampled, also in groups that a filter left out, so that filtering does not raise it"),
        logged("reward_std", TRL, "reward", "standard deviation (n - 1) of a group's rewards, mean over all sampled groups with two scores or more; TRL's later versions: of all rewards together, with scale_rewards=batch"),
        alias("objective/reward_std", OLD, "reward_std"),
        logged("frac_reward_zero_std", TRL, "fraction", "of these groups, those whose rewards are equal up to rounding"),
        left_out("objective/rlhf_reward", OLD, "scores - beta x KL; both are logged: scores, loss/kl_avg"),
        alias("objective/non_score_reward", OLD, "loss/kl_avg", f"-beta x KL; {_SUM}"),
        logged("objective/verifiable_reward", OI, "reward", "verification_reward x weighted sum of the row's verifiers, before format and stop rules"),
        logged("objective/verifiable_correct_rate", OI, "fraction", "completions for which that is above 0; objective/correct_reward is the strict one"),
        logged("objective/{verifier}_reward", OI, "score", "mean score of the verifier or of the user's reward function itself; Open Instruct: times verification_reward"),
        logged("objective/{verifier}_correct_rate", OI, "fraction", "of the completions it scored, those with a score above 0"),
        logged("objective/{verifier}_error_rate", OWN, "fraction", "of all completions sampled for it, those it could not score; not counted as wrong"),
        logged("objective/correct_reward", OWN, "fraction", "completions whose verifiers all gave the full score, whatever format and stop rules say"),
        logged("objective/format_reward", OWN, "fraction", "completions in the R1 format, when it is asked for"),
        logged("objective/overlong_reward", OWN, "reward", "mean penalty for the length of a completion, with overlong_cache_length"),
        logged("val/format_scores", OI, "reward", "mean of r1_style_format_reward x (in the format)"),
        alias("rewards/{verifier}/mean", TRL, "objective/{verifier}_reward"),
        logged("rewards/{verifier}/std", TRL, "score", "standard deviation (n - 1) of the scores of the verifier or reward function"),
        logged("val/no_score_rate", OWN, "fraction", "of all completions sampled, those without a score, which are not trained on"),
        logged("unsolved_batch_size_ratio", OI, "fraction", "of the scored completions, those whose reward, without the penalty for length, is below the highest possible one of its row, which is higher with several verifiers"),
    ),
    "Judges and reward functions": (
        logged("objective/{verifier}_prompt_tokens", OWN, "tokens", "that a judge has read since the start"),
        logged("objective/{verifier}_completion_tokens", OWN, "tokens", "that a judge has written since the start"),
        logged("objective/{verifier}_requests", OWN, "requests", "sent to a judge since the start, including repeated ones"),
        logged("objective/{verifier}_tests", OWN, "tests", "that code or code_stdio has run since the start"),
        logged("objective/{verifier}_tests_in_process", OWN, "tests", "of these, those that the program's own process has decided, which a program can forge (docs/code.md)"),
        logged("custom/{name}", OWN, "any", "mean of the values that reward functions passed to log_metric in the step"),
        logged("eval/custom/{name}", OWN, "any", "the same in an evaluation"),
    ),
    "Lengths": (
        logged("val/sequence_lengths", OI, "tokens", "mean length of the completions trained on, in sampled tokens; Open Instruct also counts tool output"),
        logged("val/sequence_lengths_min", OI, "tokens", "shortest of them"),
        logged("val/sequence_lengths_max", OI, "tokens", "longest of them"),
        logged("val/sequence_lengths_solved", OI, "tokens", "mean length of those with the highest possible reward; null, not 0, without any"),
        logged("val/sequence_lengths_unsolved", OI, "tokens", "mean length of the other scored ones; Open Instruct: of those with reward 0"),
        logged("val/sequence_lengths_solved_hist", OI, "lengths", "their lengths"),
        logged("val/sequence_lengths_unsolved_hist", OI, "lengths", "their lengths"),
        logged("val/stop_rate", OI, "fraction", "completions trained on that ended by themselves"),
        alias("val/stop_token_rate", OLD, "val/stop_rate"),
        alias("val/num_stop_token_ids", OLD, "val/stop_rate", "a count there"),
        logged("batch/prompt_lengths", OI, "lengths", "of the prompts trained on"),
        logged("batch/response_lengths", OI, "lengths", "of the completions trained on"),
        logged("completions/mean_length", TRL, "tokens", "mean number of sampled tokens of every completion, also in groups that a filter left out"),
        logged("completions/min_length", TRL, "tokens", "shortest of them"),
        logged("completions/max_length", TRL, "tokens", "longest of them"),
        logged("completions/mean_terminated_length", TRL, "tokens", "mean length of those that ended by themselves; null, not 0, without any"),
        logged("completions/min_terminated_length", TRL, "tokens", "shortest of those"),
        logged("completions/max_terminated_length", TRL, "tokens", "longest of those"),
        logged("completions/clipped_ratio", TRL, "fraction", "of every completion sampled, those that did not end by themselves"),
    ),
    "Batch": (
        logged("real_batch_size_ratio", OI, "fraction", "completions with a trained token / (prompts x samples) of a full step"),
        alias("other/real_batch_size_ratio", OLD, "real_batch_size_ratio"),
        logged("packed_ratio", OI, "1", "packs that hold a completion / completions"),
        alias("other/packed_ratio", OLD, "packed_ratio"),
        logged("val/total_reward_groups", OI, "count", "groups with a trained token"),
        logged("val/advantages_mean", OI, "1", "mean advantage of the completions with a trained token"),
        logged("val/advantages_min", OI, "1", "the lowest"),
        logged("val/advantages_max", OI, "1", "the highest"),
        logged("val/advantages_hist", OI, "advantages", "all of them"),
        logged("batch/total_prompts", OI, "count", "groups trained on"),
        logged("batch/filtered_prompts", OI, "count", "groups sampled and left out because their rewards are equal"),
        logged("batch/filtered_prompts_zero", OI, "count", "of these, with reward 0"),
        logged("batch/filtered_prompts_solved", OI, "count", "of these, with the highest possible reward"),
        logged("batch/filtered_prompts_nonzero", OI, "count", "of these, with another reward"),
        logged("batch/filtered_prompts_unscored", OWN, "count", "of these, without any score"),
        logged("batch/filtered_prompts_pct", OI, "fraction", "groups left out / groups sampled"),
        logged("batch/no_resampled_prompts", OI, "count", "prompts that this step's results exclude for good (no_resampling_pass_rate)"),
        logged("batch/percent_solved_mean", OI, "fraction", "mean reward of a group / its highest possible one, mean over the groups trained on"),
        logged("batch/percent_solved_hist", OI, "rates", "that share of each group"),
        alias("val/solve_rate_hist", OI, "batch/percent_solved_hist"),
        logged("batch/padding_frac", OWN, "fraction", "of the tokens in the packs, those that are padding"),
        logged("batch/lost_token_frac", OWN, "fraction", "of the response tokens, those in no pack: must be 0"),
        logged("model_step_mean", OI, "version", "of the weights that sampled, mean over the tokens trained on"),
        logged("model_step_min", OI, "version", "the oldest"),
        logged("model_step_max", OI, "version", "the newest"),
        logged("num_steps_off_policy", OI, "version", "version that the step's first update starts from - model_step_mean"),
        logged("stale_results_dropped", OI, "count", "groups too old to train on; always 0, because what would become too old is waited for"),
        not_yet("batch/per_group_generation_times", OI, _PER_GROUP),
    ),
    "Engines": (
        logged("engines/serving", OWN, "count", "engines that are given groups when the step has its own; fewer than vllm_num_engines while some start again"),
        logged("engines/failed", OWN, "count", "engines that have died, or were given up because they did not answer, since the step before"),
        logged("engines/replayed_groups", OWN, "count", "groups that have begun again on other engines for that reason, or because their engine was removed"),
    ),
    "Asynchronous runs": (
        logged("async/age_mean", OWN, "version", "version that the step's first update starts from - oldest version among a group's tokens, mean over the groups trained on"),
        logged("async/age_max", OWN, "version", "the largest; at most max_staleness"),
        logged("async/mixed_completions", OWN, "count", "completions trained on whose tokens come from several versions; only with inflight_updates"),
        logged("async/admitted", OWN, "count", "groups that have begun since the step before; a run begins with those of async_steps + 1 steps. A resumed run starts to count again"),
        logged("async/learner_waited_s", OWN, "s", "from the request for the step's batch until every learner has it: time/generate, time/score and packing"),
        logged("async/engine_idle_share", OWN, "fraction", "of time/total, the part for which no engine had anything to sample"),
        logged("time/drain", OWN, "s", "waiting until the engines are paused, before they receive weights; without inflight_updates they finish their completions first"),
    ),
    "Replay buffer": (
        logged("replay/groups", OWN, "count", "groups of earlier steps that the step trains on, in place of some of batch/filtered_prompts; metrics of rewards, lengths and versions are of the step's own groups"),
        logged("replay/age_mean", OWN, "steps", "since their sampling began, mean over them"),
        logged("replay/age_max", OWN, "steps", "the largest; at most max_staleness, if that is set"),
        logged("replay/stored", OWN, "count", "groups in the buffer, of at most replay_buffer_size"),
    ),
    "Loss": (
        logged("loss/policy_avg", OI, "1", "policy term per trained token"),
        alias("objective/loss", OLD, "loss/policy_avg"),
        alias("policy_loss", TRL, "loss/policy_avg"),
        logged("loss/kl_avg", OI, "1", "beta x KL estimate per trained token"),
        logged("loss/total_avg", OI, "1", "the sum of both; Open Instruct's is scaled by the number of ranks"),
        logged("policy/approxkl_avg", OLD, "nats", "(logprob - old logprob)^2 / 2"),
        logged("policy/clipfrac_avg", OI, "fraction", "trained tokens whose loss is clipped"),
        alias("clip_ratio", TRL, "policy/clipfrac_avg"),
        alias("clip_ratio/region_mean", TRL, "policy/clipfrac_avg"),
        alias("cispo_clip_ratio", TRL, "policy/clipfrac_avg", "policy_loss=cispo"),
        logged("clip_ratio/low_mean", TRL, "fraction", "those clipped at the lower bound"),
        logged("clip_ratio/high_mean", TRL, "fraction", "those clipped at the upper bound"),
        left_out("clip_ratio/low_min", TRL, _EXTREME),
        left_out("clip_ratio/high_max", TRL, _EXTREME),
        logged("policy/bounded_frac", OWN, "fraction", "trained tokens whose loss delta or dual_clip bounds"),
        logged("val/policy_term_drop_frac", OWN, "fraction", "trained tokens whose policy term a mask of whole completions or of entropy drops"),
        logged("val/ratio", OI, "1", "exp(logprob - old logprob), or the completion's under a sequence level"),
        alias("ratio", TRL, "val/ratio"),
        logged("val/ratio_var", OI, "1", "its variance over the trained tokens"),
        logged("policy/entropy_avg", OI, "nats", "entropy of the distribution that a token is drawn from, at the sampling temperature and after its cuts (top_k, top_p, min_p)"),
        logged("rollout/kept_tokens_avg", OWN, "count", "tokens that were left to sample from, where the sampling is cut; mean over the sampled tokens"),
        logged("rollout/kept_single_share", OWN, "fraction", "sampled tokens that were the only one left: they teach nothing"),
        logged("rollout/kept_unknown_share", OWN, "fraction", "sampled tokens that are not trained, because the engine did not say all that was left to sample them from"),
        alias("objective/entropy", OLD, "policy/entropy_avg", f"-log probability of the sampled tokens; {_SUM}"),
        alias("entropy", TRL, "policy/entropy_avg"),
        not_yet("entropy_coef", TRL, "the weight of the entropy bonus is not reported"),
        not_yet("vespo/phi_seq_mean", TRL, "the loss does not report the gate's value"),
        not_yet("aux_loss", TRL, "routers have no auxiliary loss; they learn from the rewards alone"),
        logged("objective/kl0_avg", OI, "nats", "d = logprob - reference logprob"),
        logged("objective/kl1_avg", OI, "nats", "d^2 / 2"),
        logged("objective/kl2_avg", OI, "nats", "exp(-d) - 1 + d"),
        logged("objective/kl3_avg", OI, "nats", "ratio x d"),
        alias("objective/kl", OLD, "objective/kl0_avg", _SUM),
        alias("objective/kl2", OLD, "objective/kl1_avg", _SUM),
        alias("objective/kl3", OLD, "objective/kl2_avg", _SUM),
        alias("kl", TRL, "objective/kl2_avg"),
    ),
    "A loss of your own": (
        logged("custom/loss/{name}", OWN, "any", "what the function that policy_loss names reports: its sums divided by its counts (docs/algorithms.md)"),
    ),
    "Engine and trainer": (
        logged("debug/vllm_vs_local_logprob_diff_mean", OI, "nats", "|logprob under the weights that the step starts from - the engine's|, of trained tokens that these weights have sampled; missing where there are none. Under use_vllm_logprobs, where nothing is scored before the first update, under the weights of each update"),
        logged("debug/vllm_vs_local_logprob_diff_std", OI, "nats", "its standard deviation over these tokens"),
        logged("debug/vllm_vs_local_logprob_diff_max", OI, "nats", "its largest value"),
        logged("debug/vllm_local_reverse_kl", OI, "nats", "the engine's logprob - logprob of these tokens: an unbiased estimate of KL(engine, policy); Open Instruct multiplies it by the probability once more, which makes it biased"),
        logged("debug/vllm_vs_local_ratio_tail_frac", OWN, "fraction", "those of these tokens whose probabilities differ by more than a tenth: exp(difference) outside [0.9, 1.1]"),
        logged("async/logprob_diff_age_{n}", OWN, "nats", "the same mean over tokens that weights n versions older have sampled: what the policy has learned since; 127: or older"),
        alias("sampling/sampling_logp_difference/mean", TRL, "debug/vllm_vs_local_logprob_diff_mean"),
        alias("sampling/sampling_logp_difference/max", TRL, "debug/vllm_vs_local_logprob_diff_max"),
        logged("val/rho_weight", OI, "1", "weight of the policy term, 0 where it is dropped"),
        alias("sampling/importance_sampling_ratio/mean", TRL, "val/rho_weight"),
        not_yet("sampling/importance_sampling_ratio/min", TRL, "the loss reports sums only"),
        not_yet("sampling/importance_sampling_ratio/max", TRL, "the loss reports sums only"),
        logged("val/rho_clipfrac", OI, "fraction", "tokens whose weight is clamped"),
        logged("val/rho_drop_frac", OI, "fraction", "tokens that a mask bound drops"),
        logged("val/rho_drop_low_frac", OI, "fraction", "below the lower one"),
        logged("val/rho_drop_high_frac", OI, "fraction", "above the upper one"),
        not_yet("val/rho_hist", OI, "the loss reports sums only"),
    ),
    "Time": (
        logged("time/total", OI, "s", "the whole step"),
        alias("step_time", TRL, "time/total"),
        logged("time/generate", OWN, "s", "waiting for the engines' answers"),
        logged("time/score", OWN, "s", "then waiting for verifiers or reward functions"),
        logged("time/train", OWN, "s", "packing, forward, backward and updates"),
        alias("time/training", OI, "time/train"),
        logged("time/sync", OWN, "s", "sending the weights to the engines"),
        alias("time/weight_sync", OI, "time/sync"),
        alias("weight_sync_time_s", TRL, "time/sync"),
        logged("time/eval", OWN, "s", "generation for held-out prompts"),
        logged("time/unix", OWN, "s", "when the line was written, since 1970 (UTC)"),
        *(not_yet(f"time/weight_sync_{which}", OI, "the sync of all engines is timed as one") for which in ("mean", "min", "max", "median")),
        not_yet("time/saving", OI, "exports are not timed"),
        not_yet("time/health_check", OI, "there is no health check between steps"),
        alias("time/trainer_waiting_for_data", OI, "async/learner_waited_s", "asynchronous runs"),
        alias("time/generation_waiting_for_trainer", OI, "async/engine_idle_share", "as a share of the step; asynchronous runs"),
        *(not_yet(f"time/group_generation_{which}", OI, _PER_GROUP) for which in ("mean", "max", "min")),
        not_yet("time/from_scratch", OLD, _RUNNING),
        not_yet("forward_time_s", TRL, "forward and backward are timed as one"),
        logged("time/learner_tokens_per_second_step", OWN, "tokens/s", "response tokens trained on / time/total; Open Instruct also counts prompts"),
        alias("learner_tokens_per_second_step", OI, "time/learner_tokens_per_second_step", "every reading of a clock is under time/"),
        alias("training_tok/s", TRL, "time/learner_tokens_per_second_step"),
        not_yet("learner_tokens_per_second_overall", OI, _RUNNING),
        alias("val/actor_tokens_per_second", OI, "time/actor_tokens_per_second"),
        logged("time/actor_tokens_per_second", OWN, "tokens/s", "tokens of the step's prompts, each once, and completions / seconds for which any engine had something to sample since the step before"),
        not_yet("train_seq_len", TRL, "val/num_step_tokens counts the packs together"),
        logged("time/learner_tokens_per_second_per_gpu", OWN, "tokens/s", "tokens in the packs / seconds of the learners' part of the step / learner ranks"),
        logged("learner_mfu", OI, "fraction", "operations of all passes of the step, without what recomputation repeats, / what the learners' GPUs could do at their peak in the learners' part of the step; only on GPUs whose data sheet the planner has"),
        not_yet("actor_mfu", OI, _FLOPS),
        not_yet("actor_mbu", OI, _FLOPS),
        logged("perf/max_memory_allocated_gb", VERL, "GiB", "largest amount in tensors on any learner's GPU since the previous step; only on GPUs"),
        logged("perf/max_memory_reserved_gb", VERL, "GiB", "the same, as taken from the GPU by torch's allocator"),
    ),
    "Evaluation": (
        logged("eval/scores", OI, "reward", "mean reward"),
        logged("eval/no_score_rate", OWN, "fraction", "completions without a score; they count as wrong"),
        logged("eval/sequence_lengths", OI, "tokens", "mean length, in sampled tokens"),
        logged("eval/sequence_lengths_min", OI, "tokens", "shortest completion"),
        logged("eval/sequence_lengths_max", OI, "tokens", "longest completion"),
        logged("eval/stop_rate", OI, "fraction", "completions that ended by themselves"),
        logged("eval/pass_at_1", OI, "fraction", "correct completions of a prompt, mean over prompts. Correct: full score of each verifier and the highest possible reward"),
        logged("eval/pass_at_{n}", OI, "fraction", "prompts with a correct one among their n completions"),
        logged("eval/pass_at_{k}_unbiased", OI, "fraction", "1 - C(n - c, k) / C(n, k) with c correct of n, mean over prompts; k = 1, 2, 4 ... up to n"),
        logged("eval/objective/verifiable_reward", OI, "reward", "as objective/verifiable_reward"),
        logged("eval/objective/verifiable_correct_rate", OI, "fraction", "as objective/verifiable_correct_rate"),
        logged("eval/objective/{verifier}_reward", OI, "score", "as objective/{verifier}_reward"),
        logged("eval/objective/{verifier}_correct_rate", OI, "fraction", "as objective/{verifier}_correct_rate"),
        logged("eval/objective/{verifier}_error_rate", OWN, "fraction", "as objective/{verifier}_error_rate"),
        logged("eval/rewards/{verifier}/std", TRL, "score", "as rewards/{verifier}/std"),
        logged("eval/val/format_scores", OI, "reward", "as val/format_scores"),
        *(
            logged(f"eval/by_{kind}/{{{kind}}}/{name}", OWN, unit, meaning + whose)
            for kind, whose in (("source", "the prompts of one dataset, where there are several"), ("verifier", "the prompts that name this verifier, where there are several"))
            for name, unit, meaning in (
                ("scores", "reward", "mean reward of "),
                ("pass_at_1", "fraction", "as eval/pass_at_1, of "),
                ("pass_at_{n}", "fraction", "as eval/pass_at_{n}, of "),
            )
        ),
        alias("eval/actor_tokens_per_second", OI, "time/eval_actor_tokens_per_second"),
        logged("time/eval_actor_tokens_per_second", OWN, "tokens/s", "tokens of the held-out prompts, each once, and completions / time/eval"),
        left_out("sample_completions", OI, "a table there; here rollouts/eval_step_N.jsonl, and samples of it in report.html"),
    ),
    "Tools, environments and rubrics": (
        *(logged(*entry) for entry in _CALLING),
        logged("time/tools/{name}/avg_runtime", OWN, "s", "that a call of this tool took, mean over its calls"),
        logged("time/tools/aggregate/avg_runtime", OWN, "s", "the same, over the calls of all tools"),
        alias("tools/{name}/avg_runtime", OI, "time/tools/{name}/avg_runtime", "every reading of a clock is under time/"),
        alias("tools/aggregate/avg_runtime", OI, "time/tools/aggregate/avg_runtime"),
        alias("tools/call_frequency", TRL, "tools/aggregate/avg_calls_per_rollout"),
        alias("tools/failure_frequency", TRL, "tools/aggregate/failure_rate", "0 there without a call"),
        logged("time/tools", OWN, "s", "of the step in which any call was waited for"),
        logged("time/env_acquire", OWN, "s", "waiting for an environment that is free, mean over completions"),
        logged("env/replaced", OWN, "count", "processes of environments that were ended and started again since the step before"),
        logged("env/timeouts", OWN, "count", "calls and beginnings of environments that were late since the step before"),
        *(logged(f"eval/{name}", source, unit, f"as {name}") for name, source, unit, _ in _CALLING),
        *(
            not_yet(f"evolving_rubrics/{what}", OI, _RUBRICS)
            for what in (
                "num_new_rubrics", "num_active_rubrics", "valid_rate", "avg_gt_rubrics", "skipped", "num_overrides", "total_active",
                "total_inactive", "total_persistent", "total_rubrics_in_use", "avg_evolving_reward", "std_evolving_reward",
                "avg_persistent_reward", "std_persistent_reward", "example_rubrics_table",
            )
        ),
    ),
}
# fmt: on

INTRODUCTION = f"""# Metrics

Written by `python -m tools.docs.metrics > docs/metrics.md`; do not edit.

A training step is one line of `metrics.jsonl`, an evaluation another, whose names begin with `eval/`. Names are Open Instruct's
where it has one. Each quantity is logged once; this page says under which name.

| status | meaning |
|---|---|
| logged | in the file, where it applies: no KL without a reference, no `val/rho` without the correction, no verifier without rows |
| alias | logged under the name given |
| not yet | not measured so far, for the reason given |
| left out | deliberately not logged, for the reason given |

Averages of the loss are over trained tokens: sums and counts are added over micro-batches, mini-batches and ranks and divided
once, so that no number depends on the layout. Rewards, lengths and batches are computed once, on rank 0. A completion without
a score is in no mean of rewards. What cannot be measured is `null`. Clock readings have the unit s or tokens/s, and
`async/engine_idle_share` is made of them; everything else is the same when a run is repeated, for the runs that repeat
([asynchronous.md](asynchronous.md#what-repeats)).

## Warnings

A run prints a warning, which `report.html` repeats, when one of these has lasted for {PATIENCE} steps, and again every {REPEAT_AFTER}. A run
whose steps all had nothing to learn from writes everything, and then ends with exit code 1.

| metric | warning when | likely causes |
|---|---|---|
| `frac_reward_zero_std` | 1: all rewards of each group are equal | data too hard or too easy; a verifier that expects another form; a constant reward; a low temperature |
| `val/no_score_rate` | {HALF_UNSCORED:g} or more | reward functions that return NaN or None; a verifier that fails; environments (`turns/ended_by/error`), whose reasons are in the log |
| `objective/{{verifier}}_error_rate` | 1: it scored nothing | its service, its time-out, the form of the ground truths |
| `completions/clipped_ratio` | {MOST:g} or more: almost all are cut off | `response_length` too small; an end token that is not among the stop tokens |
| `completions/max_length` | 1: all are empty | a chat template that does not suit the model |
| `tools/aggregate/failure_rate` | 1: every call fails | a service that does not answer; the form of the arguments; `tool_timeout` |
| `tools/aggregate/avg_calls_per_rollout` | 0 | another `tool_parser_type`; prompts that do not ask for calls; a model that knows no tools |
| `optim/steps`, `optim/grad_norm` | 0 | no advantage, or no trained token |

Weights that are not finite, when they are loaded or after a step, and log-probabilities of an engine that are not, end the run; the error names
the tensor and the last checkpoint.

## Histograms

Histograms are lists of counts, never more than 16:

| unit | bins |
|---|---|
| lengths | {LENGTH_BINS}: [0, 2), [2, 4), [4, 8) ... doubling, the last [2^{LENGTH_BINS - 1}, inf) |
| rates | {RATE_BINS}: nothing (0 or less), (0, 0.1), [0.1, 0.2) ... [0.9, 1), everything (1 or more) |
| advantages | {2 * len(MAGNITUDES) + 3}: bounds {", ".join(f"{m:g}" for m in MAGNITUDES)} away from 0, negative ones first, exactly 0 in the middle |
"""


def find(name: str) -> Metric | None:
    """The entry of a logged name, or of one in braces as it stands in the table; None for an unknown one."""
    exact, patterns = _index()
    return exact.get(name) or next((metric for pattern, metric in patterns if pattern.fullmatch(name)), None)


def to_markdown() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, metrics in SECTIONS.items():
        own = [metric for metric in metrics if metric.status == "logged"]
        others = [metric for metric in metrics if metric.status != "logged"]
        lines = [f"## {title}", ""]
        if own:
            rows = ((_anchored(metric.name), metric.unit, metric.source, metric.meaning) for metric in own)
            lines += [*table(("logged", "unit", "name of", "meaning"), rows), ""]
        if others:
            rows = ((_anchored(metric.name), metric.source, metric.status, _note(metric)) for metric in others)
            lines += [*table(("other name", "of", "status", "note"), rows), ""]
        parts.append("\n".join(lines))
    return "\n".join(parts)


@cache
def _index() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    """Entries by name, and those in braces as patterns."""
    metrics = [metric for section in SECTIONS.values() for metric in section]
    return {metric.name: metric for metric in metrics}, [
        (_pattern(metric.name), metric) for metric in metrics if "{" in metric.name
    ]


def _anchored(name: str) -> str:
    """The name, with an anchor where it is a whole one."""
    return f"`{name}`" if "{" in name else f'<a id="{name}"></a>`{name}`'


def _pattern(name: str) -> re.Pattern[str]:
    numbers = ("{n}", "{k}")
    pieces = re.split(r"(\{\w+\})", name)
    return re.compile(
        "".join(
            (r"\d+" if piece in numbers else "[^/]+") if piece.startswith("{") else re.escape(piece) for piece in pieces
        )
    )


def _note(metric: Metric) -> str:
    return "; ".join(part for part in (metric.target and f"`{metric.target}`", metric.meaning) if part)


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
