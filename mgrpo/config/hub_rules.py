"""Rules of the section about the Hub: revisions of what has some, and names that the Hub could have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from mgrpo.config.rules import Rule
from mgrpo.config.schema import Config
from mgrpo.models.family import is_hub_name

MAIN = ("main", None)
_REPOSITORY = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_](?!.*(--|\.\.))[\w.-]{0,95}(?<![.-])")


def _revisions(config: Config) -> Iterator[str]:
    hub, model = config.hub, config.model.model_name_or_path
    tokenizer = config.data.tokenizer_name_or_path or model
    named = (("model_revision", hub.model_revision, model), ("tokenizer_revision", hub.tokenizer_revision, tokenizer))
    for setting, revision, name in named:
        if revision not in MAIN and name and (os.path.isdir(name) or not is_hub_name(name)):
            yield (
                f"{setting}={revision} is of a name on the Hub, and {name} is read as a folder, which has no revisions; leave "
                f"{setting} out, or give OWNER/NAME"
            )


def _repository(config: Config) -> Iterator[str]:
    name = config.hub.hub_model_id
    if name is not None and not _REPOSITORY.fullmatch(name):
        yield f"hub_model_id={name} is not a name that the Hub could have; give OWNER/NAME, of letters, digits, -, _ and ."


HUB_RULES: tuple[Rule, ...] = (
    (("model_name_or_path", "tokenizer_name_or_path", "model_revision", "tokenizer_revision"), _revisions),
    (("hub_model_id",), _repository),
)
"""Each rule with the fields that must be sound before it is checked."""
