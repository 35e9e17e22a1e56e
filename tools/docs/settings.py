"""docs/config.md, written from the schema and the table of names: `python -m tools.docs.settings > docs/config.md`."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from mgrpo.config.annotations import FINITE
from mgrpo.config.fields import Setting, section_types, settings, shown
from mgrpo.config.help import FIRST, field_docs, metavar, shown_default
from mgrpo.environments.workers.environment_catalog import NAMES
from mgrpo.moving.foreign_names import Name, sections, table
from mgrpo.moving.name_hints import tried
from mgrpo.moving.presets import KEPT, PRESET_NOTES, PRESETS
from mgrpo.moving.translate import LOSS_TYPES
from tools.docs import markdown

SCRIPTS = Path(__file__).parents[2] / "tests/unit/moving/open_instruct_scripts.yaml"
"""Flags of Open Instruct's launch scripts, and which of them are refused."""

INTRODUCTION = """<!-- Written by `python -m tools.docs.settings > docs/config.md`; do not edit. -->

# Settings

`mgrpo train [FILE.yaml | --config FILE.yaml] [--preset NAME] [--name value ...]`, the same for `examples/train_grpo.py`. A flag
overrides the file, the file overrides the preset, the preset overrides the default. A file holds `name: value` lines.
`--show_config` prints every value with its source, and the run writes the same to `config.yaml` in its `output_dir`.

Each section has a table of its settings: the values that a setting takes with their limits, its default, its meaning, what it needs
to have an effect, and other trainers that have the name. Names of Open Instruct and TRL are accepted wherever a setting is; those
that are not settings themselves stand in a second table, with one status:

| status | meaning |
|---|---|
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
steps_per_generation / gradient_accumulation_steps. Where that is 1/n, so that one optimizer step takes n generation batches of the
same weights, they are one rollout batch. Where neither divides the other, or num_iterations repeats the n batches, it is refused: a step
would take completions of two policies, or each several times. Those of the four that are not given have TRL's defaults:
per_device_train_batch_size 8, gradient_accumulation_steps 1, steps_per_generation as gradient_accumulation_steps. This applies
with a trl preset, with generation_batch_size or steps_per_generation, and if num_generations is given together with one of the
other two. Otherwise per_device_train_batch_size and gradient_accumulation_steps have their meaning in Open Instruct.
"""


def to_markdown() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        _first(),
        *(_section(section) for section in sections()),
        BATCH,
        _losses(),
        _presets(),
        _scripts(),
        _words(),
    ]
    return "\n".join(parts)


def _first() -> str:
    rows = ((question, ", ".join(map(_link, names.split()))) for question, names in FIRST.items())
    return "\n".join(["## The settings to begin with", "", *markdown.table(("question", "settings"), rows), ""])


def _section(section: str) -> str:
    lines = [f"## {section.capitalize()} settings", ""]
    own = [setting for setting in settings().values() if setting.section == section]
    if own:
        documents = field_docs(section_types()[section])
        rows = (
            (
                _anchored(setting.name),
                _values(setting),
                f"`{shown_default(setting.default)}`",
                " ".join([_linked(documents[setting.name], setting.name), *_needs(setting)]),
                ", ".join(peer.value for peer in setting.peers),
            )
            for setting in own
        )
        lines += [*markdown.table(("setting", "values", "default", "meaning", "also in"), rows), ""]
    others = [name for name in table().values() if name.section == section]
    if others:
        names = _merged((name.name, (name.trainer, _status(name), _neutral(name), _meaning(name))) for name in others)
        lines += [f"### Other names: {section}", ""]
        lines += markdown.table(("other name", "of", "status", "neutral values", "meaning"), names)
        lines.append("")
    return "\n".join(lines)


def _values(setting: Setting) -> str:
    """Type and limits."""
    limits = "" if setting.range in (None, FINITE) else f", {setting.range}".removesuffix(" and finite")
    form = f", {setting.form.words}" if setting.form else ""
    return f"`{metavar(setting)}`{limits}{form}"


