"""The model card of a trained model: README.md, as the Hub shows it. Text from facts; unknown ones are left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CARD, CURVE = "README.md", "reward_curve.svg"
TAGS = ("grpo", "rl", "reinforcement-learning", "mgrpo")
MEANINGS = {
    "eval/pass_at_1": "accuracy",
    "eval/scores": "mean reward",
    "eval/sequence_lengths": "mean length of a completion, tokens",
    "eval/stop_rate": "completions that end by themselves",
}
"""Metrics of an evaluation that a card shows, besides the accuracy of the best of several answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a run about the model that it has trained."""

    name: str
    """Name of the repository or the run."""
    base: str
    """Name of the base model for readers."""
    base_on_hub: str | None = None
    """Its name on the Hub, for the metadata."""
    base_commit: str | None = None
    licence: str | None = None
    """The base model's identifier of one."""
    data: Sequence[str]
    """Names of the training data."""
    data_on_hub: Sequence[str] = ()
    rewards: Sequence[str]
    """Names of verifiers and reward functions."""
    is_adapter: bool = False
    steps: int
    """Training steps that led to this model."""
    episodes: int
    """Completions that were sampled for them."""
    num_held_out: int = 0
    """Held-out prompts."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the evaluation before training."""
    after: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the evaluation of this model."""
    has_curve: bool = False
    settings: Mapping[str, Any]
    """Notable settings, by name."""
    versions: str


def model_card(facts: Facts) -> str:
    """README.md: metadata in YAML, then Markdown."""
    return f"---\n{yaml.safe_dump(_metadata(facts), sort_keys=False, allow_unicode=True)}---\n\n" + "\n".join(
        _text(facts)
    )


def licence_of(folder: Path) -> str | None:
    """Licence in the metadata of a folder's own card; None without a readable one."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
        metadata = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return None
    licence = metadata.get("license") if isinstance(metadata, dict) else None
    # Another one is explained by its own file or link, which a copy would lack.
    return licence if isinstance(licence, str) and licence != "other" else None


def _metadata(facts: Facts) -> dict[str, Any]:
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if facts.licence:
        found["license"] = facts.licence
    if facts.base_on_hub:
        found["base_model"] = facts.base_on_hub
    if facts.data_on_hub:
        found["datasets"] = list(facts.data_on_hub)
    return {**found, "tags": [*TAGS, *(["lora"] if facts.is_adapter else [])]}


def _text(facts: Facts) -> Iterator[str]:
    commit = f" (commit `{facts.base_commit}`)" if facts.base_commit else ""
    how = "low-rank adapters, merged into its weights" if facts.is_adapter else "all of its weights"
    yield f"# {_plain(facts.name)}"
    yield ""
    yield (
        f"[{facts.base}](https://huggingface.co/{facts.base_on_hub}){commit}"
        if facts.base_on_hub
        else f"`{facts.base}`"
    ) + f", trained by reinforcement learning with verifiable rewards (GRPO): {how}."
    yield ""
    yield f"- Data: {_listed(facts.data)}"
    yield f"- Reward: {_listed(facts.rewards)}"
    yield f"- Length: {facts.steps:,} training steps, {facts.episodes:,} completions"
    rows = list(_evaluation(facts))
    if rows:
        prompts = f" on {facts.num_held_out:,} held-out prompts" if facts.num_held_out else ""
        yield from ("", "## Evaluation", "", f"By the run itself{prompts}, with its own sampling settings.", "")
        yield from _table(("metric", "before training", "this model"), rows)
    if facts.has_curve:
        yield from ("", "## Reward during training", "", f"![reward by training step]({CURVE})")
    yield from ("", "## How to use it", "", *_usage(facts.name))
    yield from ("", "## Settings", "", "Those that differ from the defaults.", "")
    yield from _table(("setting", "value"), [(name, f"`{_plain(value)}`") for name, value in facts.settings.items()])
    yield from ("", "## Versions", "", facts.versions, "")


def _evaluation(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for name, value in sorted(facts.after.items(), key=lambda item: item[0] != "eval/pass_at_1"):
        of_many = re.fullmatch(r"eval/pass_at_(\d+)_unbiased", name)
        what = f"pass@{of_many[1]}" if of_many and of_many[1] != "1" else MEANINGS.get(name)
        if what:
            yield what, f"{facts.before[name]:.4g}" if name in facts.before else "", f"{value:.4g}"


def _usage(name: str) -> Iterator[str]:
    yield from ("```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "")
    yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    yield f'model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto", device_map="auto")'
    yield from ("```", "", "```sh", f"vllm serve {name}", "```")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(row)} |"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{_plain(name)}`" for name in names) or "given by the program that ran it"


def _plain(value: object) -> str:
    """Text that ends neither a cell nor a code span."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")
