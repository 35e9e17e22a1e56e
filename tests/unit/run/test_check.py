"""What a user brings that cannot work: one list of sentences and exit code 2, before Ray or an engine is started."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mgrpo import cli
from mgrpo.config import ConfigError
from mgrpo.data import trial
from mgrpo.data.tokenizer import load_tokenizer
from mgrpo.models.family import shape_of
from mgrpo.models.hf_config import read_hf_config
from mgrpo.models.hf_files.checksums import write_sums
from mgrpo.moving import from_values, parse
from mgrpo.run.inputs.prompts import vocabulary_notes
from mgrpo.run.inputs.teachers import teacher_problems
from mgrpo.run.start import check
from mgrpo.run.start.check import changed_files

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples" / "quickstart" / "model"
INDEX = "model.safetensors.index.json"
HANGS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
FILLS = "{% set a = 'a' * 10**10 %}{{ a }}"
CHAT = {"messages": [{"role": "user", "content": "1+1="}], "ground_truth": 2, "dataset": "integer"}
TEXT = {"prompt": "1+1=", "ground_truth": 2, "dataset": "integer"}


class Bench:
    """A copy of the quickstart's model and rows to spoil, and the start of a run with them."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture) -> None:
        self.folder, self.capsys = folder, capsys
        self.model = Path(shutil.copytree(QUICKSTART, folder / "model"))
        self.rows(TEXT)

    def rows(self, *rows: object) -> None:
        """The training data: at least as many rows as a step takes."""
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / "rows.jsonl").write_text("\n".join(lines * (32 // len(lines))) + "\n")

    def config(self, name: str = "config.json", **values: object) -> None:
        path = self.model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def index(self, file: str) -> None:
        (self.model / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))

    def template(self, text: str) -> None:
        self.rows(CHAT)
        self.config("tokenizer_config.json", chat_template=text)

    def add_token(self) -> None:
        """A token that the tokenizer knows and the model does not, in the third row."""
        path = self.model / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": 64, "content": "<t>", **flags})
        path.write_text(json.dumps(tokenizer))
        self.rows(TEXT, TEXT, TEXT | {"prompt": "<t>1="}, TEXT)

    def problems(self, *flags: str, command: str = "train") -> list[str]:
        """The sentences of a start that must fail."""
        places = {"MODEL": str(self.model), "ROWS": str(self.folder / "rows.jsonl")}
        words = [
            *("--config", str(ROOT / "examples/configs/quickstart.yaml")),
            *("--output_dir", str(self.folder / "out")),
            *("--dataset_local_cache_dir", str(self.folder / "cache")),
        ]
        given = {"--model_name_or_path": ["MODEL"], "--dataset_mixer_list": ["ROWS", "1.0"]}
        given["--dataset_mixer_eval_list"] = ["ROWS", "1.0"] if command == "eval" else [""]
        for name, values in given.items():
            words += [name, *values] if name not in flags else []
        had_ray = "ray" in sys.modules  # of another test
        assert cli.main([command, *(places.get(word, word) for word in (*words, *flags))]) == 2
        captured = self.capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err
        assert had_ray or "ray" not in sys.modules
        text = captured.err[captured.err.index("mgrpo: ") :]
        assert not (self.folder / "out" / "metrics.jsonl").exists()
        return text.split("\n  - ")[1:]


@pytest.fixture
def bench(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Bench(tmp_path, capsys)


def remove(*names: str) -> Callable[[Bench], object]:
    return lambda bench: [(bench.model / name).unlink() for name in names]


def cut(size: int) -> Callable[[Bench], object]:
    return lambda bench: os.truncate(bench.model / "model.safetensors", size)


def write(name: str, text: str) -> Callable[[Bench], object]:
    return lambda bench: (bench.model / name).write_text(text)


ONE = {
    "no chat template": (
        lambda b: b.rows(CHAT),
        (),
        "rows.jsonl:1 has messages: the tokenizer .* has no chat template",
    ),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), (), "no tokenizer could be loaded from"),
    "another folder without one": (
        lambda b: None,
        ("--tokenizer_name_or_path", "no/such/folder"),
        "tokenizer_name_or_path=no/such/folder is not a folder",
    ),
    "no weights": (remove("model.safetensors"), (), "=.*model has neither model.safetensors nor .*pickles are never"),
    "only pickles": (
        lambda b: (b.model / "model.safetensors").rename(b.model / "pytorch_model.bin"),
        (),
        "only safetensors are read",
    ),
    "empty": (cut(0), (), "model.safetensors is not a complete .*: it ends after 0 bytes"),
    "header cut": (cut(1000), (), "it ends after 1,000 bytes, before its header does"),
    "values cut": (cut(100_000), (), "model.safetensors is not .*it has 100,000 bytes, its header promises 1,845,704"),
    "longer": (cut(2_000_000), (), "it has 2,000,000 bytes, its header promises 1,845,704"),
    "git lfs": (
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        (),
        "it is a Git LFS pointer; fetch the weights: git lfs pull",
    ),
    "not safetensors": (write("model.safetensors", "\x08\0\0\0\0\0\0\0[[[[[[[["), (), "its header is damaged"),
    "index of a missing file": (
        lambda b: b.index("model-00002-of-00002.safetensors"),
        (),
        "lacks model-00002-of-00002.safetensors, which model.safetensors.index.json lists; download it again",
    ),
    "index of another tensor": (
        lambda b: (b.model / INDEX).write_text('{"weight_map": {"nothing": "model.safetensors"}}'),
        (),
        "lacks nothing, which model.safetensors.index.json lists in model.safetensors",
    ),
    "index leads out": (lambda b: b.index("../x.safetensors"), (), "expected a file in the same folder"),
    "index leads elsewhere": (lambda b: b.index("/etc/x.safetensors"), (), "expected a file in the same folder"),
    "index damaged": (write(INDEX, "{"), (), "model.safetensors.index.json is damaged"),
    "a layer more": (
        lambda b: b.config(num_hidden_layers=4, layer_types=["full_attention"] * 4),
        (),
        r"lacks 12 tensors \(model\.layers\.3\..*config.json implies",
    ),
    "wider": (
        lambda b: b.config(intermediate_size=512),
        (),
        r"gate_proj.weight has shape \[256, 128\], config.json implies \[512, 128\] \(and 8 more tensors differ\)",
    ),
    "link": (
        lambda b: (b.model / "LICENSE").symlink_to("/etc/hostname"),
        (),
        "LICENSE is a link to /etc/hostname; put a copy of the file in its place",
    ),
    "index leads to no weights": (lambda b: b.index("config.json"), (), "expected a file in the same folder"),
    "index too deep": (write(INDEX, "[" * 100_000), (), "model.safetensors.index.json is damaged: RecursionError"),
    "other than exported": (
        lambda b: (write_sums(b.model), b.config("generation_config.json", eos_token_id=2)),
        (),
        "model_name_or_path=.*generation_config.json has changed since it was written, its checksum differs from that in mgrpo.sha256",
    ),
    "prompts too long": (
        lambda b: None,
        ("--max_prompt_token_length", "1"),
        "none of 32 prompts fits max_prompt_token_length=1; the shortest has 4 tokens",
    ),
    "most prompts too long": (
        lambda b: b.rows(TEXT, TEXT | {"prompt": "10+10="}),
        ("--max_prompt_token_length", "4"),
        "dataset_mixer_list has 16 prompts, but a step takes num_unique_prompts_rollout=32",
    ),
    "unknown token": (Bench.add_token, (), r"rows.jsonl:3 has token 64 \('<t>1='\), but the model has only 64"),
    "unknown end": (
        lambda b: b.config("generation_config.json", eos_token_id=[1, 64]),
        (),
        "eos_token_id=64 of .*is not among the model's 64 tokens",
    ),
    "template refuses": (
        lambda b: b.template("{{ raise_exception('no') }}"),
        (),
        "(?s)32 of 32 rows cannot .*rows.jsonl:1: the chat template refused the messages",
    ),
    "template hangs": (lambda b: b.template(HANGS), (), "the chat template takes more than 2 s for one prompt"),
    "template fills the memory": (lambda b: b.template(FILLS), (), "the chat template takes more than 512 MiB"),
    "data prepared only": (
        lambda b: b.rows(CHAT),
        ("--cache_dataset_only",),
        "the tokenizer .* has no chat template",
    ),
    "name of the Hub": (
        lambda b: None,
        ("--model_name_or_path", "Qwen/Qwen2.5-0.5B-Instruct"),
        "hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir DIR",
    ),
    "no amount": (
        lambda b: None,
        ("--dataset_mixer_list", "ROWS"),
        r"dataset_mixer_list has 1 word \(.*expected pairs",
    ),
    "passes too few for the warm-up": (
        lambda b: None,
        ("--num_train_epochs", "2", "--warm_up_steps", "9"),
        "warm_up_steps=9 is more than the run's 2 optimizer steps",
    ),
    "amount 0": (lambda b: None, ("--dataset_mixer_list", "ROWS", "0"), "amount '0' of .* must be a share"),
}
"""Name: how the inputs are spoiled, flags, and the one problem that is reported."""


@pytest.mark.parametrize("case", ONE)
def test_one_mistake_is_one_sentence_before_anything_starts(bench, monkeypatch, case):
    """Found after Ray and the engines have started, each of these is half a minute and a traceback."""
    monkeypatch.setattr(trial, "TRIAL_S", 2.0 if case == "template hangs" else 20.0)
    spoil, flags, words = ONE[case]
    spoil(bench)
    problems = bench.problems(*flags)
    assert len(problems) == 1
    assert re.search(words, problems[0]), problems[0]


def test_show_config_counts_the_rows(bench, capsys):
    """The number of steps is the first thing to look at, and the default's would be another."""
    words = [
        "--config",
        str(ROOT / "examples/configs/quickstart.yaml"),
        "--dataset_local_cache_dir",
        f"{bench.folder}/cache",
    ]
    words += ["--model_name_or_path", str(bench.model), "--show_config", "--num_train_epochs", "2.5"]
    assert cli.main(["train", *words, "--dataset_mixer_list", f"{bench.folder}/rows.jsonl", "1.0"]) == 0
    shown = capsys.readouterr().out
    assert "# num_training_steps: 2\n" in shown and "\ntotal_episodes: 640  # alias num_train_epochs (flag)\n" in shown
    assert cli.main(["train", *words, "--dataset_mixer_list", "missing.jsonl", "1.0"]) == 0
    assert "# num_training_steps: num_train_epochs decides" in capsys.readouterr().out


def test_tensors_that_are_left_out_are_named_at_the_start(bench, capsys):
    """Who expects them to be trained or exported learns it before hours have passed."""
    weights = load_file(bench.model / "model.safetensors")
    weights |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(16) for layer in range(2)}
    save_file(weights, bench.model / "model.safetensors")
    words = ["--config", str(ROOT / "examples/configs/quickstart.yaml"), "--output_dir", str(bench.folder / "out")]
    words += ["--model_name_or_path", str(bench.model), "--dataset_local_cache_dir", str(bench.folder / "cache")]
    words += ["--dataset_mixer_list", str(bench.folder / "rows.jsonl"), "1.0", "--dataset_mixer_eval_list", ""]
    check.check_run(parse(words), None, "", functions=[], dataset=None, eval_dataset=None, loss=None)
    noted = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    names = ", ".join(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2))
    assert len(noted) == 1 and noted[0].startswith(f"mgrpo: left out: 2 tensors ({names}) of {bench.model}; ")


