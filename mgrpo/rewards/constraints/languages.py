"""The language of a text, by langdetect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from mgrpo.rewards.verifier import shown


def language_of(text: str) -> str | None:
    """Code of the text's language ("en", "zh-cn"); None where the text holds nothing that identifies it.

    langdetect draws samples; here it draws the same ones each time, so that a text has one language.
    """
    detect, _, undetectable = _langdetect()
    try:
        return detect(text)
    except undetectable:
        return None


def checked_language(language: str) -> str:
    """The code itself, if it is one that `language_of` can give."""
    known = _langdetect()[1]
    if language not in known:
        raise ValueError(f"language={shown(language)} is not known to langdetect; it knows {', '.join(sorted(known))}")
    return language


@functools.cache
def _langdetect() -> tuple[Callable[[str], str], frozenset[str], type[Exception]]:
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
        from langdetect.detector_factory import PROFILES_DIRECTORY
    except ImportError as err:
        raise ValueError("constraints on the language need langdetect: pip install langdetect==1.0.9") from err
    DetectorFactory.seed = 0
    return detect, frozenset(profile.name for profile in Path(PROFILES_DIRECTORY).iterdir()), LangDetectException
