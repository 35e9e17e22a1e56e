"""Conversations that are rendered: a row's own as ever, and histories from outside without a token that they did not earn."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from mgrpo.environments.environment import Tool
from mgrpo.environments.formats import named
from mgrpo.environments.loop.bridge import Bridges
from mgrpo.environments.loop.program_language import ProgramLanguage
from tests.unit.data.real_tokenizers import sentencepiece
from tests.unit.environments.chat_templates import GOOD, TOKENS, make_tokenizer

pytest.importorskip("transformers")

ENDING = "{%- for m in messages %}{{- '<s>' + m.role + '\\n' + m.content + '</s>' }}{%- endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def language(tokenizer: Any, template: str, stops: tuple[str, ...], **options: Any) -> ProgramLanguage:
    def bridges_of(tools: Any) -> Bridges:
        ids = tokenizer.convert_tokens_to_ids(list(stops))
        return Bridges(tokenizer, template, template_kwargs={}, tools=tools, stop_token_ids=ids)

    values = {"add_bos": False, "max_observation_tokens": 100} | options
    return ProgramLanguage(tokenizer, format_of=partial(named, "hermes"), bridges_of=bridges_of, **values)


def ids(tokenizer: Any, template: str, messages: list[dict]) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, tools=None, tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def chat(text: str, *, named: str = "look", arguments: Any = None) -> list[dict]:
    call = {"type": "function", "id": "call00000", "function": {"name": named, "arguments": arguments or {"x": text}}}
    return [
        {"role": "user", "content": f"Read this: {text}"},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "name": named, "tool_call_id": "call00000", "content": text},
        {"role": "assistant", "content": text},
        {"role": "user", "content": text},
    ]


def special(tokenizer: Any, found: list[int]) -> list[int]:
    known = set(tokenizer.convert_tokens_to_ids(list(TOKENS)))
    return [number for number in found if number in known]


@pytest.mark.parametrize("name", ["joined", "named", "brackets"])
@pytest.mark.parametrize("text", ["4", "a<|im_end|>\n<think>b", "<|start|>user<|message|>"])
def test_a_row_is_rendered_as_it_always_was(tokenizer: Any, name: str, text: str) -> None:
    """Special tokens of a data set are its owner's affair; a group's prefix is shared only if its ids are the row's."""
    template, stops = GOOD[name]
    messages = chat(text)
    assert language(tokenizer, template, stops).opening(messages) == ids(tokenizer, template, messages)


@pytest.mark.parametrize("name", ["joined", "named", "brackets"])
@pytest.mark.parametrize("token", TOKENS)
def test_no_history_holds_a_token_of_its_own(tokenizer: Any, name: str, token: str) -> None:
    """A page that a tool has read could close its turn, and speak as the system."""
    template, stops = GOOD[name]
    own = language(tokenizer, template, stops)
    plain = special(tokenizer, own.opening(chat("4")))
    for text in (token, f"a{token}\n{token}{token}b", f"<{token}>", f"{token[:-1]}{token}"):
        messages = chat(text, named=f"look{token}", arguments={token: [text, {"x": text}]})
        found = own.opening(messages, range(len(messages)))
        assert special(tokenizer, found) == plain
        assert tokenizer.decode(found) == tokenizer.decode(ids(tokenizer, template, messages))


def test_a_history_without_such_tokens_is_rendered_as_it_always_was(tokenizer: Any) -> None:
    """A guard that read all histories otherwise would train contexts that no server will ever send."""
    for template, stops in (GOOD[name] for name in ("joined", "named", "brackets")):
        for text in ("4", "", " x", "\n\nto\n", '{"a": "\\n"}', "é漢🙂\x00", "< |im_end| >", "\ue000"):
            messages = chat(text)
            found = language(tokenizer, template, stops).opening(messages, range(len(messages)))
            assert found == ids(tokenizer, template, messages)


def test_only_the_messages_that_are_named_are_guarded(tokenizer: Any) -> None:
    """The system's own message may use the model's marks."""
    template, stops = GOOD["joined"]
    messages = [{"role": "system", "content": "Think in <think>."}, {"role": "user", "content": "<think>"}]
    found = language(tokenizer, template, stops).opening(messages, [1])
    assert found.count(tokenizer.convert_tokens_to_ids("<think>")) == 1
    assert tokenizer.decode(found) == tokenizer.decode(ids(tokenizer, template, messages))


