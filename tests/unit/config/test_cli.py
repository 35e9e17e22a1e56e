"""The command line around the configuration: --show_config and `mgrpo env`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from mgrpo import cli
from mgrpo.moving import load_file


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_show_config_prints_what_would_run_and_stops(tmp_path, capsys):
    """The way to find out what a pile of flags means without starting engines."""
    (tmp_path / "config.json").write_text("{}")
    argv = f"train --model_name_or_path {tmp_path} --preset seed --epsilon 0.3 --show_config --beta 0.0".split()
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "temperature: 0.7  # preset seed\n" in text
    assert "clip_lower: 0.3  # alias epsilon (flag)\n" in text
    assert "# epsilon -> clip_lower (0.3), clip_higher (0.3)\n" in text
    assert "# num_training_steps: 1562\n" in text
    shown = tmp_path / "shown.yaml"
    shown.write_text(text)
    assert load_file(shown).loss.clip_higher == 0.3


def test_show_config_reports_what_is_refused(capsys):
    """Showing values next to flags that cannot be had would look like consent."""
    assert cli.train_command(["--show_config", "--use_dora"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "use_dora=true is refused" in captured.err


def test_rank_0_speaks_first(monkeypatch, capsys):
    """The same text from 96 ranks hides itself: the others wait for torchrun to end them, and say who they are if it does not."""
    monkeypatch.setenv("RANK", "1")
    waited = []
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    assert cli.train_command(["--show_config"]) == 0
    assert capsys.readouterr() == ("", "") and not waited
    assert cli.train_command(["--no_such_flag"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("mgrpo: rank 1: ")
    assert waited == [cli.RANK_0_FIRST_S]


def test_the_help_of_mgrpo_names_its_commands(capsys):
    """The first thing a newcomer types."""
    assert cli.main([]) == cli.main(["--help"]) == 0
    assert cli.main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("mgrpo train") == captured.out.count("mgrpo env") == 2
    assert captured.err == "mgrpo: unknown command 'trian'; did you mean train? `mgrpo --help` explains each\n"


def test_env_lists_versions_and_finds_nothing_missing():
    """The first question of every bug report."""
    done = subprocess.run([sys.executable, "-m", "mgrpo.cli", "env"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    for name in ("python 3", "torch 2", "megatron-core 0", "ray 2", "transformers 5", "extension compiled", "GPU"):
        assert f"\n{name}" in done.stdout


def test_env_works_where_nothing_is_installed(monkeypatch):
    """A report that needs what it reports on says nothing when it is needed."""

    def version(name):
        raise PackageNotFoundError(name)

    def import_module(name):
        raise ImportError("no torch")

    monkeypatch.setattr(cli, "version", version)
    monkeypatch.setattr(cli.importlib, "import_module", import_module)
    monkeypatch.setenv("PATH", "")
    text = "\n".join(cli.environment())
    assert "torch not installed\n" in text
    assert "datasets not installed (optional)" in text
    assert "extension cannot be loaded: no torch" in text
    assert "GPU none" in text
    assert "missing: torch, megatron-core, vllm, ray, transformers, safetensors, math-verify; install" in text
    assert "requirements/install.sh" in text and "pip install --no-build-isolation -e ." in text


def test_short_commands_have_help_and_take_nothing_else(capsys):
    """`mgrpo env --help` must not be an unknown command."""
    assert cli.main(["env", "--help"]) == cli.main(["completion", "-h"]) == 0
    assert "usage: mgrpo env" in capsys.readouterr().out
    assert cli.main(["env", "all"]) == 2
    assert "mgrpo env: takes no arguments, got 'all'" in capsys.readouterr().err


def test_the_version_and_the_module_are_the_command(capsys):
    """Every report of a fault begins with the version."""
    assert cli.main(["--version"]) == 0
    words = capsys.readouterr().out
    done = subprocess.run([sys.executable, "-m", "mgrpo", "-V"], capture_output=True, text=True, check=True)
    assert done.stdout == words == f"mgrpo {cli.__version__}\n"


def test_the_shell_completes_commands_and_settings(capsys):
    """172 settings are not typed from memory."""
    cli.main(["completion"])
    function = capsys.readouterr().out
    for line, found in (("mgrpo pl", "plan"), ("mgrpo train --learning_r", "--learning_rate")):
        words = " ".join(line.split())
        asked = f"COMP_WORDS=({words}); COMP_CWORD={len(line.split()) - 1}; _mgrpo; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", function + asked], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [found]


def test_switches_may_have_dashes(tmp_path, capsys):
    """As every other flag."""
    assert cli.train_command(["--show-config", "--model-name-or-path", str(tmp_path)]) == 0
    assert f"model_name_or_path: {tmp_path}" in capsys.readouterr().out
