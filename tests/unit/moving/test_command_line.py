"""Launch scripts as they are pasted: the words that reach the trainer are those that its shell would give it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mgrpo.config import ConfigError
from mgrpo.moving import GRPOConfig
from mgrpo.moving.scripts import slime, verl
from mgrpo.moving.scripts.command_line import flags_of, words_of

SCRIPT = r"""#!/bin/bash
# two nodes; don't start it twice
set -euo pipefail
export SIZE="7B"   # of the model
STEPS=$((10 * 4))
exp_name="run_${SIZE}_$STEPS"
DATA="rows.jsonl 1.0 more.jsonl 200"
cd /somewhere && python prepare.sh

uv run python mason.py \
    --cluster ours --env A=1 \
    --gpus 8 -- source setup.sh \&\& uv run --extra x open_instruct/grpo_fast.py \
    --exp_name "${exp_name}" \
    # a comment between two lines
    --dataset_mixer_list $DATA \
    --stop_strings "\"</answer>\"" "done" \
    --tool_configs '{"price": "$5", "n": 2}' {} \
    --output_dir ${OUT:-out/$SIZE} \
    --learning_rate=1e-6 "$@" && echo done > log
echo "--beta 1"
"""
WORDS = [
    "--exp_name", "run_7B_40", "--dataset_mixer_list", "rows.jsonl", "1.0", "more.jsonl", "200",
    "--stop_strings", "</answer>", "done", "--tool_configs", '{"price": "$5", "n": 2}', "{}",
    "--output_dir", "out/7B", "--learning_rate=1e-6",
]  # fmt: skip


def test_a_script_with_everything_in_it():
    """A newcomer pastes the file; whatever is lost on the way is trained differently."""
    assert words_of(SCRIPT) == WORDS


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash, which is not installed")
@pytest.mark.parametrize(
    "text",
    [
        "A='x y'\npython grpo.py --a $A --b \"$A\" --c '$A' --d \"it's $A\" --e a#b",
        "A=1; python grpo.py --a 2",
        'A="${NOT_SET:-p}_${ALSO_NOT:-${NOT_SET:-q}}"\npython grpo.py --a $A --b \\$A --c "\\"q\\""',
        "python grpo.py \\\n  --a 1 \\\n  --b '{\"k\": [1, 2]}' # and so on\n",
        "python grpo.py --a 1 2>&1 | tee log",
        "sleep 1 && python grpo.py --a 1 && sleep 2",
        "python grpo.py --a 1; python other --b 2",
        "python grpo.py --a $((2 * 3 * 4)) --b $(date +%Y) $@",
        'python grpo.py --a "two words" --b "" --c',
    ],
)
def test_words_are_those_of_a_shell(text, tmp_path):
    """bash itself is the reference: it writes what its program would be given."""
    program = 'python() { [ "$1" = grpo.py ] && shift && printf "%s\\0" "$@" > words; }; sleep() { :; };'
    subprocess.run(["bash", "-c", f"{program}\n{text}"], capture_output=True, check=False, cwd=tmp_path)
    expected = (tmp_path / "words").read_text().split("\0")[:-1]
    assert expected and words_of(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "python open_instruct/grpo_fast.py --beta 0 --seed 3",
        "uv run --active open_instruct/grpo.py --beta 0 --seed 3",
        "torchrun --nproc-per-node 8 open_instruct/grpo.py --beta 0 --seed 3",
        "python mason.py --gpus 8 -- python open_instruct/grpo_fast.py --beta 0 --seed 3",
        "python mason.py --gpus 8 -- source a.sh \\&\\&python open_instruct/grpo_fast.py --beta 0 --seed 3",
        "VAR=1 OTHER=2 uv run open_instruct/grpo_fast.py --beta 0 --seed 3",
        "python server.py --port 1 &\npython open_instruct/grpo_fast.py --beta 0 --seed 3",
        "--beta 0\n--seed 3\n",
        "  --beta 0 \\\n  --seed 3",
        "python open_instruct/grpo_fast.py\r\n  --beta 0\r\n  --seed 3\r\n",
    ],
)
def test_launchers_and_other_commands_are_left_out(text):
    """Everyone starts the trainer in their own way, and only its flags are ours."""
    assert words_of(text) == ["--beta", "0", "--seed", "3"]


def test_words_behind_a_launcher_are_split_again():
    """The launcher joins them for another shell: a list in quotes arrives there as several words, a JSON object whole."""
    given = ["mason.py", "--", "grpo.py", "--dataset_mixer_list", "a 1.0 b 2", "--tool_configs", '{"a": 1}']
    assert flags_of(given) == ["--dataset_mixer_list", "a", "1.0", "b", "2", "--tool_configs", '{"a": 1}']
    assert flags_of(given[2:])[1] == "a 1.0 b 2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python grpo.py --exp_name x_$NOBODY_HAS_SET_THIS", "'x_$NOBODY_HAS_SET_THIS' has a value that only a shell knows"),
        ("python grpo.py --total_episodes $(wc -l rows)", "'$(wc -l rows)' has a value that only a shell knows (line 1: $(wc -l rows) is a command); write it out"),
        ("A=`hostname`\npython grpo.py --exp_name $A", "has a value that only a shell knows"),
        ("python mason.py -- python grpo.py --code_api_url \\$NOBODY_HAS/x", "'$NOBODY_HAS/x' has a value that only a shell"),
        ("python grpo.py --exp_name 'x", "the command line cannot be read: No closing quotation; check its quotes"),
        ("python grpo.py --beta 0\npython grpo_fast.py --beta 1", "the text starts 2 trainers; give one command at a time"),
    ],
)  # fmt: skip
def test_what_only_a_shell_knows_is_named(text, words):
    """A name with `$` in it that passes as a value would be found in the files of the run, or never."""
    with pytest.raises(ConfigError) as caught:
        words_of(text)
    assert any(words in problem for problem in caught.value.problems)


def test_variables_of_the_environment_count(monkeypatch):
    """Scripts read addresses and tokens from it, as their shell does."""
    monkeypatch.setenv("CODE_API_URL", "http://localhost:1234")
    text = "python mason.py -- python grpo.py --code_api_url \\$CODE_API_URL/test_program"
    assert words_of(text) == ["--code_api_url", "http://localhost:1234/test_program"]


def test_the_python_door_reads_scripts():
    """Both forms that Open Instruct's users have: the text of a command, and its words."""
    config = GRPOConfig.from_open_instruct(SCRIPT.replace("--tool_configs", "--tools a.b:C a.b:D --tool_configs"))
    assert (config.experiment.exp_name, config.experiment.output_dir) == ("run_7B_40", "out/7B")
    assert config.data.dataset_mixer_list == ("rows.jsonl", "1.0", "more.jsonl", "200")
    assert config.rollout.stop_strings == ("</answer>", "done")
    assert config.provenance.preset == "open_instruct_main"
    assert GRPOConfig.from_open_instruct(["python", "grpo.py", "--beta", "0"]).loss.beta == 0


