"""Trackers by their names here, in Open Instruct and in TRL."""

from __future__ import annotations

import pytest

from mgrpo.config.validate import problems, warnings
from mgrpo.moving import from_values, parse


def report_to(*words: str) -> tuple[str, ...]:
    return parse(["--model_name_or_path", "m", *words], defer=True).tracking.report_to


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("tensorboard",)),
        (("--report_to", "wandb"), ("wandb",)),
        (("--report_to", "wandb", "tensorboard"), ("wandb", "tensorboard")),
        (("--report_to", "wandb,trackio"), ("wandb", "trackio")),
        (("--report_to", "none"), ("none",)),
        (("--with_tracking",), ("tensorboard", "wandb")),
        (("--with_tracking", "false"), ("tensorboard",)),
        (("--with_tracking", "--report_to", "trackio"), ("trackio", "wandb")),
        (("--with_tracking", "--report_to", "wandb"), ("wandb",)),
        (("--with_tracking", "--report_to", "all"), ("all",)),
    ],
)
def test_where_a_run_reports_to(words, expected) -> None:
    """A run of days without the curves that its user asked for cannot be repeated."""
    assert report_to(*words) == expected


def test_a_switch_that_contradicts_is_a_problem() -> None:
    config = parse(["--with_tracking", "--report_to", "none"], defer=True)
    (found,) = config.provenance.problems
    assert found.startswith("with_tracking means report_to=wandb, but report_to=none is given")


def test_nothing_in_a_file_is_none() -> None:
    assert from_values({"report_to": None}).tracking.report_to == ("none",)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("wandbb",), "report_to=wandbb is not a tracker; did you mean wandb? choose from tensorboard, wandb, trackio, all, none"),
        (("mlflow",), "report_to=mlflow is not a tracker; choose from tensorboard, wandb, trackio, all, none"),
        (("none", "wandb"), "report_to=none wandb: all and none stand alone"),
    ],
)  # fmt: skip
def test_other_trackers_are_named_with_what_there_is(given, sentence) -> None:
    assert sentence in problems(from_values({"report_to": given}), world_size=1)


@pytest.mark.parametrize(
    ("values", "project"),
    [
        ({}, None),
        ({"wandb_project": "open_instruct_internal"}, None),
        ({"wandb_project_name": "sums"}, "sums"),
        ({"project": "sums"}, "sums"),
        ({"project": "huggingface"}, None),
    ],
)
def test_the_project_under_all_its_names(values, project) -> None:
    assert from_values(values).tracking.wandb_project == project


def test_what_has_no_effect_is_said() -> None:
    """A group that was asked for and never shows up."""
    config = from_values({"wandb_group_name": "a", "wandb_entity": "b", "num_completions_to_print": 3})
    found = " ".join(warnings(config, world_size=1))
    assert "wandb_group_name=a has no effect without wandb or trackio in report_to" in found
    assert "wandb_entity=b has no effect without wandb in report_to" in found
    assert "num_completions_to_print=3 has no effect without log_completions=true" in found
    used = from_values({"report_to": "all", "wandb_group_name": "a", "wandb_entity": "b", "log_completions": True})
    assert "has no effect" not in " ".join(warnings(used, world_size=1))
