"""docs/config.md, written from the schema and the table of names: `python -m tools.docs.settings > docs/config.md`."""

from __future__ import annotations

import sys

from mgrpo.config.fields import section_types, settings, shown
from mgrpo.config.help import field_docs, metavar, shown_default
from mgrpo.config.peers.hints import tried
from mgrpo.config.peers.names import Name, sections, table, trainers_of
from mgrpo.config.peers.presets import PRESET_NOTES, PRESETS
from mgrpo.config.peers.translate import LOSS_TYPES
from tools.docs import markdown

INTRODUCTION = """# Settings

Written by `python -m tools.docs.settings > docs/config.md`; do not edit.

`mgrpo train [FILE.yaml | --config FILE.yaml] [--preset NAME] [--name value ...]`, the same for `examples/train_grpo.py`. A flag
overrides the file, the file overrides the preset, the preset overrides the default. A file holds `name: value` lines.
`--show_config` prints every value with its source, and the run writes the same to `config.yaml` in its `output_dir`.

Names of Open Instruct and TRL are accepted wherever a setting is. Every name below has one status:

| status | meaning |
|---|---|
| used | a setting of this project |
| derived | follows from other settings; a value given must agree |
| alias | sets the settings that it names; the run prints one line for each. It is an error if such a setting is also given with another value |
| no effect | accepted, but changes nothing; the run prints why |
| refused | accepted with its neutral values; any other value is an error that gives the reason |

From Python, `mgrpo.GRPOConfig.from_trl(trl_config, **fields)` and `mgrpo.GRPOConfig.from_open_instruct(flags)` return a config
for `mgrpo.train`; settings that are not given have the defaults of TRL or Open Instruct (`preset=` chooses the version).
`mgrpo.GRPOConfig.from_verl(command)` and `.from_slime(command)` do the same for verl and slime ([their names](config_peers.md)), and a
script of TRL that imports `GRPOConfig` and `GRPOTrainer` from `mgrpo.trl` runs as it is.
"""

BATCH = """## TRL's batch arithmetic

With d data-parallel ranks (`world size / (tensor x pipeline x context)`), TRL's

    generation_batch_size = per_device_train_batch_size x d x steps_per_generation

completions are sampled at once, and one optimizer step takes `per_device_train_batch_size x d x gradient_accumulation_steps` of
them. Here these are `num_unique_prompts_rollout` = generation_batch_size / num_generations and `num_mini_batches` =
steps_per_generation / gradient_accumulation_steps. Those of the four that are not given have TRL's defaults:
per_device_train_batch_size 8, gradient_accumulation_steps 1, steps_per_generation as gradient_accumulation_steps. This applies
with a trl preset, with generation_batch_size or steps_per_generation, and if num_generations is given together with one of the
other two. Otherwise per_device_train_batch_size and gradient_accumulation_steps have their meaning in Open Instruct.
"""


def to_markdown() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *(_section(section) for section in sections()), BATCH, _losses(), _presets(), _words()]
    return "\n".join(parts)


def _section(section: str) -> str:
    lines = [f"## {section.capitalize()}", ""]
    own = [setting for setting in settings().values() if setting.section == section]
    if own:
        documents = field_docs(section_types()[section])
        rows = (
            (
                f"`{setting.name}`",
                metavar(setting),
                shown_default(setting.default),
                trainers_of(setting),
                "used",
                documents[setting.name],
            )
            for setting in own
        )
        lines += markdown.table(("setting", "type", "default", "also in", "status", "meaning"), rows)
        lines.append("")
    others = [name for name in table().values() if name.section == section]
    if others:
        rows = ((f"`{name.name}`", metavar(name.setting), _neutral(name), name.trainer, _status(name), _meaning(name)) for name in others)  # fmt: skip
        lines += markdown.table(("other name", "type", "neutral values", "of", "status", "meaning"), rows)
        lines.append("")
    return "\n".join(lines)


def _neutral(name: Name) -> str:
    return ", ".join(dict.fromkeys("empty" if value == () else shown(value) for value in name.neutral))


def _status(name: Name) -> str:
    return "alias" if name.status == "translated" else name.status


def _meaning(name: Name) -> str:
    targets = ", ".join(f"`{target}`" for target in name.targets)
    return "; ".join(part for part in (targets, name.sentence) if part)


def _losses() -> str:
    rows = (
        (f"`loss_type={name}`", f"`{policy_loss}`", f"`{aggregation}`", "`sequence`" if name == "luspo" else "")
        for name, (policy_loss, aggregation) in LOSS_TYPES.items()
    )
    lines = [
        "## Losses of TRL",
        "",
        *markdown.table(("TRL", "policy_loss", "aggregation", "ratio_level"), rows),
        "",
        "GSPO is `importance_sampling_level=sequence`. TRL's `dapo` is a way to average tokens, Open Instruct's",
        "`loss_fn=dapo` is the clipped loss.",
        "",
    ]
    return "\n".join(lines)


def _presets() -> str:
    names = [name for name in PRESETS if PRESETS[name]]
    changed = [name for name in settings() if any(name in PRESETS[preset] for preset in names)]
    rows = (
        (
            f"`{name}`",
            shown_default(settings()[name].default),
            *(shown(PRESETS[preset][name]) if name in PRESETS[preset] else "" for preset in names),
        )
        for name in changed
    )
    notes = [f"- {note}." for preset in names for note in PRESET_NOTES.get(preset, ())]
    lines = [
        "## Presets",
        "",
        *markdown.table(("setting", "`mgrpo`", *(f"`{name}`" for name in names)), rows),
        "",
        *notes,
    ]
    return "\n".join(lines) + "\n"


def _words() -> str:
    rows = (
        (f"`{name}`", hint.trainer, ", ".join(f"`{target}`" for target in hint.targets), hint.sentence)
        for name, hint in tried().items()
    )
    lines = [
        "## Words of other trainers",
        "",
        "These are not accepted; a run that is given one says what to use instead. So are those of [verl and slime](config_peers.md).",
        "",
        *markdown.table(("word", "of", "here", "note"), rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