DOORS = {
    "Open Instruct": (words_of, "python open_instruct/grpo_fast.py --learning_rate 5e-7 --beta 0.01"),
    "verl": (lambda given: verl.texts_of(given).texts, "python -m verl.trainer.main_ppo trainer.nnodes=2"),
    "slime": (lambda given: slime.texts_of(given).texts, "python train.py --lr 5e-7 --num-rollout 3"),
}
SCRIPTS = (
    *(
        "run.sh",
        "my run.sh",
        "it's run.sh",
        'a"b.sh',
        "tab\trun.sh",
        "run copy",
        "train",
        "my run.bash",
        "a=b.sh",
        "a --b.sh",
    ),
    *("grpo.py copy.sh", "$HOME.sh", "a;b.sh", "deep dir/run.sh"),
)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_whatever_its_name(door, name, tmp_path, monkeypatch):
    """A path that is taken for a command holds no flag, and the run would have the defaults."""
    read, text = DOORS[door]
    monkeypatch.chdir(tmp_path)
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"cd /somewhere\n{text}\n")
    assert read(path) == read(name) == read(path.absolute()) == read(str(path.absolute())) == read(text) != []


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        *((name, f"cannot read the script {name}: No such file") for name in ("missing.sh", "mis sing.sh", "bash run.bash")),
        *((Path(name), f"cannot read the script {name}: No such file") for name in ("missing", "mis sing.sh")),
        *((Path(name), f"cannot read the script {name}: Is a directory") for name in ("folder", ".")),
        ("folder.sh", "cannot read the script folder.sh: Is a directory"),
        (Path("binary.sh"), "cannot read the script binary.sh: 'utf-8' codec"),
        *((name, f"{name!r} holds no flag") for name in ("empty.sh", "prose", "no_flags.sh", "folder", "hello world")),
        *((Path(name), f"{name!r} holds no flag") for name in ("empty.sh", "prose", "no_flags.sh")),
        *((text, "holds no flag") for text in ("", " \n", "# --beta 1 a=2", "python train.py", "cd x && python grpo_fast.py")),
        *((words, "holds no flag") for words in ([], [""], ["python", "grpo.py"], ["my run.sh"], ("hello", "world"))),
    ],
)  # fmt: skip
def test_words_without_a_flag_are_an_error(door, given, said, tmp_path, monkeypatch):
    """A run with every default, without a word, is another training than the one that was asked for."""
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "folder.sh"):
        Path(folder).mkdir()
    Path("binary.sh").write_bytes(b"\xff\xfe\0\1")
    for name, text in (("empty.sh", ""), ("prose", "hello\nworld\n"), ("no_flags.sh", "cd x\npython grpo_fast.py\n")):
        Path(name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        DOORS[door][0](given)
    assert len(caught.value.problems) == 1 and said in caught.value.problems[0]


def test_a_yaml_file_of_open_instruct_may_have_any_name(tmp_path):
    path = tmp_path / "my run.yaml"
    path.write_text("beta: 0.3\n")
    assert GRPOConfig.from_open_instruct(path).loss.beta == GRPOConfig.from_open_instruct(str(path)).loss.beta == 0.3
    with pytest.raises(ConfigError, match="cannot read the YAML file my missing"):
        GRPOConfig.from_open_instruct("my missing.yaml")
    assert GRPOConfig.from_open_instruct(f"python open_instruct/grpo.py '{path}'").loss.beta == 0.3
