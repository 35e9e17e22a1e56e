"""Tools and environments in prompts: which schemas the template is given, and the text that an environment begins with."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from mgrpo.data.mixture import open_data
from mgrpo.data.prompt_set import PromptSet
from mgrpo.data.templates import render
from mgrpo.environments.offered.description import Description
from tests.unit.data.conftest import everything, make_tools, texts, user

TOOLS = make_tools("1", "22")
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }}+{% endfor %}{% endif %}"
    "{% for m in messages %}<u>{{ m['content'] }}{% endfor %}<a>"
)


@pytest.fixture
def encode(settings, tokenizer) -> Callable[..., PromptSet]:
    """Prompts of rows with tools, under a template that names them."""
    tokenizer.chat_template = TEMPLATE

    def make(*rows: dict[str, Any], tools: Description | None = TOOLS, **fields: Any) -> PromptSet:
        dataset = [{"ground_truth": 0, "dataset": "integer", **row} for row in rows]
        return open_data(settings(**fields), dataset=dataset)[0].encode(tokenizer, tools=tools)

    return make


def asked(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [user(text)], **columns}


def test_the_template_is_given_the_tools_that_a_row_asks_for(encode) -> None:
    """A model cannot call what it is not told of, and must not be told of what this row forbids."""
    rows = [asked("3"), asked("3", tools=["22"]), asked("3", tools=["22", "1"]), asked("3", tools=[])]
    assert texts(encode(*rows)) == ["1+22+<u>3<a>", "22+<u>3<a>", "1+22+<u>3<a>", "<u>3<a>"]
    # Without tools the column is like any other.
    assert texts(encode(*rows, asked("3", tools="x"), tools=None)) == ["<u>3<a>"] * 5


def test_rows_that_ask_for_unknown_tools_are_reported_together(encode) -> None:
    """Found when the row's turn comes, it would end a run after hours."""
    with pytest.raises(ValueError) as raised:
        encode(asked("3", tools=["1", "sum"]), asked("3", tools=["1"]), asked("3", tools="1"), asked("3", tools=[[]]))
    text = str(raised.value)
    assert text.startswith("3 of 4 rows cannot be made prompts:\n  dataset:1: the row names sum; the tools and ")
    assert "dataset:3: tools: '1' is not a list" in text and "dataset:4: tools: [[]] is not a list" in text


def test_a_template_without_a_place_for_tools_is_reported(encode, tokenizer, caplog) -> None:
    """It is the user who has to tell the model then."""
    with caplog.at_level(logging.WARNING):
        encode(asked("3"))
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        encode(asked("3"), tools=None)
        assert not caplog.text
        encode(asked("3"))
        encode({"prompt": "3"})
    assert [record.args for record in caplog.records] == [
        ("the chat template has no place for them",),
        ("there is no chat template",),
    ]


def test_tools_come_from_one_place(tokenizer) -> None:
    """Of two lists the model would be told of the one that cannot be called."""
    with pytest.raises(ValueError, match="chat_template_kwargs has tools, and the run has tools of its own"):
        render([user("3")], tokenizer, TEMPLATE, add_bos=False, kwargs={"tools": []}, tools=TOOLS.schemas({}))


OPENINGS = [
    ([user("1")], "2", "1+22+<u>12<a>"),
    (
        [user("1"), {"role": "assistant", "content": "3"}, user("4"), {"role": "tool", "content": "5"}],
        " 6",
        "1+22+<u>1<u>3<u>4 6<u>5<a>",
    ),
    ([{"role": "system", "content": "0"}], "7", "1+22+<u>0<u>7<a>"),
    ("1+", "2=", "1+2="),
]


@pytest.mark.parametrize(("prompt", "opening", "expected"), OPENINGS)
def test_an_environment_adds_to_the_last_message_of_the_user(encode, tokenizer, prompt, opening, expected) -> None:
    """The first observation is part of the question: in another place, it is not what the model is asked."""
    for key in ("prompt", "messages") if isinstance(prompt, list) else ("prompt",):
        prompts = encode({key: prompt, "level": 3})
        plain = prompts.prompt((5, 0))
        found = prompts.with_opening(plain, opening, tokenizer)
        assert found.text == expected and plain.text == prompts.prompt((5, 0)).text
        assert found.tokens.tolist() == tokenizer(found.text, add_special_tokens=False)["input_ids"]
        assert found.tokens.dtype == plain.tokens.dtype
        same = ("id", "verifiers", "ground_truths", "columns")
        assert all(getattr(found, name) == getattr(plain, name) for name in same)


