"""Comparison of the packages that are installed on a run's nodes, including those that a run imports only at times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from typing import Any

from packaging.utils import canonicalize_name

NUM_NAMED = 8
"""Number of differing packages that a note names; the others are counted."""


def installed() -> dict[str, str]:
    """Name -> version of every package, as imports find them: the first on the path."""
    found: dict[str, str] = {}
    for package in distributions():
        # Remains of an interrupted pip have no name.
        if name := package.metadata["Name"]:
            found.setdefault(canonicalize_name(name), package.version)
    return found


def package_notes(about: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Differences of other nodes' `packages` from node 0's, one sentence for all nodes with the same ones.

    Packages that must be equal are under `same`, see `differences`; other differences do not stop the run.
    """
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, told in sorted(about.items()):
        if found := tuple(_other_packages(told["packages"], expected=about[0]["packages"])):
            alike.setdefault(found, []).append(rank)
    notes = []
    for found, ranks in alike.items():
        nodes = ", ".join(f"node {rank} ({about[rank]['host']})" for rank in ranks)
        more = f" and {len(found) - NUM_NAMED} more" if len(found) > NUM_NAMED else ""
        notes.append(f"packages on {nodes} differ from node 0's: {', '.join(found[:NUM_NAMED])}{more}; the run goes on")
    return notes


def _other_packages(here: Mapping[str, str], *, expected: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(here.keys() | expected.keys()):
        if name not in here:
            yield f"{name} missing"
        elif name not in expected:
            yield f"{name} {here[name]} in addition"
        elif here[name] != expected[name]:
            yield f"{name} {here[name]} instead of {expected[name]}"
