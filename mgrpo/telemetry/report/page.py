"""A run as one HTML page, made from the files in its folder: config.yaml, metrics.jsonl and the tables of samples.

The page loads nothing, and runs one script: the one in this folder, whose hash its policy names. Completions are untrusted
input: they are escaped here, and the script handles them as text only. Without scripts everything but the values under the
pointer can be read.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from mgrpo.telemetry.files import write_whole
from mgrpo.telemetry.report import overview
from mgrpo.telemetry.report.charts import chart_groups
from mgrpo.telemetry.report.figure import Sheet
from mgrpo.telemetry.report.run import RecordedRun
from mgrpo.telemetry.report.sample_pages import Gallery, held_out_samples, traces, train_samples
from mgrpo.telemetry.report.text import script_json, text
from mgrpo.telemetry.samples import TRAIN_SAMPLES

Follow = Literal["", "reload", "poll"]
"""The way in which the page follows a run: not at all, by loading itself again, or by asking the server that it came from."""


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write `folder/report.html`, or `out`; it appears complete or not at all.

    Raises:
        ValueError: the folder holds no metrics.
    """
    path = Path(out) if out else Path(folder) / "report.html"
    write_whole(path, page(Path(folder)))
    return path


def page(folder: Path, *, follow: Follow | None = None) -> str:
    """The whole page.

    Args:
        follow: None for a page that reloads itself during the run.
    """
    run = RecordedRun.read(folder)
    if follow is None:
        follow = "" if run.is_over else "reload"
    steps = [line["step"] for line in (*run.steps, *run.evaluations) if isinstance(line.get("step"), int)]
    sheet, gallery = Sheet(min(steps, default=0), max(steps, default=1)), Gallery(unread=run.unread)
    rollouts = folder / "rollouts"
    charts = chart_groups(run, sheet)
    kept = Path(str(run.settings.get("rollouts_save_path") or rollouts))
    samples = [
        held_out_samples(rollouts, gallery),
        train_samples(rollouts / TRAIN_SAMPLES, gallery),
        traces(kept, gallery),
    ]
    sections = {
        "warnings": ("Warnings", overview.warnings(run)),
        "curves": (
            "Curves",
            f"<h2 id='curves'>Curves</h2>{CHART_TOOLS}{charts}{overview.engines(run)}" if charts else "",
        ),
        "evaluations": ("Evaluations", overview.evaluations(run)),
        "starts": ("Starts", overview.starts(run)),
        "samples": ("Samples", with_tools("".join(samples), has_tokens=bool(gallery.tokens))),
        "settings": ("Settings", overview.settings(run)),
    }
    return whole(run.title, overview.header(run), sections, sheet=sheet, gallery=gallery, follow=follow)


CHART_TOOLS = (
    "<div class='tools script'><label>Find a chart <input type='search' id='find-chart' placeholder='entropy, time/...'>"
    "</label><span class='note'>Point at a chart to read the values of a step.</span></div>"
)
_KINDS = (("", "all"), ("correct", "correct"), ("wrong", "wrong"), ("unscored", "without a score"), ("cut", "cut off"))


def with_tools(samples: str, *, has_tokens: bool) -> str:
    """The section of samples, with the fields that search them."""
    if not samples:
        return ""
    kinds = "".join(f"<option value='{value}'>{name}</option>" for value, name in _KINDS)
    swatches = "".join(f"<span class='p{level}'>{name}</span>" for level, name in enumerate(PROBABILITIES))
    colours = (
        "<label><input type='checkbox' id='colours'> colour tokens by probability</label>"
        f"<span class='swatches' hidden>{swatches}</span>"
    )
    return (
        "<h2 id='samples'>Samples</h2><div id='samples-shown'><div class='tools script sticky'>"
        "<label>Search <input type='search' id='search' placeholder='text of prompts and answers'></label>"
        f"<label>Show <select id='kind'>{kinds}</select></label>"
        "<label>Reward <input type='number' step='any' id='least' placeholder='from' aria-label='lowest reward'>"
        "<input type='number' step='any' id='most' placeholder='to' aria-label='highest reward'></label>"
        f"{colours if has_tokens else ''}<output id='found'></output></div>{samples}</div>"
    )


PROBABILITIES = ("above 0.9", "above 0.5", "above 0.1", "above 0.01", "below", "not sampled")
"""Levels of probability, each with a colour for tokens."""


def whole(
    title: str,
    header: str,
    sections: Mapping[str, tuple[str, str]],
    *,
    sheet: Sheet | None = None,
    gallery: Gallery | None = None,
    follow: Follow = "",
) -> str:
    """A page of sections.

    Args:
        sections: name and HTML by the anchor that the contents link to; empty sections are left out.
    """
    kept = {place: found for place, found in sections.items() if found[1]}
    values: dict[str, Any] = {"tokens": gallery.tokens if gallery else {}, **(sheet.values() if sheet else {})}
    policy = (
        f"default-src 'none'; style-src {_hash(style())}; script-src {_hash(script())}; base-uri 'none'; form-action 'none'"
        + ("; connect-src 'self'" if follow == "poll" else "")
    )
    return "\n".join(
        [
            "<!doctype html>",
            f"<html lang='en' data-follow='{follow}'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'><meta name='color-scheme' content='light dark'>",
            f"<title>{text(title)}</title><style>{style()}</style></head><body><main>",
            header,
            overview.contents([(place, name) for place, (name, _) in kept.items()]),
            *(html for _, html in kept.values()),
            f"<script type='application/json' id='values'>{script_json(values)}</script>",
            f"</main><div id='read-out' hidden></div><script>{script()}</script></body></html>\n",
        ]
    )


@cache
def style() -> str:
    """The page's style sheet."""
    return _resource("page.css")


@cache
def script() -> str:
    """The page's script."""
    return _resource("page.js")


def _resource(name: str) -> str:
    return files("mgrpo.telemetry.report").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
