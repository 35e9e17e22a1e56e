"""Download of the models, tokenizers and adapters that a configuration names on the Hub, before anything is started.

Every rank calls it: the first on a machine downloads, the others wait. A continued run uses the commits that it began with, even
if the Hub has newer ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from mgrpo.config import Config
from mgrpo.config.distillation import TEACHERS
from mgrpo.config.fields import flat
from mgrpo.models.hf_config import is_on_hub
from mgrpo.models.hf_files.hub import HubError, HubSnapshot, Part, fetch
from mgrpo.run.inputs.continuing import Continued


def names_some(config: Config) -> bool:
    """True if the configuration names anything on the Hub."""
    return any(_named(config))


def located(config: Config, continued: Continued | None) -> Config:
    """`config` with the folders of its models on the Hub; names that cannot be fetched are added to its problems.

    Args:
        continued: the state that the run continues, whose commits are used.
    """
    found: dict[str, HubSnapshot] = {}
    problems: list[str] = []
    commits = _commits(config, continued) if continued else {}
    for setting, name, revision, part in _named(config):
        try:
            found[setting] = fetch(name, revision=commits.get(setting) or revision, part=part)
        except HubError as err:
            problems.append(f"{setting.partition(':')[0]}={err}")
    provenance = replace(
        config.provenance, snapshots=found, problems=tuple(dict.fromkeys((*config.provenance.problems, *problems)))
    )
    return replace(config, provenance=provenance)


def origin(config: Config) -> dict[str, Any]:
    """The model's name on the Hub or its folder, and the commit of each setting with a name on the Hub."""
    snapshots = config.provenance.snapshots
    model = snapshots.get("model_name_or_path")
    return {
        "model_name_or_path": model.name if model else str(Path(config.model_path).absolute()),
        "commits": {setting: snapshot.commit for setting, snapshot in snapshots.items()},
    }


def _named(config: Config) -> Iterator[tuple[str, str, str | None, Part]]:
    """Each setting with a name on the Hub: the name, its revision, and the part to fetch. A folder of that name takes precedence.

    A setting of several names is yielded for each of them, as SETTING:NAME.
    """
    model, tokenizer, hub = config.model.model_name_or_path, config.data.tokenizer_name_or_path, config.hub
    adapter = config.adapter.lora_adapter_path
    if _is_name(model):
        yield "model_name_or_path", model, hub.model_revision, "model"
    if _is_name(tokenizer):
        yield "tokenizer_name_or_path", tokenizer, hub.tokenizer_revision, "tokenizer"
    elif tokenizer is None and hub.tokenizer_revision not in (None, hub.model_revision) and _is_name(model):
        yield "tokenizer_name_or_path", model, hub.tokenizer_revision, "tokenizer"
    if config.adapter.use_peft and _is_name(adapter):
        yield "lora_adapter_path", adapter, None, "adapter"
    for teacher in dict.fromkeys(teacher.model for teacher in config.distillation.loaded_teachers):
        if _is_name(teacher):
            yield f"{TEACHERS}:{teacher}", teacher, None, "model"


def _is_name(value: str | None) -> TypeGuard[str]:
    return value is not None and is_on_hub(value)


def _commits(config: Config, continued: Continued) -> Mapping[str, str]:
    """The state's commits of settings whose values have not changed."""
    before, now = continued.state.get("config", {}), flat(config)
    same = ("model_revision", "tokenizer_revision")
    return {
        setting: commit
        for setting, commit in continued.state.get("commits", {}).items()
        if all(before.get(name) == now[name] for name in (setting.partition(":")[0], *same))
    }
