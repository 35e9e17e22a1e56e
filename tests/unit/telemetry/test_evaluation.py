"""Held-out accuracy counts every sample, scored or not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgrpo.algo.training_samples import train_samples
from mgrpo.config import ConfigError
from mgrpo.config.dump import to_yaml
from mgrpo.config.load import raise_problems
from mgrpo.config.validate import problems
from mgrpo.moving import parse
from mgrpo.run.commands.evaluate import evaluate, for_evaluation
from mgrpo.telemetry.metrics.evaluation import correctness, evaluation_metrics, pass_at_k, short_names
from mgrpo.types import RewardScale, ScoredGroup
from tests import builders

NAN = float("nan")


def group(
    rewards: list[float],
    lengths: list[int] | None = None,
    parts: list[dict[str, float]] | None = None,
    verifiers: tuple[str, ...] = ("integer",),
) -> ScoredGroup:
    if parts is None:
        parts = [{"correct": float(r > 0) if r == r else r} for r in rewards]
    completions = [
        builders.completion(n, finish_reason="stop" if n < 4 else "length") for n in lengths or [2] * len(rewards)
    ]
    return builders.scored_group(rewards, completions=completions, parts=parts, of=builders.prompt(verifiers=verifiers))


def test_pass_at_1_and_at_n():
    """Worked by hand; a completion without a score is wrong, and outside the mean score."""
    metrics = evaluation_metrics([group([1.0, 0.0, 0.0, NAN], [1, 2, 3, 4]), group([0.0, 0.0, 0.0, 0.0])])
    assert metrics["eval/pass_at_1"] == pytest.approx(1 / 8)
    assert metrics["eval/pass_at_4"] == pytest.approx(1 / 2)
    assert metrics["eval/scores"] == pytest.approx(1 / 7)
    assert metrics["eval/stop_rate"] == pytest.approx(7 / 8)
    assert metrics["eval/no_score_rate"] == pytest.approx(1 / 8)


def test_pass_at_k_for_powers_of_two():
    """c = 1 and 3 of 5: 1 - C(4, 2)/C(5, 2) = 0.4, 1 - C(2, 2)/10 = 0.9; 1 - C(4, 4)/C(5, 4) = 0.8, and certainty."""
    metrics = evaluation_metrics([group([1.0, 0.0, 0.0, 0.0, 0.0]), group([1.0, 1.0, 1.0, 0.0, 0.0])])
    assert {name: value for name, value in metrics.items() if "pass_at" in name} == pytest.approx(
        {
            "eval/pass_at_1": 0.4,
            "eval/pass_at_5": 1.0,
            "eval/pass_at_1_unbiased": 0.4,
            "eval/pass_at_2_unbiased": (0.4 + 0.9) / 2,
            "eval/pass_at_4_unbiased": (0.8 + 1.0) / 2,
        }
    )


def test_one_completion_a_prompt():
    """The default: accuracy, and no other k."""
    metrics = evaluation_metrics([group([1.0]), group([0.0])])
    assert {name: value for name, value in metrics.items() if "pass_at" in name} == {
        "eval/pass_at_1": 0.5,
        "eval/pass_at_1_unbiased": 0.5,
    }


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pass_at_k_is_the_combinatorial_formula(data):
    """Integers of any size in the oracle, floats in the product."""
    n = data.draw(st.integers(1, 400))
    k = data.draw(st.integers(1, n))
    c = data.draw(st.integers(0, n))
    expected = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(np.array([c]), n, k) == pytest.approx([expected], abs=1e-12)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_correct_one():
    """What the estimate means: every choice of 3 among 6."""
    for num_correct in range(7):
        draws = list(itertools.combinations([True] * num_correct + [False] * (6 - num_correct), 3))
        share = sum(any(draw) for draw in draws) / len(draws)
        assert pass_at_k(np.array([num_correct]), 6, 3) == pytest.approx([share])


def test_correct_needs_the_verifiers_and_the_highest_reward():
    """A right answer cut off under a penalty is not solved; neither is a reward that the verifiers did not give."""
    scale = RewardScale(max_possible_score=10.5, verification_reward=10.0, format_reward=0.5)
    parts = [{"integer": 1.0, "correct": 1.0}] * 2 + [{"integer": 0.0, "correct": 0.0}] * 2
    groups = [group([10.5, 10.0, 10.5, 0.0], parts=parts)]
    assert evaluation_metrics(groups, scale=scale)["eval/pass_at_1"] == pytest.approx(1 / 4)
    assert evaluation_metrics(groups)["eval/pass_at_1"] == pytest.approx(2 / 4)


def test_a_sum_that_misses_the_highest_reward_by_rounding_is_correct():
    """0.1 + 0.2 is not 0.3."""
    scale = RewardScale(max_possible_score=0.1 + 0.2, verification_reward=0.1, format_reward=0.2)
    assert evaluation_metrics([group([0.3])], scale=scale)["eval/pass_at_1"] == 1


def test_each_verifier_is_evaluated():
    """The training's names, behind eval/."""
    scale = RewardScale(max_possible_score=10.0, verification_reward=10.0, format_reward=1.0)
    parts = [
        {"integer": 1.0, "correct": 1.0, "format": 1.0},
        {"integer": 0.0, "correct": 0.0, "format": 0.0},
        {"integer": NAN, "correct": NAN, "format": 1.0},
    ]
    metrics = evaluation_metrics([group([10.0, 0.0, NAN], parts=parts)], scale=scale)
    assert {name: value for name, value in metrics.items() if name.count("/") > 1} == pytest.approx(
        {
            "eval/objective/integer_reward": 0.5,
            "eval/objective/integer_correct_rate": 0.5,
            "eval/objective/integer_error_rate": 1 / 3,
            "eval/objective/correct_reward": 0.5,
            "eval/objective/format_reward": 2 / 3,
            "eval/objective/verifiable_reward": 5.0,
            "eval/objective/verifiable_correct_rate": 0.5,
            "eval/rewards/integer/mean": 0.5,
            "eval/rewards/integer/std": math.sqrt(0.5),
            "eval/val/format_scores": 2 / 3,
        }
    )


