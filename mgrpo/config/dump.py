"""The effective configuration as YAML that loads back to an equal `Config`, with the source of each value."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from mgrpo.config.derived import layout_of
from mgrpo.config.fields import flat, settings
from mgrpo.config.schema import Config

DERIVED = (
    "batch_size",
    "completions_per_optimizer_step",
    "max_model_length",
)
"""Properties of `Config` to print."""
LENGTHS = ("num_training_steps", "num_optimizer_steps")
"""Those that may depend on the data."""
UNCOUNTED = "num_train_epochs decides, when the data can be read"


def to_yaml(config: Config) -> str:
    """One line per setting, by section; a comment names the source of each value that is not a default.

    Steps that `counted` has not worked out are comments: a file with their present value would save after each step.
    ASCII, whatever the values hold.
    """
    lines = [f"# preset {config.provenance.preset}; a value without a source is a default"]
    section = None
    for name, value in flat(config).items():
        if settings()[name].section != section:
            section = settings()[name].section
            lines += ["", f"# {section}"]
        is_due = name in config.provenance.due
        line = f"# {name}: decided when the data can be read" if is_due else _line(name, value)
        lines.append(line + _comment(*_origin(config, name)))
    return "\n".join(lines) + "\n"


def derived_lines(config: Config, *, world_size: int) -> str:
    """Values that follow from a sound `config`, as comments to append to `to_yaml`."""
    values: dict[str, object] = {
        "run_name": config.tracking.run_name or config.experiment.run_name,
        "world_size": world_size,
        "data_parallel_size": layout_of(config, world_size).data,
        **{name: getattr(config, name) for name in DERIVED},
        **{name: getattr(config, name) if config.has_length else UNCOUNTED for name in LENGTHS},
        "max_possible_score": config.reward.max_possible_score,
    }
    return "\n".join(["", "# derived", *(f"# {name}: {value}" for name, value in values.items())]) + "\n"


def _line(name: str, value: object) -> str:
    value = list(value) if isinstance(value, tuple) else value
    flow = isinstance(value, list)
    text = yaml.safe_dump({name: value}, default_flow_style=None if flow else False, width=1 << 20)
    return text.rstrip("\n")


def _origin(config: Config, name: str) -> Iterator[str]:
    """Where a value comes from, and which commit a name on the Hub has led to."""
    if source := config.provenance.sources.get(name):
        yield source
    if snapshot := config.provenance.snapshots.get(name):
        yield f"commit {snapshot.commit}"


def _comment(*words: str) -> str:
    # A path may contain line breaks, which would end the comment.
    return f"  # {', '.join(words).encode('unicode_escape').decode()}" if words else ""
