"""From flags and YAML to a Config."""

import re
import subprocess
import sys

import pytest

from mgrpo.config import Config, ConfigError, to_yaml
from mgrpo.config.fields import flat, section_types, settings, shown
from mgrpo.config.help import FIRST, field_docs, help_text
from mgrpo.moving import from_values, load_file, parse


def file_of(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems_of(argv):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return caught.value.problems


def test_an_empty_command_line_gives_the_defaults():
    """A default that exists in two places could differ between Python and the command line."""
    assert parse([]) == Config()
    assert parse([]).provenance == Config().provenance


@pytest.mark.parametrize("form", [["{}"], ["--config", "{}"], ["--config={}"]])
def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path, form):
    """A run would silently train with other values than those on its command line."""
    path = file_of(tmp_path, "seed: 7\nbeta: 0.5\n")
    config = parse([*(word.format(path) for word in form), "--seed", "9"])
    assert (config.experiment.seed, config.loss.beta, config.rollout.temperature) == (9, 0.5, 1.0)
    assert config.provenance.sources == {"seed": "flag", "beta": f"file {path}"}


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "on", None])
def test_every_spelling_of_true_turns_a_switch_on(text):
    """Scripts of other trainers write booleans in all of these ways."""
    argv = ["--non_stop_penalty"] if text is None else ["--non_stop_penalty", text]
    assert parse(argv).reward.non_stop_penalty is True


@pytest.mark.parametrize("text", ["false", "False", "0", "no"])
def test_every_spelling_of_false_turns_a_switch_off(text):
    """`bool("False")` is true: the classic way to train with an option one has turned off."""
    assert parse([f"--save_final={text}"]).checkpoint.save_final is False


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("true", True), ("0", False)])
def test_a_switch_with_auto_takes_all_three(text, value):
    """sequence_parallel=false read as a string would be truthy."""
    assert parse(["--sequence_parallel", text]).parallel.sequence_parallel == value


def test_lists_take_words_or_commas():
    """Both forms stand in published launch scripts."""
    expected = ("a.jsonl", "1.0", "b.jsonl", "20")
    for words in (["a.jsonl", "1.0", "b.jsonl", "20"], ["a.jsonl,1.0,b.jsonl,20"], ["a.jsonl,", "1.0,", "b.jsonl,20"]):
        assert parse(["--dataset_mixer_list", *words]).data.dataset_mixer_list == expected


def test_a_list_in_yaml_keeps_the_spelling_of_its_words(tmp_path):
    """1.0 is a whole dataset and 1 is one row: read as numbers they could not be distinguished."""
    path = file_of(
        tmp_path, "dataset_mixer_list: [a.jsonl, 1.0, b.jsonl, 1]\ndataset_mixer_eval_list:\n- 'c,d.jsonl'\n- 0.50\n"
    )
    data = load_file(path).data
    assert data.dataset_mixer_list == ("a.jsonl", "1.0", "b.jsonl", "1")
    assert data.dataset_mixer_eval_list == ("c,d.jsonl", "0.50")


@pytest.mark.parametrize(
    ("line", "section", "value"),
    [
        ("learning_rate: 2e-5", "optimizer", 2e-5),
        ("learning_rate: 1", "optimizer", 1.0),
        ("total_episodes: 1e5", "experiment", 100_000),
        ("total_episodes: 100_000", "experiment", 100_000),
        ("exp_name: 2026-01-01", "experiment", "2026-01-01"),
        ("exp_name: 007", "experiment", "007"),
        ("loss_denominator: 1000", "loss", "1000"),
        ("kl_estimator: 3", "loss", 3),
        ("ray_address: null", "engine", None),
        ("ray_address: ~", "engine", None),
        ("chat_template_name: none", "data", "none"),
        ("additive_format_reward: yes", "reward", True),
    ],
)
def test_yaml_means_what_the_field_means(tmp_path, line, section, value):
    """YAML 1.1 makes a string of 2e-5 and a date of 2026-01-01; the field's type must decide instead."""
    found = getattr(getattr(load_file(file_of(tmp_path, line)), section), line.split(":")[0])
    assert found == value
    assert type(found) is type(value)


def test_negative_numbers_are_values_and_not_flags():
    """`--save_freq -1` turns exports off in many scripts."""
    config = parse(["--save_freq", "-1", "--learning_rate", "-1e-5", "--non_stop_penalty_value=-10"])
    assert config.checkpoint.save_freq == -1
    assert config.optimizer.learning_rate == -1e-5
    assert config.reward.non_stop_penalty_value == -10.0