def test_lengths_and_speed():
    """Two prompts of 2 tokens, 10 tokens of answers, in half a second."""
    groups = [group([1.0, 0.0], [1, 4]), group([0.0, 0.0], [2, 3])]
    metrics = evaluation_metrics(groups, generate_s=0.5)
    assert [metrics[f"eval/sequence_lengths{end}"] for end in ("", "_min", "_max")] == [2.5, 1, 4]
    assert metrics["time/eval_actor_tokens_per_second"] == pytest.approx(28)
    assert "time/eval_actor_tokens_per_second" not in evaluation_metrics(groups)


def test_without_verifiers_nothing_is_correct():
    """A user's own reward function says how much, not whether."""
    metrics = evaluation_metrics([group([0.3, 0.7], parts=[{"brevity": 0.3}, {"brevity": 0.7}])])
    assert metrics["eval/objective/brevity_reward"] == pytest.approx(0.5)
    assert not [name for name in metrics if "pass_at" in name]


def by_name(metrics: dict[str, float], start: str) -> dict[str, float]:
    return {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}


def test_the_parts_of_a_mixture_are_measured_separately():
    """One number over a mixture hides that a run forgets one of its tasks. Worked by hand; unequal parts."""
    groups = [group([1.0, 0.0]), group([1.0, 1.0]), group([0.0, NAN])]
    metrics = evaluation_metrics(groups, sources=["easy", "easy", "hard"])
    assert by_name(metrics, "eval/by_source/") == pytest.approx(
        {
            "easy/scores": 3 / 4,
            "easy/pass_at_1": 3 / 4,
            "easy/pass_at_2": 1.0,
            "hard/scores": 0.0,
            "hard/pass_at_1": 0.0,
            "hard/pass_at_2": 0.0,
        }
    )
    assert by_name(evaluation_metrics(groups, sources=["easy"] * 3), "eval/by_") == {}


def test_each_verifiers_prompts_have_an_accuracy_of_their_own():
    """A row with two verifiers counts for both; names are compared without case, as the parts of a score are."""
    both = [{"math": 1.0, "ifeval": 0.5, "correct": 0.0}, {"math": 1.0, "ifeval": 1.0, "correct": 1.0}]
    groups = [group([1.0, 1.0], verifiers=("MATH",)), group([1.5, 2.0], parts=both, verifiers=("math", "ifeval"))]
    assert by_name(evaluation_metrics(groups), "eval/by_verifier/") == pytest.approx(
        {
            "math/scores": (1 + 1 + 1.5 + 2) / 4,
            "math/pass_at_1": 3 / 4,
            "math/pass_at_2": 1.0,
            "ifeval/scores": 3.5 / 2,
            "ifeval/pass_at_1": 1 / 2,
            "ifeval/pass_at_2": 1.0,
        }
    )


def test_parts_of_a_mixture_without_verifiers_have_rewards_only():
    """A user's own functions say nothing about right and wrong."""
    groups = [
        group([0.25], parts=[{"brevity": 0.25}], verifiers=()),
        group([0.75], parts=[{"brevity": 0.75}], verifiers=()),
    ]
    metrics = evaluation_metrics(groups, sources=["a", "b"])
    assert by_name(metrics, "eval/by_source/") == {"a/scores": 0.25, "b/scores": 0.75}
    assert correctness(groups, None) is None


def test_what_an_environment_or_an_agent_rewards_is_neither_right_nor_wrong():
    """Rows of the verifier passthrough would have an accuracy of 0 however well they are rewarded."""
    scale = RewardScale(max_possible_score=0.0, verification_reward=0.0, format_reward=0.0)
    groups = [group([1.0, 1.0], parts=[{"passthrough": 0.0, "correct": 0.0}] * 2, verifiers=("passthrough",))]
    metrics = evaluation_metrics(groups, scale=scale)
    assert correctness(groups, scale) is None
    assert metrics["eval/scores"] == 1.0 and "eval/pass_at_1" not in metrics