def test_a_script_of_trl_starts_with_a_small_model(bench, capsys):
    """TRL limits no prompt. A limit of 512 tokens that nobody gave kept models of 512 positions from starting at all."""
    words = ["--preset", "trl_main", "--model_name_or_path", str(bench.model), "--num_generations", "8"]
    words += ["--dataset_local_cache_dir", f"{bench.folder}/cache", "--max_completion_length"]
    words += ["6", "--dataset_mixer_list", f"{bench.folder}/rows.jsonl", "1.0"]
    assert cli.main(["train", *words, "--show_config"]) == 0
    shown = capsys.readouterr().out
    assert "\nmax_prompt_token_length: 506  #" in shown and "\npack_length: 512  #" in shown
    words[words.index("6")] = "512"
    with pytest.raises(
        ConfigError, match=r"= 1024 is more .* \(max_prompt_token_length=512 of preset trl_main was not"
    ):
        check.check_run(parse(words), None, "", functions=[], dataset=None, eval_dataset=None, loss=None)


def test_a_misspelt_name_is_answered_before_a_tokenizer_is_imported(bench, monkeypatch):
    """transformers and torch take five seconds, after which the same command is typed again."""
    monkeypatch.setattr(check, "make_prompts", lambda *args, **options: pytest.fail("a tokenizer is imported"))
    (problem,) = bench.problems("--learning_rat", "1")
    assert problem.startswith("unknown setting --learning_rat (command line); did you mean --learning_rate?")


