"""Rules of the tracking section."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from mgrpo.config.fields import shown
from mgrpo.config.rules import Rule
from mgrpo.config.schema import Config
from mgrpo.config.tracking import EVERY, NO, TRACKERS


def _trackers(config: Config) -> Iterator[str]:
    given = config.tracking.report_to
    known = (*TRACKERS, EVERY, NO)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"report_to={name} is not a tracker; {hint}choose from {', '.join(known)}"
    if len(given) > 1 and {EVERY, NO} & set(given):
        yield f"report_to={shown(given)}: {EVERY} and {NO} stand alone"


TRACKING_RULES: tuple[Rule, ...] = ((("report_to",), _trackers),)
"""Each rule with the fields that must be sound before it is checked."""

TRACKING_NEEDS: tuple[tuple[str, str, Callable[[Config], bool]], ...] = (
    (
        "run_name wandb_project wandb_group_name",
        "wandb or trackio in report_to",
        lambda c: c.tracking.asks_for("wandb", "trackio"),
    ),
    ("wandb_entity", "wandb in report_to", lambda c: c.tracking.asks_for("wandb")),
    ("num_completions_to_print log_unique_prompts", "log_completions=true", lambda c: c.tracking.log_completions),
)
"""Settings that have an effect only under a condition."""
