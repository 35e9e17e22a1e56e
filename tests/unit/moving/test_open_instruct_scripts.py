"""Open Instruct's own launch scripts: their flags run here, or are named with the reason."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from mgrpo.config.validate import problems
from mgrpo.moving import GRPOConfig, parse
from mgrpo.moving.presets import PRESETS
from mgrpo.planner.plan_command import plan_command
from tools.docs.settings import SCRIPTS

FILE = yaml.safe_load(SCRIPTS.read_text())
FLAGS = {path: shlex.split(text) for path, text in FILE["scripts"].items()}
REFUSED = FILE["refused"]
OLMO3_32B = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 100278,
    "max_position_embeddings": 65536,
}
"""The largest model that the scripts train: its heads must divide among their ranks and workers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(OLMO3_32B))
    return str(folder)


def words_of(path, model):
    """The script's flags, for a model and data on this machine."""
    return [{"MODEL": model, "DATA": "train.jsonl"}.get(word, word) for word in FLAGS[path]]


def values_of(path):
    """The words behind each flag of the script, without its dashes."""
    values = {}
    for word in FLAGS[path]:
        if word.startswith("--"):
            values[word.removeprefix("--")] = found = []
        else:
            found.append(word)
    return values


def learners_of(path):
    """Learner ranks that the script asks for; 1 by default."""
    values = values_of(path)
    return sum(map(int, values.get("num_learners_per_node") or values.get("actor_num_gpus_per_node") or ["1"]))


def config_of(path, model, preset):
    return parse(words_of(path, model), preset=preset, world_size=learners_of(path), defer=True)


def problems_of(path, model, preset):
    """What `mgrpo train` on the script's machines would refuse to start with."""
    return problems(config_of(path, model, preset), world_size=learners_of(path), hf_config=OLMO3_32B)


@pytest.mark.parametrize("path", [path for path in FLAGS if path not in REFUSED])
def test_a_script_of_open_instruct_does_here_what_it_says(path, model, capsys):
    """Its owner pastes its flags behind `mgrpo train`, with or without the preset that has Open Instruct's defaults."""
    for preset in ("mgrpo", "open_instruct_main", "seed"):
        assert problems_of(path, model, preset) == [], preset
    assert_the_script_trains_what_it_says(path, model)
    assert_notes_name_flags_of_the_script_or_of_the_preset(path, model)
    assert_the_script_is_planned_by_the_name_of_its_model(path, capsys)


@pytest.mark.parametrize("path", REFUSED)
def test_a_script_that_is_refused_is_refused_for_the_reason_on_the_page(path, model):
    """The page says what to leave out; were there another reason, the script would still not run."""
    setting, _ = REFUSED[path]
    for preset in ("mgrpo", "open_instruct_main"):
        found = problems_of(path, model, preset)
        assert found and all(problem.startswith(f"{setting}=") for problem in found)
    assert_notes_name_flags_of_the_script_or_of_the_preset(path, model)


def test_nine_in_ten_scripts_run():
    """What moves in within an hour: a script that needs a change needs it named."""
    assert len(FLAGS) == 66
    assert len(REFUSED) / len(FLAGS) <= 0.1
    assert REFUSED.keys() <= FLAGS.keys()


def assert_the_script_trains_what_it_says(path, model):
    """Accepting a flag is not obeying it: the numbers that decide what is learned are those of the script."""
    config, values = config_of(path, model, "open_instruct_main"), values_of(path)

    def number(name, default=None):
        return float(values[name][0]) if name in values else default

    prompts = number("num_unique_prompts_rollout") or number("local_rollout_batch_size") * learners_of(path)
    samples = number("num_samples_per_prompt_rollout") or number("number_samples_per_prompt")
    assert config.batch_size == prompts * samples
    assert (config.experiment.total_episodes, config.rollout.response_length) == (
        number("total_episodes"),
        number("response_length"),
    )
    assert (config.loss.beta, config.optimizer.learning_rate) == (number("beta"), number("learning_rate"))
    assert config.parallel.context_parallel_size == number("sequence_parallel_size", 1)
    assert config.parallel.zero_stage == number("deepspeed_stage", 3)
    assert config.tools.max_tool_calls == number("max_steps", number("max_tool_calls", 5))
    is_shared = values.get("single_gpu_mode", ["false"]) in ([], ["True"])
    assert config.engine.shares_gpus == is_shared
    assert config.rollout.async_steps == (0 if is_shared else number("async_steps", 8))
    assert config.loss.use_rho_correction


def assert_notes_name_flags_of_the_script_or_of_the_preset(path, model):
    """Notes are how an owner learns what is done differently; a note about something else would not be read again."""
    given = values_of(path).keys() | PRESETS["open_instruct_main"].keys()
    for note in config_of(path, model, "open_instruct_main").notes:
        assert note.startswith("preset open_instruct_main") or any(name in note for name in given), note


def test_the_python_door_takes_a_script_as_well(model):
    """`GRPOConfig.from_open_instruct` is the same reading with Open Instruct's defaults."""
    path = "scripts/train/qwen/grpo_fast_3b_single_node.sh"
    assert GRPOConfig.from_open_instruct(words_of(path, model)) == config_of(path, model, "open_instruct_main")


def assert_the_script_is_planned_by_the_name_of_its_model(path, capsys):
    """What the run would take is asked before its GPUs are; nothing of the model or the data is here then."""
    words = ["Qwen/Qwen3-8B" if word == "MODEL" else word for word in FLAGS[path]]
    of_others = [i for i, word in enumerate(words) if word in ("--tokenizer_name_or_path", "--model_revision")]
    for i in reversed(of_others):
        del words[i : i + 2]
    assert plan_command([*words, "--suggest", "0"]) in (0, 1)
    assert "learner" in capsys.readouterr().out