def test_a_cut_alone_starts_with_engines_on_gpus(bench, monkeypatch):
    """Here it is refused, as no engine on a CPU says which of so many tokens it samples from."""
    wrong = ("--top_p", "0.95", "--learning_rate", "-1")
    assert sum("give top_k with it" in problem for problem in bench.problems(*wrong)) == 1
    monkeypatch.setattr(check, "serving_gpus", lambda: ["0"])
    (problem,) = bench.problems(*wrong)
    assert problem.startswith("learning_rate=-1")


def test_all_of_them_are_one_list(bench):
    """Weights, tokenizer, rows, verifiers and flags have nothing to do with each other; one start finds them all."""
    bench.rows(CHAT)
    cut(100)(bench)
    problems = bench.problems("--learning_rate", "-1", "--remap_verifier", "integer=nosuch")
    for words in ("learning_rate", "nosuch", "complete safetensors", "no chat template"):
        assert sum(words in problem for problem in problems) == 1, problems
    assert len(problems) == 4
    bench.rows("{oops", TEXT | {"dataset": "intger"})
    problems = bench.problems("--tokenizer_name_or_path", "no/such/folder")
    for words in ("malformed rows", "unknown verifier 'intger'", "complete safetensors", "no/such/folder"):
        assert sum(words in problem for problem in problems) == 1, problems


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_folder_that_cannot_be_written_to_is_one_sentence(bench, command):
    """On a storage that is mounted read-only an evaluation ended with a traceback."""
    (problem,) = bench.problems("--output_dir", "/proc/out", command=command)
    assert problem.startswith("output_dir=/proc/out") and "cannot be written to: " in problem


