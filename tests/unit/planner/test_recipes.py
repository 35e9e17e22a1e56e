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
from mgrpo.moving import load_file, parse
from mgrpo.planner.hardware import GIB, GPUS, Hardware
from mgrpo.planner.plan import RunPlan, plan_run
from mgrpo.planner.plan_command import shipped_config
from mgrpo.planner.plan_report import as_json, show, whole_run
from mgrpo.planner.suggest import AHEAD, steps_ahead
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


def planned(name: str, gpus: int, **changes: Any) -> RunPlan:
    """The plan of a recipe on nodes of 8 H100, or on one GPU; with other settings as a command line gives them."""
    flags = [word for field, value in changes.items() for word in (f"--{field}", *map(str, always_list(value)))]
    config = parse(["--config", str(EXAMPLES / name), *flags], world_size=1)
    shape = shipped_config(config.model_path)
    assert shape is not None, f"{config.model_path} is not among the planner's models"
    hardware = Hardware(gpu=GPUS["H100"], nodes=max(gpus // 8, 1), gpus_per_node=min(gpus, 8))
    return plan_run(config, shape_of(shape), hardware, num_learners=num_learners(name, config))


def always_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def large(name: str, **changes: Any) -> RunPlan:
    """The plan of a configuration for many nodes."""
    file = f"configs/{name}.yaml"
    return planned(file, int(TABLE[file]["gpus"]), **changes)


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


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_for_many_nodes_has_the_settings_of_generation_beside_training_in_a_comment(
    name: str, tmp_path: Path
) -> None:
    """Published steps are one ahead: who reads the file sees what that is worth, and need only uncomment four lines."""
    text = (EXAMPLES / name).read_text()
    said = re.search(r"planned at (\d+) s per step instead of (\d+), ([\d,]+) tokens a second", text)
    assert said
    names = "|".join((*AHEAD, "use_rho_correction"))
    asked, count = re.subn(rf"^# (?=({names}): )", "", text, flags=re.MULTILINE)
    assert count == 4
    (tmp_path / "ahead.yaml").write_text(asked)
    now = planned(name, gpus := int(TABLE[name]["gpus"]))
    ahead = planned(str(tmp_path / "ahead.yaml"), gpus)
    assert not now.ahead and ahead.ahead and ahead.fits
    assert said.groups() == (f"{ahead.pace_s:.0f}", f"{now.pace_s:.0f}", f"{ahead.tokens_s_gpu:,.0f}")
    # What the command line makes of the same settings, and what the plan proposes.
    found = steps_ahead(now)
    assert found
    settings, proposed = found.settings, found.plan
    assert settings == AHEAD | {"use_rho_correction": True}
    assert (
        proposed.pace_s == ahead.pace_s == planned(name, gpus, **{k: str(v).lower() for k, v in AHEAD.items()}).pace_s
    )
    assert (proposed.config.loss, proposed.config.rollout) == (ahead.config.loss, ahead.config.rollout)


def test_a_plan_names_generation_beside_training_where_a_run_could_have_it(capsys: pytest.CaptureFixture) -> None:
    """Not where it has it, nor where engines and learners have the same GPUs, nor where the settings contradict its own."""
    now = large("32b_16x8")
    show(now, [], [])
    line = (
        "generation beside training: about 117 s per step, 701 tokens a second and GPU, on tokens up to 4 steps old, with "
        "--async_steps 2 --max_staleness 4 --inflight_updates true --use_rho_correction true"
    )
    assert line in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    told = as_json(now, [], [])["generation_beside_training"]
    assert told["settings"] == AHEAD | {"use_rho_correction": True} and told["pace"] == pytest.approx(117, abs=0.5)
    corrected = steps_ahead(large("32b_16x8", use_vllm_logprobs="true"))
    assert corrected and corrected.settings == AHEAD
    others = [large("32b_16x8", async_steps=1), large("32b_16x8", weight_sync_steps=4)]
    others.append(large("32b_16x8", vllm_mode="colocate", vllm_enable_sleep_mode="true", vllm_kv_cache_mb=20000))
    for other in others:
        assert steps_ahead(other) is None
        assert as_json(other, [], [])["generation_beside_training"] is None


def hours(gpu_seconds: float) -> str:
    return f"{gpu_seconds / 3600:.0f} hours of one GPU"


def test_the_howtos_for_many_nodes_quote_the_plan() -> None:
    """Readers rent by these numbers. Every sentence that has one is made from the plan of today."""
    pages = [EXAMPLES.parent / "docs/howto" / f"{name}.md" for name in ("32b_many_nodes", "235b_32_nodes")]
    dense, moe = (page.read_text() for page in pages)
    smaller, now, most = large("32b_4x8"), large("32b_16x8"), large("235b_a22b_32x8")
    for page, plan in ((dense, now), (moe, most)):
        memory, seconds = figures(plan)
        found = steps_ahead(plan)
        assert found
        ahead = found.plan
        phase, _ = plan.bottleneck
        share = plan.phases[phase] / plan.step_s
        quoted = (
            f"fits: {memory} of 80 GiB on the worst learner",
            f"an engine caches {plan.engine.longest_sequences} sequences of {plan.engine.longest} tokens",
            f"about {seconds} s per step; bottleneck: generation ({share:.0%}), mostly",
            f"generation beside training: about {ahead.pace_s:.0f} s per step, {ahead.tokens_s_gpu:,.0f} tokens",
            f"{plan.learners.num_micro_batches} micro-batches per rank",
            whole_run(plan),
            f"the plan says {plan.phases['generate']:.0f} and {plan.phases['train']:.0f} s",
            f"below {int(float(memory))} GiB",
        )
        for sentence in quoted:
            assert sentence in page
    assert f"planned {smaller.pace_s:.0f} s)" in dense
    more = large(
        "32b_16x8",
        num_learners_per_node=[8] * 10,
        vllm_num_engines=12,
        recompute_granularity="none",
    )
    assert more.fits
    assert f"(here 80 learners and 12 engines of 4: {more.pace_s:.0f} s, without recomputation)" in dense
    ahead = large("32b_16x8", **{name: str(value).lower() for name, value in AHEAD.items()})
    assert f"planned at {ahead.pace_s:.0f} s per step instead of {now.pace_s:.0f};" in dense
    whole = large("235b_a22b_32x8", vllm_num_engines=4, vllm_data_parallel_size=8)
    assert f"with 4 x 8 over four nodes it is planned at {whole.pace_s:.0f} s" in moe
    one = {"vllm_num_engines": 16, "vllm_tensor_parallel_size": 8, "vllm_data_parallel_size": 1}
    cut = large("235b_a22b_32x8", **one, vllm_enable_expert_parallel="false")
    sizes = (plan.engine.weights / GIB for plan in (most, cut))
    told = "weights take {:.0f} GiB of each GPU. Engines of 8 with parts of every expert take {:.0f} GiB, and the step {:.0f} s"
    assert told.format(*sizes, cut.pace_s) in moe
    kept = large("235b_a22b_32x8", recompute_granularity="selective", recompute_modules=["moe"])
    assert f"with `selective` it needs {kept.worst.total / GIB:.0f} of 80 GiB" in moe
    assert f"A step costs {hours(most.pace_s * 256)}" in moe
    assert f"parts of every expert take 55, and the step {cut.pace_s:.0f} s" in (EXAMPLES / LARGE[3]).read_text()
    engines = {"vllm_num_engines": 8, "vllm_data_parallel_size": 1, "vllm_enable_expert_parallel": "false"}
    assert f"take 28, and the step {large('30b_a3b_4x8', **engines).pace_s:.0f} s" in (EXAMPLES / LARGE[0]).read_text()


@pytest.mark.parametrize("name", LARGE)
def test_the_job_for_slurm_says_the_hours_and_bytes_of_its_runs(name: str) -> None:
    """Its walltime and its quota are asked for before it is sent."""
    plan = planned(name, int(TABLE[name]["gpus"]))
    sums = re.search(r"about (\d+) hours .* a training state ([\d.]+ [GT]B), 3 on disk", whole_run(plan))
    assert sums
    lines = [line.split() for line in (EXAMPLES / "cluster/slurm.sbatch").read_text().splitlines()]
    [row] = [words[1:] for words in lines if words[1:2] == [Path(name).stem]]
    assert row == [Path(name).stem, str(plan.hardware.nodes), sums[1], *sums[2].split()]