def _needs(setting: Setting) -> Iterator[str]:
    for need in setting.needs:
        yield f"Needs {_linked(need.condition, setting.name)}."


def _merged(rows: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    """One row for all names of which a table says the same, where the first of them stands."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows:
        names.setdefault(cells, []).append(_anchored(name))
    return ((", ".join(same), *cells) for cells, same in names.items())


_SETTING = re.compile("|".join(rf"`{name}`|(?<![\w`/.-]){name}(?![\w`/])" for name in settings() if "_" in name))


def _linked(text: str, own: str = "") -> str:
    """The text with a link at each page and setting in it except `own`; names without an underscore are also English words."""
    text = _SETTING.sub(lambda found: found[0] if found[0] == own else _link(found[0].strip("`")), text)
    return re.sub(r"\bdocs/(\w+\.md)", r"[\1](\1)", text)


def _link(name: str) -> str:
    return f"[`{name}`](#{name})"


def _anchored(name: str) -> str:
    return f'<a id="{name}"></a>`{name}`'


def _neutral(name: Name) -> str:
    return ", ".join(dict.fromkeys("empty" if value == () else shown(value) for value in name.neutral))


def _status(name: Name) -> str:
    return "alias" if name.status == "translated" else name.status


def _meaning(name: Name) -> str:
    targets = ", ".join(_link(target) for target in name.targets)
    return "; ".join(part for part in (targets, _linked(name.sentence)) if part)


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
            _link(name),
            shown_default(settings()[name].default),
            *(shown(PRESETS[preset][name]) if name in PRESETS[preset] else "" for preset in names),
        )
        for name in changed
    )
    notes = [f"- {note}." for preset in names for note in PRESET_NOTES.get(preset, ())]
    kept = ((f"`{preset}`", f"`{name}`", why) for preset, own in KEPT.items() for name, why in own.items())
    lines = [
        "## Presets",
        "",
        *markdown.table(("setting", "`mgrpo`", *(f"`{name}`" for name in names)), rows),
        "",
        *notes,
        "",
        "A setting that is not in the table has the same default there, by its own name or another of theirs, except these:",
        "",
        *markdown.table(("preset", "name", "why the default here stays"), kept),
    ]
    return "\n".join(lines) + "\n"


def _scripts() -> str:
    file = yaml.safe_load(SCRIPTS.read_text())
    flags = {path: shlex.split(text) for path, text in file["scripts"].items()}
    refused = ((f"`{path}`", f"`{setting}`", reason) for path, (setting, reason) in file["refused"].items())
    tools = ((f"`{path}`", " ".join(f"`{tool}`" for tool in missing)) for path in flags if (missing := _missing_tools(flags[path])))  # fmt: skip
    lines = [
        "## Open Instruct's launch scripts",
        "",
        f"Of the {len(flags)} GRPO launch scripts in Open Instruct's repository (August 2026), with another model and other data,",
        f"{len(flags) - len(file['refused'])} pass the checks at the start of a run as they are; `--preset open_instruct_main` adds",
        "Open Instruct's own defaults. The notes at the start say what is done differently. On a GPU the",
        f"{sum('--single_gpu_mode' in words for words in flags.values())} with `single_gpu_mode` also need `--vllm_kv_cache_mb`",
        "([colocate.md](colocate.md)). These do not pass:",
        "",
        *markdown.table(("script", "setting", "reason"), refused),
        "",
        "These name tools that are not built in. `--tools` takes a class of Open Instruct as `package.module:Class`",
        "([environments.md](environments.md)):",
        "",
        *markdown.table(("script", "tools"), tools),
    ]
    return "\n".join(lines) + "\n"


def _missing_tools(words: list[str]) -> list[str]:
    """Tools of a command that only Open Instruct has."""
    if "--tools" not in words:
        return []
    given = itertools.takewhile(lambda word: not word.startswith("--"), words[words.index("--tools") + 1 :])
    return [tool for tool in given if tool not in NAMES]


def _words() -> str:
    rows = _merged(
        (name, (hint.trainer, ", ".join(map(_link, hint.targets)), _linked(hint.sentence)))
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
