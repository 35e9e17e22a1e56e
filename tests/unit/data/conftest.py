"""A tokenizer small enough to check by eye, and data in a cache of the test's own."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mgrpo.config.schema import Data
from mgrpo.data.prompt_set import PromptSet
from mgrpo.environments.environment import Tool
from mgrpo.environments.offered.description import Description, Offer
from mgrpo.types import Prompt
from tests.unit.data.real_tokenizers import REAL

CHARS = "0123456789+=?\n "
TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def make_tokenizer(folder: Path, *, template: str = TEMPLATE, chars: str = CHARS, eos: str = "<eos>") -> Path:
    """A checkpoint folder with a tokenizer of single characters; ids: the place in CHARS, then <eos>, <u>, <a>, <bos>."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {char: index for index, char in enumerate(chars)}
    for special in (eos, "<u>", "<a>", "<bos>"):
        vocabulary[special] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(""), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token=eos,
        additional_special_tokens=["<u>", "<a>"],
        chat_template=template,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tokenizer."""
    return make_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    """The tokenizer, loaded anew: a test may change it."""
    from mgrpo.data.tokenizer import load_tokenizer

    return load_tokenizer(folder)


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Data]:
    """Makes the configuration of data from a list of sources and amounts, with a cache in the test's folder."""

    def make(*mix: object, **fields: Any) -> Data:
        options = {"max_prompt_token_length": 100, "dataset_local_cache_dir": str(tmp_path / "cache")}
        return Data(dataset_mixer_list=tuple(map(str, mix)), **(options | fields))

    return make


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of every source is kept in the cache."""
    monkeypatch.setattr("mgrpo.data.sources._KEPT_BYTES", 0)
    monkeypatch.setattr("mgrpo.data.sources._KEPT_ROWS", 0)


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest) -> str:
    """Whether the check of every source is kept in the cache."""
    if request.param == "large":
        request.getfixturevalue("all_are_large")
    return request.param


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a JSONL file of the test's folder."""

    def make(name: str, rows: Sequence[object]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return make


def sums(num_rows: int, verifier: str = "integer") -> list[dict[str, Any]]:
    """Rows whose label is their number."""
    return [{"prompt": f"{index}+0=", "ground_truth": index, "dataset": verifier} for index in range(num_rows)]


def user(text: str) -> dict[str, str]:
    """A message."""
    return {"role": "user", "content": text}


def make_tools(*names: str, description: str = "?") -> Description:
    """Tools, each an environment of its own."""
    return Description(
        offers=tuple(
            Offer(
                name=name,
                entry=name,
                tools=(Tool(name=name, description=description, parameters={"type": "object"}),),
                is_repeatable=True,
                gives_reward=False,
                is_alternative=False,
            )
            for name in names
        )
    )


def everything(prompts: PromptSet) -> list[Prompt]:
    """The prompts of the first pass."""
    return [prompts.prompt((0, index)) for index in range(len(prompts))]


def texts(prompts: PromptSet) -> list[str]:
    """Their texts."""
    return [prompt.text for prompt in everything(prompts)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Makes a tokenizer of REAL, once; skips where its package is not installed."""

    @functools.cache
    def make(name: str) -> Any:
        function, package, modules = REAL[name]
        if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
            pytest.skip(f"the {name} tokenizer of {package} takes {', '.join(missing)}, not installed")
        return function(tmp_path_factory.mktemp(name)) if name == "sentencepiece" else function()

    return make
