"""Teachers that a run loads: what cannot judge the policy's tokens is refused, each with one sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.moving import from_values
from mgrpo.run.inputs.snapshots import origin
from mgrpo.run.inputs.teachers import teacher_problems

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "model"


def edited(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def swap_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    (first, a), (second, b) = sorted(vocab.items(), key=lambda entry: entry[1])[10:12]
    vocab[first], vocab[second] = b, a
    path.write_text(json.dumps(content))


def drop_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()


def found_in(teacher: Path, **values: object) -> list[str]:
    base = {"model_name_or_path": str(QUICKSTART), "dataset_mixer_list": ["a", "1.0"]}
    config = from_values(base | {"teacher_model_name_or_path": str(teacher)} | values)
    return teacher_problems(config, shape_of(read_hf_config(config.model_path)))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (swap_tokens, "has another tokenizer: id 10 is"),
        (lambda folder: edited(folder / "config.json", vocab_size=32), "has 32 tokens (vocab_size), and the policy 64"),
        (lambda folder: edited(folder / "config.json", max_position_embeddings=4), "has 4 positions (max_position_emb"),
        (lambda folder: edited(folder / "config.json", model_type="rwkv"), "rwkv"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (drop_weights, "safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer could be loaded from"),
    ],
)
def test_a_teacher_that_cannot_judge_is_refused(tmp_path, spoil, said):
    teacher = Path(shutil.copytree(QUICKSTART, tmp_path / "teacher"))
    assert found_in(teacher) == []
    spoil(teacher)
    found = found_in(teacher)
    assert found
    assert all(problem.startswith("teacher_model_name_or_path=") for problem in found)
    assert any(said in problem for problem in found), found


def test_servers_and_the_policy_itself_are_not_loaded(tmp_path):
    assert found_in("self", teacher_prompt_template="{prompt} {solution}") == []
    server = {"teacher_mode": "server", "teacher_server_base_url": ["http://127.0.0.1:1"]}
    assert found_in(tmp_path / "nowhere", **server) == []


def test_each_teacher_of_the_hub_has_its_commit():
    from mgrpo.models.hf_files.hub import HubSnapshot

    config = from_values({"model_name_or_path": str(QUICKSTART), "teacher_model_name_or_path": ["a:o/big", "b:o/code"]})
    (big, code) = config.distillation.teachers
    snapshots = {
        f"teacher_model_name_or_path:{t.model}": HubSnapshot(
            name=t.model, commit=t.name * 40, folder=Path(f"/cache/{t.name}"), part="model"
        )
        for t in (big, code)
    }
    config = replace(config, provenance=replace(config.provenance, snapshots=snapshots))
    assert [config.teacher_path(big), config.teacher_path(code)] == ["/cache/a", "/cache/b"]
    assert set(origin(config)["commits"].values()) == {"a" * 40, "b" * 40}