def test_a_model_of_another_family_is_one_sentence(bench, capsys):
    """transformers knows it, prints its whole config.json when it does not suit, and blames the tokenizer for it."""
    bench.config(model_type="mamba")
    words = ["--config", str(ROOT / "examples/configs/quickstart.yaml"), "--model_name_or_path", str(bench.model)]
    done = subprocess.run(
        [sys.executable, "-m", "mgrpo", "train", *words, "--output_dir", str(bench.folder / "out")],
        capture_output=True,
        text=True,
    )
    first, second = done.stderr.splitlines()
    assert (done.returncode, first) == (2, "mgrpo: 1 problem in the configuration:")
    assert second.startswith("  - model_type='mamba' is not supported; supported families: ")


def test_a_tokenizer_that_knows_more_than_the_model_is_a_note(bench):
    """No prompt uses the other tokens today."""
    bench.add_token()
    tokenizer = load_tokenizer(bench.model)
    assert not list(vocabulary_notes(tokenizer, len(tokenizer)))
    (note,) = vocabulary_notes(tokenizer, 64)
    assert note.startswith("the tokenizer knows 65 tokens, and the model 64 (vocab_size in config.json): ")


def test_an_evaluation_checks_the_same_and_proposes_the_export(bench):
    """The engine loads the folder by itself, and says neither which file it was nor what was meant."""
    cut(100_000)(bench)
    (problem,) = bench.problems(command="eval")
    assert problem.startswith(f"model_name_or_path={bench.model}: model.safetensors is not a complete")
    for step in (5, 20):
        shutil.copytree(QUICKSTART, bench.folder / "run" / "hf" / f"step_{step}")
    for folder in ("run", "run/hf"):
        for command in ("eval", "train"):
            path = bench.folder / folder
            (problem,) = bench.problems("--model_name_or_path", str(path), command=command)
            assert problem.startswith(f"model_name_or_path={path} has no config.json; did you mean {path}")
            assert problem.strip().endswith("hf/step_20?")


