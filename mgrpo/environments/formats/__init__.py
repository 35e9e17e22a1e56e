"""Formats of tool calls: the text of a turn to the calls in it. Standard library only."""

from mgrpo.environments.formats.families import detected, named
from mgrpo.environments.formats.format import Format, Parsed

__all__ = ["Format", "Parsed", "detected", "named"]