def test_a_special_token_in_what_an_environment_begins_with_is_refused(encode, tokenizer) -> None:
    """An environment elsewhere could end the user's turn, and speak as the system."""
    prompts = encode({"prompt": [user("1")], "level": 3})
    with pytest.raises(ValueError, match=r"begins with .'2<eos>3'. holds the special token '<eos>'"):
        prompts.with_opening(prompts.prompt((5, 0)), "2<eos>3", tokenizer)


REWORDED = [
    ("1+22+<u>918<a>", "1+22+<u>9128<a>"),
    ("1+22+<u>1<u>3<u>948<u>5<a>", "1+22+<u>1<u>3<u>94 68<u>5<a>"),
    ("1+22+<u>0<u>98<a>", "1+22+<u>0<u>978<a>"),
    ("91+8", "91+2=8"),
]


@pytest.mark.parametrize(
    ("prompt", "opening", "expected"), [(*of[:2], found) for of, found in zip(OPENINGS, REWORDED, strict=True)]
)
def test_a_teachers_question_takes_the_place_of_the_policys(encode, tokenizer, prompt, opening, expected) -> None:
    """Around it stands what the policy read, with tools, system message and what an environment has added."""
    prompts = encode({"messages" if isinstance(prompt, list) else "prompt": prompt})
    plain = prompts.prompt((5, 0))
    opened = prompts.with_opening(plain, opening, tokenizer)
    found = [prompts.reworded(own, lambda question: f"9{question}8", tokenizer) for own in (plain, opened)]
    assert [tokenizer.decode(tokens) for tokens in found] == list(expected) and found[0].dtype == plain.tokens.dtype


def test_programs_are_told_the_messages_that_the_template_is_given(encode, tokenizer) -> None:
    """Reward functions get the text of such a row; a chat with that would write the template twice."""
    own, text = encode({"messages": [user("1")]}), encode({"prompt": "1"})
    assert own.asked(everything(own)[0]) == [user("1")] and text.asked(everything(text)[0]) == "1"


def test_judges_and_reward_functions_see_what_an_environment_adds(encode, tokenizer) -> None:
    """They judge the answer to what was asked."""
    own, other = encode(asked("1"), {"messages": [user("1")]}), encode({"messages": [user("1")]})
    found = [prompts.with_opening(everything(prompts)[0], "2", tokenizer) for prompts in (own, other)]
    assert [prompt.query for prompt in found] == ["user: 12"] * 2
    assert [prompt.source for prompt in found] == [(user("12"),), "1+22+<u>12<a>"]


def test_an_environment_without_a_text_leaves_the_prompt(encode, tokenizer) -> None:
    """Most have none."""
    prompts = encode(asked("1"))
    prompt = everything(prompts)[0]
    assert prompts.with_opening(prompt, "", tokenizer) is prompt


def test_the_row_decides_the_tools_of_a_prompt_with_an_opening(encode, tokenizer) -> None:
    """Rendering again must not bring back what the row left out."""
    prompts = encode(asked("1", tools=["22"]))
    assert prompts.with_opening(everything(prompts)[0], "2", tokenizer).text == "22+<u>12<a>"


@pytest.mark.parametrize("policy", ["filter", "error", "truncate_left"])
def test_a_prompt_that_an_environment_makes_too_long(encode, tokenizer, policy: str) -> None:
    """The engine refuses what is over the limit, and would end the run."""
    prompts = encode({"prompt": "1+2"}, max_prompt_token_length=4, overlong_prompt_policy=policy)
    prompt = everything(prompts)[0]
    assert prompts.with_opening(prompt, "=", tokenizer).text == "1+2="
    if policy == "truncate_left":
        assert prompts.with_opening(prompt, "33", tokenizer).text == "+233"
        assert len(prompts.with_opening(prompt, "33", tokenizer).tokens) == 4
    else:
        with pytest.raises(ValueError, match=r"5 tokens .* more than max_prompt_token_length=4; .* \('33'\)"):
            prompts.with_opening(prompt, "33", tokenizer)
