"""What other trainers write to turn trackers on."""

from __future__ import annotations

from mgrpo.config.resolution import Resolution
from mgrpo.config.tracking import EVERY, NO


def apply(r: Resolution) -> None:
    """Open Instruct's switch for Weights & Biases, and TRL's name of a project."""
    if r.peer("with_tracking"):
        own = tuple(name for name in r.value("report_to") if name)
        if "wandb" not in own and EVERY not in own:
            # Beside other trackers of the same rank it adds one; `none` contradicts it.
            if r.rank("report_to") <= r.rank("with_tracking") and own and NO not in own:
                r.given.pop("report_to", None)
            r.put("report_to", (*own, "wandb") if NO not in own else ("wandb",), "with_tracking")
    for name in ("wandb_project_name", "project"):
        project = r.peer(name)
        if project is not None and not (name == "project" and project == TRL_PROJECT):
            r.put("wandb_project", project, name)


TRL_PROJECT = "huggingface"
"""TRL's project when none is given."""