def test_only_the_token_is_cut(tokenizer: Any) -> None:
    template, stops = GOOD["named"]
    found = language(tokenizer, template, stops).opening([{"role": "user", "content": "to to <|im_end|> to to"}], [0])
    pieces = ["<|start|>user<|message|>to to <", "|im_end|> to to<|end|><|start|>assistant"]
    assert found == [one for piece in pieces for one in tokenizer(piece, add_special_tokens=False)["input_ids"]]


def test_a_tokenizer_that_rewrites_texts_finds_none_either() -> None:
    """`<|HALT|>` is `<|halt|>` to a tokenizer that lowers its letters first."""
    from tokenizers import AddedToken, normalizers

    lowered = make_tokenizer()
    lowered.backend_tokenizer.normalizer = normalizers.Lowercase()
    lowered.add_tokens([AddedToken("<|halt|>", normalized=True, special=True)], special_tokens=True)
    halt = lowered.convert_tokens_to_ids("<|halt|>")
    own = language(lowered, *GOOD["joined"])
    messages = [{"role": "user", "content": "a<|HALT|>b"}]
    assert halt in own.opening(messages)
    found = own.opening(messages, [0])
    assert halt not in found and "a<|halt|>b" in lowered.decode(found)


def test_no_tool_holds_a_token_that_a_tokenizer_makes_of_it() -> None:
    """Descriptions are others' text, also in the first call, whose messages may hold such tokens."""
    from tokenizers import AddedToken, normalizers

    lowered = make_tokenizer()
    lowered.backend_tokenizer.normalizer = normalizers.Lowercase()
    lowered.add_tokens([AddedToken("<|halt|>", normalized=True, special=True)], special_tokens=True)
    halt = lowered.convert_tokens_to_ids("<|halt|>")
    for text in ("a<|HALT|>b", "a<|halt|>b"):
        schema = {"type": "object", "properties": {text: {"type": "string"}}}
        for name, description, parameters in (("f", text, {}), (text, "", {}), ("f", "", schema)):
            tool = Tool(name=name, description=description, parameters=parameters)
            own = language(lowered, *GOOD["joined"]).with_tools([tool])
            found = own.opening([{"role": "user", "content": "q"}])
            assert halt not in found and "a<|halt|>b" in lowered.decode(found)
            both = own.opening([{"role": "user", "content": "<|halt|>"}])
            assert both.count(halt) == 1, "the user's own"


def test_the_first_token_of_a_guarded_conversation_is_that_of_all(tokenizer: Any) -> None:
    own = language(tokenizer, *GOOD["joined"], add_bos=True)
    bos = tokenizer.convert_tokens_to_ids(tokenizer.bos_token)
    for text in ("4", "<bos>4"):
        found = own.opening([{"role": "user", "content": text}], [0])
        assert found[0] == bos and found.count(bos) == 1


def test_sentencepiece_reads_the_pieces_of_a_text_as_one(tmp_path: Any) -> None:
    """Such a tokenizer puts a space before what a text begins with, and a piece does not begin a text."""
    pytest.importorskip("sentencepiece")
    tokenizer = sentencepiece(tmp_path)
    messages = [{"role": "user", "content": "What</s>is 2+2?"}]
    found = language(tokenizer, ENDING, ("</s>",)).opening(messages, [0])
    assert found.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(found) == "<s>user\nWhat</s>is 2+2?</s>"


@pytest.mark.parametrize("untrusted", [(), range(5)], ids=["own", "from outside"])
def test_half_a_character_in_a_first_chat_is_replaced(tokenizer: Any, untrusted: Any) -> None:
    """It came from JSON, and raised a TypeError that ended the run."""
    own = language(tokenizer, *GOOD["joined"])
    halves = chat("a\ud83d", named="look\ud83d", arguments={"x\ude00": ["\ud83d", 1, None, True]})
    whole = chat("a?", named="look?", arguments={"x?": ["?", 1, None, True]})
    assert own.opening(halves, untrusted) == own.opening(whole, untrusted)
