"""The model card: what a stranger learns of a model, and what must not be in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mgrpo.model_io.card import Facts, licence_of, model_card
from mgrpo.models.hf_files.hub import HubSnapshot
from mgrpo.moving import from_values
from mgrpo.run.inputs.reading import Inputs
from mgrpo.run.report.publish import publish, write_card
from mgrpo.run.report.result import TrainResult
from mgrpo.telemetry.files import write_whole

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"


class Rows:
    """What a card asks of the data."""

    verifiers: dict[str, str] = {"integer": "train.jsonl:1"}  # noqa: RUF012

    def __len__(self) -> int:
        return 100


def facts(**values) -> Facts:
    known = {"name": "me/sums", "base": "tiny/sums", "data": ["train.jsonl"], "rewards": ["integer"]}
    return Facts(**(known | {"steps": 4, "episodes": 1024, "settings": {}, "versions": "mgrpo 0.1.0"} | values))


def parts(card: str) -> tuple[dict, str]:
    _, metadata, text = card.split("---\n", 2)
    return yaml.safe_load(metadata), text


def run_of(folder: Path, **values):
    """The configuration of a run whose metrics are written, and its last export."""
    lines = [
        {"step": 0, "eval/scores": 0.25, "eval/pass_at_1": 0.3},
        {"step": 1, "reward": 0.3},
        {"step": 2, "reward": 0.4},
        {"step": 2, "eval/scores": 0.5, "eval/pass_at_1": 0.6, "eval/pass_at_4_unbiased": 0.9},
    ]
    write_whole(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    export = folder / "hf/step_2"
    export.mkdir(parents=True)
    mix = ("open/maths", "1.0", str(folder / "private/rows.jsonl"), "1.0")
    given = {"output_dir": str(folder), "model_name_or_path": str(MODEL), "dataset_mixer_list": mix}
    return from_values(given | values), export


def test_an_evaluation_without_a_reward_leaves_its_line_out(tmp_path):
    """Where a reward function gives NaN, the metrics of the step have null."""
    config, export = run_of(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().replace('"eval/scores": 0.5', '"eval/scores": null')
    (tmp_path / "metrics.jsonl").write_text(lines)
    write_card(config, Inputs(train=Rows(), held_out=Rows()), export)
    card = (export / "README.md").read_text()
    assert "accuracy" in card and "mean reward" not in card


def test_metadata_and_text_say_what_was_trained(tmp_path):
    """The Hub lists a model under its base, its data and its tags."""
    config, export = run_of(tmp_path, model_name_or_path="tiny/sums", learning_rate=3e-4)
    config.provenance.snapshots["model_name_or_path"] = HubSnapshot(
        name="tiny/sums", commit="c" * 40, part="model", folder=MODEL
    )
    write_card(config, Inputs(train=Rows(), held_out=Rows()), export)
    metadata, text = parts((export / "README.md").read_text())
    assert metadata["base_model"] == "tiny/sums" and metadata["datasets"] == ["open/maths"]
    assert metadata["library_name"] == "transformers" and "license" not in metadata
    assert {"grpo", "rl"} <= set(metadata["tags"])
    assert "(https://huggingface.co/tiny/sums) (commit `cccccc" in text
    assert "2 training steps, 128 completions" in text and "100 held-out prompts" in text
    assert "| accuracy | 0.3 | 0.6 |\n| mean reward | 0.25 | 0.5 |\n| pass@4 |  | 0.9 |" in text
    assert "| learning_rate | `0.0003` |" in text and "- Reward: `integer`" in text
    assert (export / "reward_curve.svg").read_text().startswith("<svg")


def test_places_and_addresses_stay_out(tmp_path):
    """A card is for strangers: no folder of this machine, no address, nothing that may hold a key."""
    config, export = run_of(
        tmp_path,
        llm_judge_base_url="http://inside:8000/v1?key=secret",
        tools=("search",),
        tool_configs=('{"api_key": "secret"}',),
        chat_template_kwargs='{"token": "secret"}',
        reward_funcs=(str(tmp_path / "own.py") + ":score",),
        rollouts_save_path=str(tmp_path),
        hub_model_id="me/sums",
    )
    write_card(config, Inputs(train=Rows(), held_out=Rows(), functions=config.reward.reward_funcs), export)
    card = (export / "README.md").read_text()
    assert "secret" not in card and "inside" not in card and str(tmp_path) not in card
    assert "rows.jsonl" in card and "- Reward: `own.py:score`" in card and "vllm serve me/sums" in card


def test_what_is_not_known_is_left_out():
    metadata, text = parts(model_card(facts()))
    assert set(metadata) == {"library_name", "pipeline_tag", "tags"}
    assert "Evaluation" not in text and "svg" not in text


def test_values_do_not_end_cells_or_code():
    _, text = parts(model_card(facts(settings={"stop_strings": "a|b`c\nd"})))
    assert "| stop_strings | `a\\|b'c d` |" in text


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\n# x", "apache-2.0"),
        ("---\nlicense: other\n---\n", None),
        ("---\nlicense: [a\n---\n", None),
        ("# no metadata", None),
        ("---\n", None),
    ],
)
def test_licence_is_the_base_models(tmp_path, card, licence):
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path) == licence


def test_a_card_that_fails_is_a_warning(tmp_path, caplog):
    """The run has succeeded, and its model is there."""
    config, export = run_of(tmp_path)
    (export / "README.md.partial").mkdir()
    result = TrainResult(output_dir=tmp_path, steps=2, before={}, after={}, exported=export)
    publish(config, Inputs(train=Rows(), held_out=Rows()), result)
    assert "has no model card: IsADirectoryError" in caplog.text
