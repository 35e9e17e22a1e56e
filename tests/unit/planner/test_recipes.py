"""Every configuration under examples/: it is legal, its data and templates can be read, and it fits the GPUs it names."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mgrpo.config import Config
from mgrpo.config.validate import problems, too_few_prompts, warnings
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.moving import load_file
from mgrpo.planner.hardware import GIB, GPUS, Hardware
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.plan_command import shipped_config
from mgrpo.planner.plan_report import whole_run
from mgrpo.run.inputs.prompts import make_prompts
from mgrpo.run.inputs.reading import read_inputs
from tests.shipped import EXAMPLES, FILES, SMOLLM2
from tests.unit.data.conftest import make_tokenizer
from tests.unit.data.real_tokenizers import REAL

RANKS = {"configs/smollm2.yaml": 2}
"""Learners where the file does not say how many, and one is not enough for its layout."""
LABELS = {
    "ai2-adapt-dev/rlvr_gsm8k_zs": ("gsm8k", "8"),
    "ai2-adapt-dev/math_ground_truth_zs": ("math", r"\frac{1}{2}"),
    "vwxyzjn/rlvr_acecoder": ("code", json.dumps(["assert add(1, 2) == 3"])),
    "allenai/IF_multi_constraints_upto5": (
        "ifeval",
        json.dumps(
            [{"instruction_id": ["punctuation:no_comma", "change_case:english_lowercase"], "kwargs": [None, None]}]
        ),
    ),
}
"""The verifier that the rows of a data set on the Hub name, and a label as theirs."""
ROW = re.compile(
    r"^\| \[(?P<name>[\w.]+)\]\((?P<file>\S+)\) \| (?P<model>\S+) \| (?P<gpus>\d+) \| (?P<gib>[\d.]+) \| (?P<seconds>\d+) \|"
)
TABLE = {
    str((EXAMPLES / "recipes" / row["file"]).resolve().relative_to(EXAMPLES)): row
    for row in map(ROW.match, (EXAMPLES / "recipes" / "README.md").read_text().splitlines())
    if row
}
"""Rows of the table of recipes, by file."""
LARGE = [f"configs/{name}.yaml" for name in ("30b_a3b_4x8", "32b_4x8", "32b_16x8", "235b_a22b_32x8")]


def num_learners(name: str, config: Config) -> int:
    return sum(config.parallel.num_learners_per_node) or RANKS.get(name, 1)


def model_in_place(path: str, folder: Path) -> Path:
    """The model's folder, or one in its place with the sizes and a tokenizer."""
    model = Path(path)
    if (model / "config.json").is_file():
        return model
    shape, model = shipped_config(path), folder / model.name
    if shape is None:
        make, package, modules = REAL["smollm2"]
        if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
            pytest.skip(f"the tokenizer of {package} takes {', '.join(missing)}, not installed")
        make().save_pretrained(model)
    else:
        make_tokenizer(model)
    (model / "config.json").write_text(json.dumps(shape or SMOLLM2))
    return model


def standing_in(config: Config, folder: Path) -> Config:
    """The configuration with local files in the place of a model and of data that are elsewhere."""
    model, data = model_in_place(config.model_path, folder), config.data
    teachers = (
        f"{name}:{model_in_place(path, folder)}".removeprefix(":") for name, path in config.distillation.teachers
    )
    changes: dict[str, Any] = {}
    for field in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        words = list(getattr(data, field))
        for index, name in enumerate(words[::2]):
            if name in LABELS:
                words[2 * index] = str(written(folder / f"{field}_{index}.jsonl", *LABELS[name]))
        changes[field] = tuple(words)
    agent = config.agent
    if agent.agent_kind == "function":
        # The framework's package is in an environment of its own.
        stub = folder / "agent.py"
        stub.write_text("async def run(row, endpoint): ...\n")
        agent = dataclasses.replace(agent, agent=f"{stub}:run")
    return dataclasses.replace(
        config,
        agent=agent,
        model=dataclasses.replace(config.model, model_name_or_path=str(model)),
        distillation=dataclasses.replace(config.distillation, teacher_model_name_or_path=tuple(teachers)),
        data=dataclasses.replace(data, dataset_local_cache_dir=str(folder / "cache"), **changes),
    )


