"""What load_best_model_at_end needs, and which metrics it may compare."""

from __future__ import annotations

import pytest

from mgrpo.config import ConfigError
from mgrpo.config.validate import problems, warnings
from mgrpo.moving import GRPOConfig, from_values

SOUND = {
    "load_best_model_at_end": True,
    "dataset_mixer_eval_list": ["a.jsonl", "1.0"],
    "save_freq": 20,
    "local_eval_every": 10,
    "eval_pass_at_k": 4,
}


def about_best(**settings) -> list[str]:
    found = problems(from_values(SOUND | settings), world_size=1)
    return [sentence for sentence in found if "best_model" in sentence]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, None),
        ({"save_freq": 10}, None),
        (
            {"save_freq": 25},
            "save_freq=25 is not a multiple of local_eval_every=10; use save_freq=30, or local_eval_every=25",
        ),
        ({"save_freq": -1}, "needs save_freq and local_eval_every above 0, got -1 and 10"),
        ({"local_eval_every": 0}, "needs save_freq and local_eval_every above 0, got 20 and 0"),
        ({"dataset_mixer_eval_list": []}, "dataset_mixer_eval_list is empty"),
        ({"save_freq": 25, "load_best_model_at_end": False}, None),
    ],
)
def test_every_export_must_be_evaluated(settings, words) -> None:
    """An export without an evaluation can never be the best, whatever it is worth."""
    found = about_best(**settings)
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eval/scores", None),
        ("eval/pass_at_4", None),
        ("eval/pass_at_2_unbiased", None),
        ("eval/by_source/math/scores", None),
        ("eval/custom/length", None),
        ("-eval/sequence_lengths", None),
        ("eval/pass_at_8", "use eval/pass_at_4"),
        ("eval_scores", "use eval/scores"),
        ("scores", "use eval/scores"),
        ("eval_loss", "docs/metrics.md"),
        ("eval/objective/", "docs/metrics.md"),
        ("eval/made/up", "docs/metrics.md"),
        (
            "-sequence_lengths",
            "metric_for_best_model=-sequence_lengths is no metric of an evaluation; use -eval/sequence_l",
        ),
    ],
)
def test_the_metric_must_be_one_of_an_evaluation(name, words) -> None:
    """Found before engines start, not at the first evaluation."""
    found = about_best(metric_for_best_model=name)
    assert len(found) == (words is not None) and all(words in sentence for sentence in found)


def test_a_single_export_is_not_compared() -> None:
    """With the default of save_freq a short run has one export, which is the best of one."""
    config = from_values(SOUND | {"save_freq": 200, "total_episodes": 640})
    (sentence,) = [text for text in warnings(config, world_size=1) if "load_best" in text]
    assert "load_best_model_at_end=true has no effect without a save_freq below the steps" in sentence


def test_trls_names_mean_the_same() -> None:
    """None is TRL's word for its default."""
    config = GRPOConfig.from_trl(load_best_model_at_end=True, metric_for_best_model=None, greater_is_better=None)
    own = config.checkpoint
    assert (own.load_best_model_at_end, own.metric_for_best_model, own.greater_is_better) == (True, "eval/scores", True)
    own = GRPOConfig.from_trl(metric_for_best_model="eval/sequence_lengths", greater_is_better=False).checkpoint
    assert (own.metric_for_best_model, own.best_metric, own.greater_is_better) == (
        "-eval/sequence_lengths", "eval/sequence_lengths", False
    )  # fmt: skip


def test_a_sign_and_trls_switch_must_agree() -> None:
    """The one that loses would turn the best export into the worst."""
    least = {"metric_for_best_model": "-eval/sequence_lengths"}
    with pytest.raises(
        ConfigError, match="greater_is_better=true, but metric_for_best_model=-eval/sequence_lengths takes"
    ):
        from_values(least | {"greater_is_better": True})
    for config in (from_values(least | {"greater_is_better": False}), from_values(least), GRPOConfig.from_trl(**least)):
        assert config.checkpoint.metric_for_best_model == "-eval/sequence_lengths"
