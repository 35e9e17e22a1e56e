"""The effective configuration as YAML that loads back to an equal `Config`."""

from __future__ import annotations

import yaml

from mgrpo.config.fields import flat, settings
from mgrpo.config.schema import Config


def to_yaml(config: Config) -> str:
    """Every setting, one a line, under its section's name as a comment; ASCII, whatever the values hold."""
    lines: list[str] = []
    section = None
    for name, value in flat(config).items():
        if settings()[name].section != section:
            section = settings()[name].section
            lines += ["", f"# {section}"] if lines else [f"# {section}"]
        lines.append(_line(name, value))
    return "\n".join(lines) + "\n"


def _line(name: str, value: object) -> str:
    value = list(value) if isinstance(value, tuple) else value
    flow = isinstance(value, list)
    text = yaml.safe_dump({name: value}, default_flow_style=None if flow else False, width=1 << 20)
    return text.rstrip("\n")