def written(path: Path, verifier: str, label: str) -> Path:
    """As many rows as the largest evaluation takes."""
    asked = [{"role": "user", "content": "1+1="}]
    rows = ({"messages": asked, "ground_truth": label, "dataset": verifier, "id": number} for number in range(256))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_would_start(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start checks before it takes a GPU: settings, layout, rows, verifiers, template. A user copies these files."""
    monkeypatch.chdir(EXAMPLES.parent)
    learners = num_learners(name, load_file(EXAMPLES / name, world_size=1))
    config = standing_in(load_file(EXAMPLES / name, world_size=learners), tmp_path)
    hf_config = read_hf_config(config.model_path)
    functions = list(config.reward.reward_funcs)
    assert problems(config, world_size=learners, hf_config=hf_config) == []
    assert warnings(config, world_size=learners, hf_config=hf_config, num_reward_funcs=len(functions)) == []
    inputs, found = read_inputs(config, functions=functions)
    assert inputs is not None and found == []
    prompts, found = make_prompts(
        config, (inputs.train, inputs.held_out), toolset=inputs.toolset, vocab=hf_config["vocab_size"], is_sound=True
    )
    assert (found, prompts is None) == ([], False)
    assert prompts.train is not None and too_few_prompts(config, len(prompts.train)) == []


def planned(name: str, gpus: int) -> RunPlan:
    """The plan of a recipe on nodes of 8 H100, or on one GPU."""
    config = load_file(EXAMPLES / name, world_size=1)
    shape = shipped_config(config.model_path)
    assert shape is not None, f"{config.model_path} is not among the planner's models"
    hardware = Hardware(gpu=GPUS["H100"], nodes=max(gpus // 8, 1), gpus_per_node=min(gpus, 8))
    return plan_run(config, shape_of(shape), hardware, num_learners=num_learners(name, config))


def figures(plan: RunPlan) -> tuple[str, str]:
    """GiB on the fullest learner's GPU and seconds per step; generation runs beside training where it is asynchronous."""
    memory = max((phase.total for phase in plan.sharing), default=plan.worst.total)
    return f"{memory / GIB:.1f}", f"{plan.pace_s:.0f}"


def test_every_recipe_for_gpus_is_in_the_table() -> None:
    on_gpus = {name for name in FILES if load_file(EXAMPLES / name, world_size=1).model_path.startswith("models/")}
    assert set(TABLE) == on_gpus


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_fits_and_its_figures_are_the_plans(name: str) -> None:
    """A tenth of the fullest GPU stays free, no GPU is idle, and table and file say what the planner says today."""
    row = TABLE[name]
    plan = planned(name, int(row["gpus"]))
    memory, seconds = figures(plan)
    assert plan.fits and plan.split.idle == 0
    assert float(memory) < 0.9 * 80
    assert plan.engine.longest_sequences >= 32
    assert (row["gib"], row["seconds"]) == (memory, seconds)
    assert row["model"] == plan.config.model_path.removeprefix("models/")
    assert f"# Planned: {memory} of 80 GiB on a learner's GPU, {seconds} s per step" in (EXAMPLES / name).read_text()


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_for_many_nodes_says_how_long_it_runs_what_it_writes_and_what_to_test_first(name: str) -> None:
    """Who rents nodes must know the hours, the storage and whether the network works before the first of them is paid for."""
    lines = (EXAMPLES / name).read_text().splitlines()
    head = " ".join(
        line.removeprefix("#").strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)
    )
    assert whole_run(planned(name, int(TABLE[name]["gpus"]))) in head
    assert "docs/howto/32b_many_nodes.md#4-in-this-order" in head