def test_an_adapter_in_the_models_place_is_named_as_one(bench):
    """An export has its adapter in a folder of its own, which looks like what a run with adapters should be given."""
    (bench.folder / "adapter").mkdir()
    (bench.folder / "adapter" / "adapter_config.json").write_text("{}")
    (problem,) = bench.problems("--model_name_or_path", str(bench.folder / "adapter"))
    assert "is an adapter without its model; give the model, and this folder as lora_adapter_path" in problem


def test_weights_other_than_exported_are_refused_when_they_load(bench, monkeypatch):
    """Their headers are whole. One rank finds it, and the others must not begin without that one."""
    from mgrpo.run.start import assembly

    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        shutil.copy(bench.model / "model.safetensors", bench.model / name)
    write_sums(bench.model)
    content = (bench.model / names[1]).read_bytes()
    (bench.model / names[1]).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    config = from_values({"model_name_or_path": str(bench.model)})
    found: list[list[str]] = []

    def gathered(own: list[str], group: object) -> list[list[str]]:
        found.append(own)
        return found

    monkeypatch.setattr(assembly, "gather_json", gathered)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    refused = rf"model_name_or_path={bench.model}: {names[1]} has changed since it was written"
    for rank in (0, 1, 0):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(ConfigError, match=refused) if any(found) or rank else nullcontext():
            assembly._check_weights(config, None)
    assert [len(own) for own in found] == [0, 1, 0]


def test_weights_beside_a_tokenizer_are_not_compared(bench):
    """A run that borrows the tokenizer of a large model would read hundreds of gigabytes that it does not load."""
    other = shutil.copytree(bench.model, bench.folder / "other")
    write_sums(other)
    (other / "model.safetensors").write_bytes(b"other")
    config = from_values({"model_name_or_path": str(bench.model), "tokenizer_name_or_path": str(other)})
    assert changed_files(config, of_weights=True) == []
    (other / "tokenizer.json").write_text("{}")
    (problem,) = changed_files(config, of_weights=False)
    assert "tokenizer.json has changed" in problem


def test_a_teacher_that_learners_cannot_hold_is_named(bench, monkeypatch):
    """Its layers are cut as the policy's are, and its weights compared as the policy's when they load."""
    teacher = shutil.copytree(bench.model, bench.folder / "teacher")
    write_sums(teacher)
    named = {"model_name_or_path": str(bench.model), "teacher_model_name_or_path": [str(teacher)]}
    config = from_values(named | {"pipeline_model_parallel_size": 2})
    (teacher / "config.json").write_text(json.dumps(read_hf_config(teacher) | {"num_hidden_layers": 3}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    place = f"teacher_model_name_or_path={teacher}"
    said = f"{place}: pipeline_model_parallel_size=2 does not divide num_hidden_layers=3; choose from {{1, 3}}"
    assert teacher_problems(config, shape_of(read_hf_config(bench.model)))[0] == said
    (problem,) = changed_files(config, of_weights=False)
    assert problem.startswith(f"{place}: config.json has changed since it was written")
    (teacher / "model.safetensors").write_bytes(b"other")
    (problem,) = changed_files(config, of_weights=True)
    assert problem.startswith(f"{place}: model.safetensors has changed since it was written")
