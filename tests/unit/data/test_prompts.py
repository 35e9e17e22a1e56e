"""Tokens of prompts, text of completions, and the tokens that end them, with a tokenizer small enough to check by eye."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mgrpo.data.mixing import Row, parse_rows
from mgrpo.data.prompts import decode, encode, load_tokenizer, stop_token_ids

CHARS = "0123456789+=?\n "
TEMPLATE = "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with a tokenizer of single characters; ids: the place in CHARS, then <eos>, <u>, <a>, <bos>."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {char: index for index, char in enumerate(CHARS)}
    for special in ("<eos>", "<u>", "<a>", "<bos>"):
        vocabulary[special] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(""), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<u>", "<a>"],
        chat_template=TEMPLATE,
    )
    path = tmp_path_factory.mktemp("model")
    fast.save_pretrained(path)
    return path


@pytest.fixture
def tokenizer(folder: Path) -> object:
    return load_tokenizer(folder)


def _rows(*prompts: object) -> list[Row]:
    return parse_rows(
        [{"prompt": prompt, "ground_truth": index, "dataset": "integer"} for index, prompt in enumerate(prompts)],
        source="memory",
    )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _encode(rows: list[Row], tokenizer: object, limit: int = 100, template: str = "auto"):
    return encode(rows, tokenizer, max_prompt_token_length=limit, chat_template_name=template)


def test_text_prompts_are_encoded_as_they_are(tokenizer: object) -> None:
    """A bos token that the base model never saw there, or a template around it, changes the task."""
    prompts = _encode(_rows("1+2="), tokenizer)
    assert tokenizer("1")["input_ids"][0] == tokenizer.bos_token_id
    prompt = prompts.prompt((4, 0))
    assert prompt.tokens.tolist() == [1, 10, 2, 11] and prompt.tokens.dtype == np.int32
    assert (prompt.id, prompt.text, prompt.verifiers, prompt.ground_truths) == ((4, 0), "1+2=", ("integer",), (0,))


def test_messages_go_through_the_template_up_to_the_answer(tokenizer: object) -> None:
    """A prompt that holds the answer is solved before it is asked; one without the opening of the turn is not answered."""
    answer = {"role": "assistant", "content": "3"}
    prompts = _encode(_rows([_user("1+2="), answer], [_user("1"), answer, _user("2")], [answer]), tokenizer)
    assert prompts.texts == ("<u>1+2=<a>", "<u>1<u>3<u>2<a>", "<u>3<a>")
    user, opening = tokenizer.convert_tokens_to_ids(["<u>", "<a>"])
    assert prompts.tokens[0].tolist() == [user, 1, 10, 2, 11, opening]


def test_without_template_contents_are_joined(tokenizer: object) -> None:
    """chat_template_name none is for base models."""
    rows = _rows([_user("1"), _user("2"), {"role": "assistant", "content": "3"}])
    assert _encode(rows, tokenizer, template="none").texts == ("1\n2",)


def test_messages_need_a_template(tokenizer: object) -> None:
    """A silent fallback to some other format costs accuracy that nobody can explain."""
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"memory:2 has messages, .* no chat template; pass chat_template_name none"):
        _encode(_rows("1", [_user("1")]), tokenizer)
    assert len(_encode(_rows("1"), tokenizer)) == 1
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"memory:1: .*roles must alternate"):
        _encode(_rows([_user("1")]), tokenizer)


def test_longer_prompts_are_left_out_and_counted(tokenizer: object) -> None:
    """Cut prompts ask other questions, and labels must stay with their own."""
    prompts = _encode(_rows("1+2=", "1", "1+22=", "2"), tokenizer, limit=4)
    assert prompts.num_left_out == 1 and len(prompts) == 3
    assert [prompts.prompt((0, index)).ground_truths[0] for index in range(3)] == [0, 1, 3]
    with pytest.raises(ValueError, match="none of 2 prompts fits max_prompt_token_length=3; the shortest has 4"):
        _encode(_rows("1+2=", "1+22="), tokenizer, limit=3)


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizer: object) -> None:
    """Models have padded vocabularies; a decoder that raises ends the run on the first odd sample."""
    ids = [
        np.array([1, 5000, 2, tokenizer.eos_token_id], np.int32),
        np.array([-1, 2**31 - 1], np.int32),
        np.array([], np.int32),
        np.array([2**40, 3], np.int64),
    ]
    assert decode(tokenizer, ids) == ["12", "", "", "3"]


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
    """Chat models end turns with a token that is not the tokenizer's eos; missing it, no completion ever stops."""
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids(tmp_path, tokenizer) == expected


def test_a_model_without_a_stop_token_is_refused(tmp_path: Path, tokenizer: object) -> None:
    """Every completion would run into the length limit."""
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="nothing says which token ends a completion"):
        stop_token_ids(tmp_path, tokenizer)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match="expected a token id"):
        stop_token_ids(tmp_path, tokenizer)


def test_a_missing_tokenizer_names_the_folder(tmp_path: Path) -> None:
    """The commonest first mistake: the wrong path."""
    with pytest.raises(ValueError, match="absent does not exist"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"no tokenizer could be loaded from {tmp_path}, which holds config.json"):
        load_tokenizer(tmp_path)
