"""Tokenizers: loading, what they are known by, text of completions, and the tokens that end them."""

from __future__ import annotations

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgrpo.data.tokenizer import (
    decode,
    fingerprint,
    load_tokenizer,
    stop_token_ids,
    text_of_all_tokens,
    token_ids,
)
from tests.unit.data.conftest import CHARS, make_tokenizer

PARTS = [*CHARS, "<u>", "<eos>", "<", "é", "日", "\x00"]


@pytest.fixture(scope="module")
def quick_tokenizers(folder: Path) -> dict[str, object]:
    """One of characters, and a byte-level BPE."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<u>", "<pad>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["12+12=24 ?é日"] * 9, trainer)
    bytewise = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")
    characters = load_tokenizer(folder)
    characters.pad_token = "<eos>"
    return {"characters": characters, "bytes": bytewise}


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizer: object) -> None:
    """Models have padded vocabularies; a decoder that raises ends the run on the first odd sample."""
    ids = [
        np.array([1, 5000, 2, tokenizer.eos_token_id], np.int32),
        np.array([-1, 2**31 - 1], np.int32),
        np.array([], np.int32),
        np.array([2**40, 3], np.int64),
    ]
    assert decode(tokenizer, ids) == ["12", "", "", "3"]


@given(data=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_decoded_at_once_are_those_decoded_one_by_one(quick_tokenizers: dict, data: st.DataObject) -> None:
    """A verifier must judge the text that transformers gives a user for the same tokens."""
    ids = st.lists(st.lists(st.integers(0, 320), max_size=8), max_size=4)
    for tokenizer in quick_tokenizers.values():
        given_ids = data.draw(ids)
        expected = [
            tokenizer.decode(one, skip_special_tokens=True, clean_up_tokenization_spaces=False) for one in given_ids
        ]
        assert decode(tokenizer, [np.array(one, np.int32) for one in given_ids]) == expected


def test_completions_are_not_decoded_one_by_one(quick_tokenizers: dict) -> None:
    """Rank 0 decodes millions of tokens a step, while its other threads launch the learner's kernels."""
    tokenizer = copy.copy(quick_tokenizers["characters"])
    texts = decode(tokenizer, ids := [np.array([1, 2], np.int32), np.array([3], np.int32)])
    tokenizer.decode = None
    assert decode(tokenizer, ids) == texts == ["12", "3"]


def test_decoding_does_not_tidy_the_text(tokenizer: object) -> None:
    """Verifiers judge what the model wrote: a removed space can make an answer right."""
    assert decode(tokenizer, [np.array([1, 14, 12], np.int32)]) == ["1 ?"]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, [7]),
        ({"eos_token_id": [7, 9, 7]}, {}, [7, 9]),
        ({"eos_token_id": 0}, {"eos_token_id": 8}, [0]),
        ({}, {"eos_token_id": 8}, [8]),
        ({"eos_token_id": None}, {"eos_token_id": [8]}, [8]),
        (None, None, [15]),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(
    tmp_path: Path, tokenizer: object, generation: dict | None, config: dict | None, expected: list[int]
) -> None:
    """A chat model ends its turn with another token than its pretraining documents."""
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids(tmp_path, tokenizer) == expected


