"""The hub section: which revisions a run reads from the Hugging Face Hub, and where the trained model goes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from mgrpo.config.annotations import OPEN_INSTRUCT, TRL, Reason, Rule
from mgrpo.models.hf_config import is_hub_name

MAIN = ("main", None)
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_](?!.*(--|\.\.))[\w.-]{0,95}(?<![.-])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    model_revision: Annotated[str | None, OPEN_INSTRUCT] = None
    """Branch, tag or commit of a model that is given by its name on the Hub; none: main."""
    tokenizer_revision: Annotated[str | None, OPEN_INSTRUCT] = None
    """The same of the tokenizer; none: main, or model_revision where tokenizer_name_or_path is not given."""
    push_to_hub: Annotated[bool, OPEN_INSTRUCT, TRL] = False
    """Upload the trained model, or the best one (load_best_model_at_end), with its model card when the run is over. It needs a
    token (hf auth login, or HF_TOKEN), without which the run does not start; where a preset has set it, there is a warning."""
    hub_model_id: Annotated[str | None, TRL] = None
    """OWNER/NAME of the repository, or only its name for the owner of the token; none: exp_name__seed. It is made if it is
    not there."""
    hub_revision: Annotated[str | None, TRL] = None
    """Branch to upload to, which is made if it is not there; none: main."""
    hub_private_repo: Annotated[bool, TRL] = True
    """Whether a repository that the run makes is private; one that exists stays as it is."""
    hub_strategy: Annotated[
        Literal["end", "every_save"], Reason("training states are not uploaded, only exported models"), TRL
    ] = "end"
    """end: upload once; every_save: also each export of save_freq, in the background, unless the previous upload is still running."""


def _revisions(
    model_name_or_path: str | None,
    model_revision: str | None,
    tokenizer_name_or_path: str | None,
    tokenizer_revision: str | None,
) -> Iterator[str]:
    for setting, revision, name in (
        ("model_revision", model_revision, model_name_or_path),
        ("tokenizer_revision", tokenizer_revision, tokenizer_name_or_path or model_name_or_path),
    ):
        if revision not in MAIN and name and (os.path.isdir(name) or not is_hub_name(name)):
            yield (
                f"{setting}={revision} is of a name on the Hub, and {name} is read as a folder, which has no revisions; leave "
                f"{setting} out, or give OWNER/NAME"
            )


def _repository(hub_model_id: str | None) -> Iterator[str]:
    if hub_model_id is not None and not _REPOSITORY.fullmatch(hub_model_id):
        yield f"hub_model_id={hub_model_id} is not a name that the Hub could have; give OWNER/NAME, of letters, digits, -, _ and ."


RULES: tuple[Rule, ...] = (_revisions, _repository)