def test_all_problems_of_file_and_flags_come_at_once(tmp_path):
    """A user would otherwise start the run once for each mistake."""
    path = file_of(tmp_path, "seed: two\nlerning_rate: 1\nseed: 3\noptimizer:\n  beta: 1\nbeta: {a: 1}\n")
    found = problems_of([path, "--temprature", "1", "--num_epochs", "many", "--beta", "1", "2"])
    assert len(found) == 8
    text = "\n".join(found)
    assert f"seed must be a whole number, got 'two' ({path}, line 1)" in text
    assert f"unknown setting lerning_rate ({path}, line 2); did you mean learning_rate?" in text
    assert f"seed is given twice ({path}, lines 1 and 3)" in text
    assert "optimizer holds a mapping" in text and "settings are flat" in text
    assert f"beta holds a mapping ({path}, line 6)" in text
    assert "unknown setting --temprature (command line); did you mean --temperature?" in text
    assert "num_epochs must be a whole number, got 'many' (command line)" in text
    assert "--beta takes one value, got 2: 1 2" in text


def test_the_error_lists_one_problem_a_line():
    """A log reader must be able to count them."""
    error = ConfigError(["first", "second"])
    assert isinstance(error, ValueError)
    assert str(error).splitlines() == ["2 problems in the configuration:", "  - first", "  - second"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seed", "2.5"], "seed must be a whole number, got '2.5'"),
        (["--seed", "true"], "seed must be a whole number"),
        (["--seed", "inf"], "seed must be a whole number"),
        (["--temperature", "true"], "temperature must be a number"),
        (["--save_final", "maybe"], "save_final must be true or false, got 'maybe'"),
        (["--sequence_parallel", "maybe"], "sequence_parallel must be true or false or auto"),
        (["--kl_estimator", "4"], "kl_estimator must be one of 0, 1, 2, 3, got '4'"),
        (["--model_dtype", "fp16"], "model_dtype must be one of bfloat16, float16, float32, got 'fp16'"),
        (["--seed"], "--seed needs a value, a whole number"),
        (["--dataset", "a.jsonl"], "unknown setting --dataset (command line); use --dataset_mixer_list; pairs of"),
        (["--max-new-tokens", "9"], "unknown setting --max_new_tokens (command line); use --response_length"),
        (["--gpus", "8"], "use --num_learners_per_node and --vllm_num_engines"),
        (["--lora_rank", "8"], "unknown setting --lora_rank (command line); use --lora_r"),
        (["--versoin"], "unknown setting --versoin (command line); mgrpo --version prints it"),
        (["actor_rollout_ref.rollout.n=5"], "use num_samples_per_prompt_rollout; settings are written --name value"),
        (["runs/first"], "unexpected 'runs/first': write settings as --name value, after a YAML file"),
        (["--learning_ra", "1"], "did you mean --learning_rate?"),
        (["--qqqq", "1"], "--help all lists every setting"),
        (["--config"], "--config needs a value"),
        (["--lr_scheduler_type", "cosin"], "got 'cosin' (command line); did you mean cosine?"),
        (["a.yaml", "--config", "b.yaml"], "one YAML file can be given, got a.yaml, b.yaml"),
        (["-s", "1"], "unexpected '-s'"),
        (["/no/such.yaml"], "cannot read the YAML file /no/such.yaml: No such file or directory"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(argv, words):
    """A mistake that passes here is found after the engines have started, or never."""
    assert words in "\n".join(problems_of(argv))


def test_dashes_in_a_name_are_underscores(tmp_path):
    """Commands of slime and Megatron, and those of transformers' parser, are written with dashes."""
    config = parse(
        ["--learning-rate", "1e-5", "--tensor-model-parallel-size=2", "--dataset-mixer-list", "a-b.jsonl", "1.0"]
    )
    assert (config.optimizer.learning_rate, config.parallel.tensor_model_parallel_size) == (1e-5, 2)
    assert config.data.dataset_mixer_list == ("a-b.jsonl", "1.0")


def test_the_last_of_two_equal_flags_counts_and_is_named():
    """Launch scripts end in "$@", so that one setting can be changed without an edit."""
    config = parse(["--seed", "1", "--non_stop_penalty", "--seed", "2", "--non_stop_penalty"])
    assert config.experiment.seed == 2
    assert config.notes == ("--seed is given 2 times (1, then 2); the last one counts",)


def test_hydra_words_do_not_count_as_values(tmp_path):
    """One foreign word must be one problem, not a second YAML file as well."""
    path = file_of(tmp_path, "seed: 7\n")
    (problem,) = problems_of(["--config", path, "algorithm.kl_ctrl.kl_coef=0.1"])
    assert (
        problem == "unknown setting algorithm.kl_ctrl.kl_coef (command line); use beta; of the KL term in the reward; "
        "settings are written --name value"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: null", "seed must be a whole number, got nothing"),
        ("seed:", "seed must be a whole number, got nothing"),
        ("seed: [1]", "seed must be a whole number, got ['1']"),
        ("dataset_mixer_list: [[a]]", "dataset_mixer_list must be a list of words, got a list of lists"),
        ("- seed", "must hold `name: value` lines, got a sequence"),
        ("seed: [1", "is not valid YAML"),
        ("seed: 1\n---\nseed: 2\n", "is not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, words):
    """A file that is half understood would train something else."""
    assert words in "\n".join(problems_of([file_of(tmp_path, text)]))


def test_an_empty_file_gives_the_defaults(tmp_path):
    """A file with all lines commented out is a file."""
    assert load_file(file_of(tmp_path, "# seed: 2\n")) == Config()


def test_the_dumped_config_loads_back_equal(tmp_path):
    """A run could not be repeated from the config.yaml it writes."""
    changed = from_values(
        {
            "exp_name": "yes: no # 'x'",
            "output_dir": " two spaces ",
            "learning_rate": 2e-5,
            "adam_epsilon": 1e-08,
            "weight_decay": 0.1 + 0.2,
            "beta": 1e22,
            "total_episodes": 2**40,
            "dataset_mixer_list": ["a, b.jsonl", "1.0", "null", "2", "é" * 200, "0.5"],
            "dataset_mixer_eval_list": [],
            "sequence_parallel": False,
            "shared_prompt_packing": "auto",
            "loss_denominator": "1000",
            "ray_address": "10.0.0.1:6379",
            "save_freq": -1,
        }
    )
    for config in (Config(), changed):
        assert to_yaml(config).isascii()
        assert load_file(file_of(tmp_path, to_yaml(config))) == config


def test_the_dump_names_every_setting_once():
    """A setting that is not written could not be read back after its default changes."""
    names = re.findall(r"^(\w+):", to_yaml(Config()), flags=re.MULTILINE)
    assert names == list(settings()) == list(flat(Config()))


def test_python_values_follow_the_same_rules():
    """Python values must be refused as on the command line, with all problems at once."""
    assert from_values({"beta": 0, "dataset_mixer_list": ("a", 1.0)}).data.dataset_mixer_list == ("a", "1.0")
    with pytest.raises(ConfigError) as caught:
        from_values({"sed": 1, "beta": {}, "seed": 1.5})
    assert len(caught.value.problems) == 3


def test_every_field_has_a_docstring_for_help():
    """--help would show a flag without a word about it."""
    documents = {name: text for record in section_types().values() for name, text in field_docs(record).items()}
    assert [name for name in settings() if not documents.get(name)] == []
    assert not {"config", "help"} & settings().keys()


def test_help_is_grouped_and_shows_meaning_type_and_default(capsys):
    """An unsorted list of some two hundred flags would not help."""

    def shown(*words):
        with pytest.raises(SystemExit) as stop:
            parse(["--seed", "wrong", *words], prog="mgrpo train")
        assert stop.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    text = shown("--help", "all")
    assert text.startswith("usage: mgrpo train [--config FILE.yaml | FILE.yaml] [--preset NAME]")
    assert "optimizer: --learning_rate FLOAT Peak learning rate of AdamW. (default: 2e-05)" in text
    assert "--sequence_parallel BOOL|auto" in text
    assert "--kl_estimator {0,1,2,3}" in text
    assert all(f"--{name} " in text for name in settings())
    first = " ".join(FIRST.values()).split()
    assert 25 < len(first) < 40
    for words, names in (
        (["--help"], first),
        (["-h", "--beta", "0"], first),
        (["--help", "hub"], [name for name, setting in settings().items() if setting.section == "hub"]),
        (["--help", "beta"], ["beta"]),
    ):
        text = shown(*words)
        assert [name for name in settings() if f" --{name} " in text] == [name for name in settings() if name in names]
        assert "--help SECTION those of a section: experiment, model," in text
    with pytest.raises(ConfigError, match=r"--help optimiser: there is no such .*; did you mean optimizer\?"):
        parse(["--help", "optimiser"])


def test_a_percent_sign_in_a_docstring_does_not_break_help(monkeypatch):
    """argparse reads `%` in a help text as a placeholder and fails."""
    monkeypatch.setattr("mgrpo.config.help.field_docs", lambda record: {"seed": "50 % and %(x)s"})
    assert "50 % and %(x)s (default: 1)" in help_text()


def test_help_and_validation_import_nothing_heavy():
    """`mgrpo --help` must answer at once, and Ray must be able to start before torch is imported."""
    program = (
        "import sys, mgrpo.config, mgrpo.config.validate, mgrpo.telemetry.metrics.writer, mgrpo.telemetry.progress\n"
        "from mgrpo.config.help import help_text\n"
        "help_text()\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm', 'megatron', 'numpy', 'rich', 'tensorboard'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_values_are_shown_as_a_user_writes_them():
    """A sentence that says True or ('a',) shows Python instead of the flag."""
    assert [shown(value) for value in (True, None, 0.5, 1e-8, ("a", "b"), (), 3)] == [
        "true", "none", "0.5", "1e-08", "a b", "nothing", "3",
    ]  # fmt: skip


def test_a_file_of_nested_lists_is_named(tmp_path):
    """Three thousand of them ended in the traceback of a recursion, without the file's name."""
    path = tmp_path / "deep.yaml"
    path.write_text(f"seed: {'[' * 3000}{']' * 3000}\n")
    with pytest.raises(ConfigError, match=r"deep.yaml holds lists or mappings within each other"):
        load_file(path)
