"""Constraints on the form of a response ("no commas", "three paragraphs") and their checks.

`constraint_table` lists all of them by name; the other files hold the checkers by theme, each a function of the response
and of the label's arguments (`label_arguments`). `sentences` and `vocabulary` define sentences and words.
"""

from __future__ import annotations

from mgrpo.rewards.constraints.scoring import score_instructions

__all__ = ["score_instructions"]
