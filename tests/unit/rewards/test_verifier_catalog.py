"""Verifiers of the user's own modules: what is refused with a sentence, and where worker processes find them."""

from __future__ import annotations

import itertools
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from mgrpo.rewards import registry
from mgrpo.rewards.registry import add_modules, find, known_verifiers, module_folders

VERIFIER = """
from mgrpo.rewards.verifier import Answer, RemoteVerifier, Verifier


class {cls}(Verifier):
    {body}

    def score(self, answer: Answer) -> float:
        return 1.0
"""
_numbers = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of the user's; returns its name, which no other test has used."""
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"users_verifiers_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def verifier(cls: str = "Mine", body: str = 'name = "mine"') -> str:
    return VERIFIER.format(cls=cls, body=body)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("from os import no_such_name", "ImportError: cannot import name 'no_such_name'"),
        ("x = 1", "defines no subclass of mgrpo.rewards.verifier.Verifier"),
        (verifier(body="pass"), "the verifier Mine has no name"),
        (verifier(body="name = 5"), "the verifier Mine has the name 5"),
        (verifier(body="name = ''"), "the verifier Mine has the name ''"),
        (verifier(body="name = property(lambda self: 'mine')"), "the verifier Mine has the name <property"),
        (verifier(body="name = 'Math'"), "defines math, which exists already"),
        (verifier() + verifier("Other", "name = 'MINE'"), "Mine and Other are both called mine"),
        (verifier() + "class Other(Mine): pass", "Mine and Other are both called mine"),
    ],
)
def test_a_module_that_cannot_serve_is_one_sentence(module, text, cause):
    """A traceback shows the user our import machinery in place of the line to mend."""
    name = module(text)
    with pytest.raises(ValueError) as refusal:
        add_modules([name])
    sentence = str(refusal.value)
    assert sentence.startswith(f"verifier_modules: {name}") and cause in sentence


@pytest.mark.parametrize("name", ["", ".relative", "my.py", "a b"])
def test_what_is_no_name_of_a_module_is_refused(name):
    """importlib answers a relative name with a TypeError."""
    with pytest.raises(ValueError, match="verifier_modules"):
        add_modules([name])


def test_two_modules_may_not_share_a_name(module):
    """The later one would score the rows of the earlier."""
    first, second, third = module(verifier()), module(verifier()), module(verifier(body="name = 'third'"))
    with pytest.raises(ValueError, match=f"{second} and {first} both define mine"):
        add_modules([third, first, second])
    assert "third" not in known_verifiers()
    add_modules([first])
    with pytest.raises(ValueError, match=f"{second} and {first} both define mine"):
        add_modules([second])


def test_a_module_may_be_added_again(module):
    """Every scorer of a process adds its own; a notebook reloads what was edited."""
    name = module(verifier() + "Alias = Mine\n")
    add_modules([name, name])
    add_modules([name])
    del sys.modules[name]
    add_modules([name])
    assert find("Mine") is sys.modules[name].Mine


def test_the_folders_of_modules_are_what_another_process_needs(module, tmp_path):
    """Workers know neither the folder of a script nor that of a notebook."""
    inner = tmp_path / "with_init" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (inner / "deep.py").write_text(verifier("Deep", "name = 'deep'"))
    (tmp_path / "without_init").mkdir()
    (tmp_path / "without_init" / "plain.py").write_text(verifier("Plain", "name = 'plain'"))
    for name in (module(verifier()), "with_init.inner.deep", "without_init.plain"):
        assert module_folders([name]) == [str(tmp_path)]
        code = f"import {name}"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*module_folders([name]), *sys.path])}
        subprocess.run([sys.executable, "-c", code], env=environment, cwd="/", check=True, timeout=100)
    assert module_folders([module(verifier()), "with_init.inner.deep"]) == [str(tmp_path)]


def test_what_every_process_finds_needs_no_folder():
    """On PYTHONPATH, installed packages would come before the standard library."""
    assert module_folders(["sys", "builtins"]) == []
    assert Path(pytest.__file__).parents[1] in map(Path, site.getsitepackages())
    assert module_folders(["pytest"]) == []
