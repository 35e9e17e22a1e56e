"""The model card beside a trained model, and both on the Hub. Rank 0, when the run is over."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mgrpo.config import Config
from mgrpo.config.annotations import JSONObject
from mgrpo.config.fields import flat, settings, shown
from mgrpo.model_io.card import CARD, CURVE, Facts, licence_of, model_card
from mgrpo.models.hf_config import is_on_hub
from mgrpo.run.inputs.reading import Inputs
from mgrpo.run.report.result import TrainResult, step_of
from mgrpo.run.report.upload import Uploads
from mgrpo.telemetry.files import write_whole
from mgrpo.telemetry.recorded import read_records
from mgrpo.telemetry.report.course import metric_points
from mgrpo.telemetry.report.figure import reward_svg
from mgrpo.telemetry.versions import version_line

SECTIONS = ("model", "adapter", "data", "rollout", "reward", "loss", "algorithm", "optimizer", "parallel")
"""Sections whose settings a card shows; the others hold places, addresses and keys."""
BESIDES = ("seed", "total_episodes")
NAMED = (
    "model_name_or_path",
    "tokenizer_name_or_path",
    "lora_adapter_path",
    "dataset_mixer_list",
    "dataset_mixer_eval_list",
)
"""Settings that the card describes in sentences of its own."""

_log = logging.getLogger(__name__)


def publish(config: Config, inputs: Inputs, result: TrainResult) -> None:
    """Write the cards of the last and the best export, and upload one of them if requested.

    Errors are warnings: the run has succeeded already.
    """
    for folder in {result.exported, result.best} - {None}:
        assert folder is not None
        try:
            write_card(config, inputs, folder)
        except Exception as err:
            _log.warning("%s has no model card: %s: %s", folder, type(err).__name__, err)
    if (model := result.best or result.exported) and result.has_trained:
        Uploads(config).finish(model, step_of(model))


def write_card(config: Config, inputs: Inputs, folder: Path) -> None:
    """Write README.md and the curve of the reward into the export `folder`."""
    lines = list(read_records([Path(config.experiment.output_dir) / "metrics.jsonl"]))
    step = step_of(folder)
    has_rewards = bool(metric_points(lines, "reward"))
    if has_rewards:
        write_whole(folder / CURVE, reward_svg(lines))
    snapshot = config.provenance.snapshots.get("model_name_or_path")
    data = config.data.dataset_mixer_list[::2]
    on_hub = [name for name in data if is_on_hub(name)]
    card = model_card(
        Facts(
            name=config.hub.hub_model_id or config.experiment.run_name,
            base=snapshot.name if snapshot else Path(config.model_path).absolute().name,
            base_on_hub=snapshot.name if snapshot else None,
            base_commit=snapshot.commit if snapshot else None,
            licence=licence_of(Path(config.model_path)),
            data=[name if name in on_hub else Path(name).name for name in data],
            data_on_hub=on_hub,
            rewards=[*map(_function_name, inputs.functions)] or inputs.verifiers(config),
            is_adapter=config.adapter.use_peft,
            steps=step,
            episodes=step * config.batch_size,
            num_held_out=len(inputs.held_out),
            before=_evaluation(lines, 0),
            after=_evaluation(lines, step),
            has_curve=has_rewards,
            settings=dict(_settings(config)),
            versions=version_line(),
        )
    )
    write_whole(folder / CARD, card)


def _evaluation(lines: list[dict[str, Any]], step: int) -> dict[str, float]:
    """Metrics of the evaluation after a step, without those that no completion had; empty: no evaluation."""
    found = [line for line in lines if line.get("step") == step and "eval/scores" in line]
    last = found[-1] if found else {}
    return {name: value for name, value in last.items() if name.startswith("eval/") and value is not None}


def _settings(config: Config) -> Iterator[tuple[str, str]]:
    for name, value in flat(config).items():
        setting = settings()[name]
        is_shown = (setting.section in SECTIONS and name not in NAMED) or name in BESIDES
        if is_shown and value != setting.default and setting.type is not JSONObject and not _is_private(value):
            yield name, shown(value)


def _is_private(value: object) -> bool:
    """True if the value names a place on this machine or in a network."""
    texts = value if isinstance(value, tuple) else (value,)
    return any(isinstance(text, str) and re.match(r"[/~.]|.*(://|@)", text) for text in texts)


def _function_name(function: str | Callable) -> str:
    name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    return Path(name).name