def test_datasets_are_named_by_their_shortest_distinguishing_suffix():
    """The name of a metric has no slash, and two datasets never share one."""
    assert short_names(["data/heldout.jsonl"]) == ["heldout"]
    assert short_names(["gsm8k/test.parquet", "math/test.parquet", "gsm8k/test.parquet"]) == [
        "gsm8k-test",
        "math-test",
        "gsm8k-test",
    ]
    assert short_names(["allenai/RLVR-GSM", "allenai/RLVR-MATH"]) == ["RLVR-GSM", "RLVR-MATH"]
    assert short_names(["test.jsonl", "a/test.jsonl", "/b/a/test.jsonl"]) == ["test", "a-test", "b-a-test"]
    assert not any("/" in name for name in short_names(["", "/", "..", "v1.5/x"]))


def flags(tmp_path, *words: str):
    return parse(
        ["--config", "examples/configs/quickstart.yaml", "--output_dir", str(tmp_path / "out"), *words], defer=True
    )


def test_an_evaluation_asks_nothing_of_training(tmp_path):
    """The configuration of a run on 64 GPUs evaluates its export on one machine; what samples and scores stays."""
    words = ["--pipeline_model_parallel_size", "4", "--world_size", "64", "--num_training_steps", "120"]
    config = flags(tmp_path, *words, "--vllm_num_engines", "2", "--temperature", "0.5")
    config = raise_problems(config)
    own = for_evaluation(config)
    assert problems(own, world_size=1, has_dataset=True) == []
    for section in ("model", "reward", "engine"):
        assert getattr(own, section) == getattr(config, section)
    assert own.rollout == config.rollout
    assert (own.experiment.seed, own.data.dataset_mixer_eval_list) == (1, config.data.dataset_mixer_eval_list)
    assert own.experiment.output_dir == str(tmp_path / "out" / "eval" / "model")
    # The dump names a source only for what still has its value.
    assert "temperature: 0.5  # flag" in to_yaml(own) and "learning_rate: 2.0e-05\n" in to_yaml(own)


def test_an_evaluation_does_not_trust_a_servers_weights(tmp_path):
    """It may have those of any run: the numbers would be another model's."""
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    own = for_evaluation(flags(tmp_path, "--vllm_mode", "server", "--vllm_server_base_url", *urls))
    assert (own.engine.vllm_mode, own.engine.vllm_server_base_url, own.engine.vllm_num_engines) == ("ray", (), 1)
    assert problems(own, world_size=1, has_dataset=True) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset_mixer_eval_list", ""], "dataset_mixer_eval_list is empty"),
        (["--eval_temperature", "0"], "eval_pass_at_k=8 samples of eval_temperature=0 are all the same"),
        (["--model_name_or_path", "no/such/model"], "model_name_or_path=no/such/model is not a folder"),
        (["--model_name_or_path", "MEGATRON"], "is a Megatron folder.*export it first: mgrpo convert megatron-to-hf"),
        (["--model_name_or_path", "STATE"], "is a training state.*export it first: mgrpo convert megatron-to-hf"),
        (["--learning-rat", "1"], "did you mean --learning_rate"),
    ],
)
def test_what_is_wrong_with_an_evaluation_is_one_sentence_before_anything_starts(tmp_path, words, message):
    """A stack trace out of an engine after a minute says less."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "megatron.json").write_text("{}")
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "manifest.json").write_text("{}")
    places = {"MEGATRON": str(tmp_path / "megatron"), "STATE": str(tmp_path / "step_3")}
    with pytest.raises(ConfigError, match=message) as raised:
        evaluate(flags(tmp_path, *[places.get(word, word) for word in words]))
    assert len(raised.value.problems) == 1
    assert not (tmp_path / "out").exists()


def test_no_prompts_give_no_numbers():
    """Every held-out prompt was too long."""
    metrics = evaluation_metrics([])
    assert math.isnan(metrics["eval/scores"]) and math.isnan(metrics["eval/sequence_lengths"])
    assert not [name for name in metrics if "pass_at" in name]


def test_a_completion_without_a_score_trains_nothing_and_is_kept():
    """NaN leaves the group's mean; its sample has advantage 0 and no trained token."""
    groups = [group([1.0, 0.0, NAN]), group([1.0, 1.0, 1.0])]
    samples = train_samples(groups, normalization="standard", ddof=0, eps=1e-8)
    assert [sample.group for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert [sample.advantage for sample in samples] == pytest.approx([1.0, -1.0, 0.0, 0.0, 0.0, 0.0], abs=1e-6)
    assert [bool(sample.loss_mask.any()) for sample in samples] == [True, True, False, True, True, True]