def test_a_model_without_an_end_is_refused(tmp_path: Path, tokenizer: object) -> None:
    """Every completion would run to the limit."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match="has eos_token_id='</s>'; expected a token id"):
        stop_token_ids(tmp_path, tokenizer)
    (tmp_path / "generation_config.json").unlink()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"add eos_token_id to generation_config\.json"):
        stop_token_ids(tmp_path, tokenizer)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    """transformers would look for it on the network."""
    with pytest.raises(ValueError, match=r"tokenizer folder .* does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"no tokenizer could be loaded from {tmp_path}, which holds config.json"):
        load_tokenizer(tmp_path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.lists(st.sampled_from(PARTS), max_size=20).map("".join), max_size=5))
@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_token_ids_are_those_of_the_tokenizer(quick_tokenizers: dict, kind: str, texts: list[str]) -> None:
    """The short way to the ids may leave out what is not used, and nothing else."""
    tokenizer = quick_tokenizers[kind]
    for tokenizer.split_special_tokens in (False, True):
        expected = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        assert token_ids(tokenizer, texts) == expected
        tokenizer(["1"], padding="max_length", max_length=9, truncation=True)
        assert token_ids(tokenizer, texts) == expected
        with ThreadPoolExecutor(3) as threads:
            assert token_ids(tokenizer, texts * 3, threads=threads, num_threads=3) == expected * 3


def test_a_tokenizer_of_its_own_kind_is_asked_itself(tokenizer: object) -> None:
    """Some prepare the text in Python first; their backend alone would give other tokens."""

    class Shouting(type(tokenizer)):
        def __call__(self, texts: list[str], **options: object) -> object:
            return super().__call__([text + "!" for text in texts], **options)

    plain = token_ids(tokenizer, ["1"])
    tokenizer.__class__ = Shouting
    assert len(token_ids(tokenizer, ["1"])[0]) == len(plain[0]) + 1


def test_the_fingerprint_is_of_the_content(tmp_path: Path, folder: Path) -> None:
    """Prepared prompts are found by it: a use that changes it makes them anew, a change it misses makes them wrong."""
    tokenizer = load_tokenizer(folder)
    first = fingerprint(tokenizer)
    tokenizer(["1", "1+1"], padding=True, truncation=True, max_length=2) if tokenizer.pad_token else None
    tokenizer(["1+1"], truncation=True, max_length=2)
    assert fingerprint(tokenizer) == first
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert fingerprint(load_tokenizer(copy)) == first
    others = [
        make_tokenizer(tmp_path / "chars", chars=CHARS[::-1]),
        make_tokenizer(tmp_path / "eos", eos="<end>"),
    ]
    edited = json.loads((copy / "tokenizer.json").read_text())
    edited["normalizer"] = {"type": "Lowercase"}
    (copy / "tokenizer.json").write_text(json.dumps(edited))
    found = {fingerprint(load_tokenizer(path)) for path in (*others, copy)}
    assert len(found) == 3 and first not in found


@pytest.mark.parametrize("name", ["characters", "bytes"])
def test_a_text_of_all_tokens_has_those_that_a_text_can_hold(quick_tokenizers: dict, name: str) -> None:
    """Two tokenizers that read it alike read everything alike: one more or one less, or two that are exchanged, would show."""
    tokenizer = quick_tokenizers[name]
    text, tokens = text_of_all_tokens(tokenizer)
    assert tokens == tokenizer(text, add_special_tokens=False)["input_ids"]
    alone = [tokenizer.decode([number], skip_special_tokens=True) for number in range(len(tokenizer))]
    again = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in alone]
    whole = {number for number, (one, ids) in enumerate(zip(alone, again, strict=True)) if one and ids == [number]}
    assert len(whole) > 10 and whole <= set(tokens)


def test_code_that_lies_in_the_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks on the terminal, and a "y" runs whatever the folder's author wrote."""
    marker = tmp_path / "was_run"
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as Own\n"
    (tmp_path / "own.py").write_text(code)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}})
    )
    monkeypatch.setattr("builtins.input", lambda question: "y")
    with pytest.raises(ValueError, match="no tokenizer could be loaded from"):
        load_tokenizer(tmp_path)
    assert not marker.exists()


KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
    },
    "model_type": "kimi_k2",
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize("config", [KIMI, {"model_type": "of_tomorrow", "rope_scaling": {"rope_type": "new"}}, {}])
def test_a_tokenizer_does_not_depend_on_the_model_beside_it(tmp_path: Path, folder: Path, config: dict) -> None:
    """Kimi-K2's config.json as published: transformers does not know the type, and failed at its RoPE."""
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    expected = token_ids(load_tokenizer(folder), ["1+2="])
    (copied / "config.json").write_text(json.dumps(config))
    assert token_ids(load_tokenizer(copied), ["1+2="]) == expected


def test_a_tokenizer_of_code_is_refused_with_the_cure(tmp_path: Path, folder: Path) -> None:
    """Kimi-K2's own: a tokenizer.json from elsewhere beside its tokenizer_config.json is not enough."""
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copied / "config.json").write_text(json.dumps(KIMI))
    settings_file = copied / "tokenizer_config.json"
    code = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | code))
    with pytest.raises(
        ValueError, match=r"Python code that comes with the model .auto_map., which is never run; give a tokenizer.json"
    ):
        load_tokenizer(copied)
