"""docs/config.md, written from the schema and the table of names: `python -m mgrpo.config.docs > docs/config.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from mgrpo.config.fields import section_types, settings
from mgrpo.config.help import field_docs, metavar, shown_default
from mgrpo.config.peers.names import SECTIONS, Name, source_of, table
from mgrpo.config.peers.presets import PRESET_NOTES, PRESETS
from mgrpo.config.peers.translate import LOSS_TYPES
from mgrpo.config.resolve import shown

INTRODUCTION = """# Settings

Written by `python -m mgrpo.config.docs > docs/config.md`; do not edit.

`mgrpo train [FILE.yaml | --config FILE.yaml] [--preset NAME] [--name value ...]`, the same for `examples/train_grpo.py`. A flag
wins over the file, the file over the preset, the preset over the default. A file holds `name: value` lines.
`--show_config` prints every value with who set it, and the run writes the same as `config.yaml` into its `output_dir`.

Names of Open Instruct and TRL are understood wherever a setting is. Every name below has one status:

| status | meaning |
|---|---|
| used | a setting of this project |
| derived | follows from other settings; a value given must agree |
| alias | sets the settings it names; the run prints one line for each. With its target at another value it is an error |
| no effect | accepted; changes nothing here, and the run says why |
| refused | accepted with the values that ask for nothing; anything else is an error with the reason |

From Python, `mgrpo.GRPOConfig.from_trl(trl_config, **fields)` and `mgrpo.GRPOConfig.from_open_instruct(flags)` give a config for
`mgrpo.train`; what is not given has the default of TRL or of Open Instruct there (`preset=` chooses the version).
"""

BATCH = """## TRL's batch arithmetic

With d data-parallel ranks (`world size / (tensor x pipeline x context)`), TRL's

    generation_batch_size = per_device_train_batch_size x d x steps_per_generation

completions are sampled at once, and one optimizer step takes `per_device_train_batch_size x d x gradient_accumulation_steps` of
them. Here these are `num_unique_prompts_rollout` = generation_batch_size / num_generations and `num_mini_batches` =
steps_per_generation / gradient_accumulation_steps. What of the four is not given has TRL's default (8, and 1; steps_per_generation
is gradient_accumulation_steps). The arithmetic is on under a trl preset, with generation_batch_size or
steps_per_generation, and when num_generations is given together with one of the other two; without it
per_device_train_batch_size and gradient_accumulation_steps mean what they mean in Open Instruct.
"""


def to_markdown() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *(_section(section) for section in SECTIONS), BATCH, _losses(), _presets()]
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
                source_of(setting.name),
                "used",
                documents[setting.name],
            )
            for setting in own
        )
        lines += _table(("setting", "type", "default", "also in", "status", "meaning"), rows)
        lines.append("")
    others = [name for name in table().values() if name.section == section]
    if others:
        rows = ((f"`{name.name}`", metavar(name.setting), _plain(name), name.source, name.status, _meaning(name)) for name in others)  # fmt: skip
        lines += _table(("other name", "type", "says nothing", "of", "status", "meaning"), rows)
        lines.append("")
    return "\n".join(lines)


def _plain(name: Name) -> str:
    return ", ".join(shown(value) for value in name.plain)


def _meaning(name: Name) -> str:
    targets = ", ".join(f"`{target}`" for target in name.to)
    return "; ".join(part for part in (targets, name.note) if part)


def _losses() -> str:
    rows = (
        (f"`loss_type={name}`", f"`{policy_loss}`", f"`{aggregation}`", "`sequence`" if name == "luspo" else "")
        for name, (policy_loss, aggregation) in LOSS_TYPES.items()
    )
    lines = [
        "## Losses of TRL",
        "",
        *_table(("TRL", "policy_loss", "aggregation", "ratio_level"), rows),
        "",
        "GSPO is `importance_sampling_level=sequence`. TRL's `dapo` names how tokens are averaged, Open Instruct's",
        "`loss_fn=dapo` the clipped loss.",
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
        *_table(("setting", "`mgrpo`", *(f"`{name}`" for name in names)), rows),
        "",
        *notes,
    ]
    return "\n".join(lines) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
