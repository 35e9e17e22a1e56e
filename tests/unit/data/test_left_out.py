"""Messages that a chat template leaves out of the prompt, and answers that it writes into it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgrpo.data.mixture import open_data
from mgrpo.data.prompt_set import PromptSet
from tests.unit.data.conftest import texts, user

ANY_ROLE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
KNOWN_ROLES = (
    "{% for m in messages if m.role in ('system', 'user', 'assistant') %}<u>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
QWEN3 = """
{%- if tools %}<u># Tools{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "system") %}
        {{- '<u>' + message.role + '\n' + content }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<a>' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {{- '<u><tool_response>' + (content | tojson) + '</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<a>{% endif %}
"""
"""In the form of Qwen3's, with results of tools as JSON."""
SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}
NAMES = "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}" + KNOWN_ROLES


def say(role: str, content: str, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def calling(name: str, **arguments: object) -> list[dict[str, Any]]:
    return [{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}]


@pytest.fixture
def encode(settings, tokenizer) -> Callable[..., PromptSet]:
    """Prompts of conversations under a template."""

    def make(template: str, *conversations: Any, **fields: Any) -> PromptSet:
        tokenizer.chat_template = template
        rows = [each if isinstance(each, dict) else {"messages": each} for each in conversations]
        dataset = [{"ground_truth": 0, "dataset": "integer", **row} for row in rows]
        return open_data(settings(**{"max_prompt_token_length": 1000, **fields}), dataset=dataset)[0].encode(tokenizer)

    return make


@pytest.mark.parametrize(
    "messages",
    [
        [say("developer", "4+18=")],
        [say("system", "0"), say("developer", "4+18=")],
        [user("1"), say("assistant", "2"), say("function", "3")],
        # It stands in the text by chance.
        [user("13"), say("assistant", "2"), say("tool", "3")],
        [say("developer", "4+18="), say("assistant", "22")],
    ],
)
def test_a_question_that_the_template_leaves_out_is_an_error(encode, messages: list) -> None:
    """Ten questions become ten equal prompts without any, the reward stays 0, and the model is blamed."""
    role = [message["role"] for message in messages if message["role"] != "assistant"][-1]
    with pytest.raises(ValueError) as raised:
        encode(KNOWN_ROLES, [user("1")], messages, messages)
    assert str(raised.value) == (
        "2 of 3 rows cannot be made prompts:\n"
        f"  dataset:2: the chat template (auto) leaves out the last message, whose role is {role!r}: its text is not in the prompt; "
        "give it a role that the template writes ('user' for a question), or take another template: chat_template_name "
        "(1 more such row: 3)"
    )


def test_the_question_before_a_last_system_message_counts_as_well(encode) -> None:
    """The hint behind a question is not what is asked."""
    with pytest.raises(ValueError, match="leaves out the last message before the system's, whose role is 'developer'"):
        encode(KNOWN_ROLES, [say("developer", "4+18="), say("system", "0")])


def test_the_template_is_named(encode) -> None:
    """It is the template that has to be changed, or the role for it."""
    with pytest.raises(ValueError, match=r"the chat template \(olmo\) leaves out the last message, whose role is 'dev"):
        encode(KNOWN_ROLES, [say("developer", "4+18=")], chat_template_name="olmo")


def test_a_template_that_takes_parts_for_contents_leaves_out_all_text(encode) -> None:
    """Templates of vision models iterate over parts, and find none in a string."""
    parts = "{% for m in messages %}<u>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}<a>"
    with pytest.raises(ValueError, match="whose role is 'user': its text is not in the prompt; take another template"):
        encode(parts, [user("1+1=")])


@pytest.mark.parametrize("role", ["chatgpt", "model", "bot", "Assistant", "developer", "User", "environment", ""])
@pytest.mark.parametrize("template", ["auto", "none"])
def test_a_last_message_of_no_asking_role_is_an_error(encode, role: str, template: str) -> None:
    """A template that writes any role writes the answer into the prompt, and the reward rises by copying it."""
    with pytest.raises(ValueError) as raised:
        encode(ANY_ROLE, [user("4+18="), say(role, "22")], chat_template_name=template)
    assert f"dataset:1: the last message of the prompt has the role {role!r}, expected user, tool or system" in str(
        raised.value
    )


@pytest.mark.parametrize(
    "messages", [[say("assistant", "2")], [user("1"), say("assistant", "2"), say("assistant", "3")]]
)
def test_of_answers_only_one_behind_a_question_is_left_out(encode, messages: list) -> None:
    """The other would be read in the prompt."""
    with pytest.raises(ValueError, match="the last message of the prompt has the role 'assistant'"):
        encode(ANY_ROLE, messages)


def test_messages_before_the_question_that_are_left_out_are_noted(encode, caplog, tmp_path: Path) -> None:
    """Also by a run that finds the prompts in the cache."""
    with_system = [say("developer", "1"), user("2")]
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            prompts = encode(KNOWN_ROLES, [user("2+2")], with_system, [say("developer", "3"), user("4")])
        assert texts(prompts) == ["<u>2+2<a>", "<u>2<a>", "<u>4<a>"]
        assert [record.getMessage() for record in caplog.records] == [
            "the chat template (auto) leaves out text of 2 rows of dataset, first in dataset:2: developer"
        ]
        caplog.clear()
    (tmp_path / "system.txt").write_text("7")
    dropping = "{% for m in messages if m.role == 'user' %}<u>{{ m.content }}{% endfor %}<a>"
    with caplog.at_level(logging.WARNING):
        encode(dropping, [user("2")], system_prompt_override_file=str(tmp_path / "system.txt"))
    assert "leaves out text of 1 rows of dataset, first in dataset:1: system" in caplog.text


def test_answers_that_are_left_out_of_prompts_are_counted(encode, caplog) -> None:
    """One that was meant as the beginning of the answer is gone, and the rows look as before."""
    rows = [[user("1")], [user("2"), say("assistant", "Let me think. ")], [user("2"), say("assistant", "4")]]
    written = [{"prompt": json.dumps([*rows[0], say("assistant", "5")])}, {"prompt": "<u>2<a>"}]
    for template in ("auto", "none"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            encode(KNOWN_ROLES, *rows, *written, chat_template_name=template)
        assert [record.getMessage() for record in caplog.records] == [
            "3 rows of dataset, first dataset:2, end with a message of the assistant, which is left out of the prompt: the model "
            "answers in its place"
        ]


@pytest.mark.parametrize(
    ("template", "role", "is_noted"),
    [
        (ANY_ROLE, "chatgpt", True),
        (ANY_ROLE, "Assistant", True),
        (ANY_ROLE, " user", True),
        (ANY_ROLE, "bot 100% {sure}", True),
        (ANY_ROLE, "developer", False),
        (ANY_ROLE, "tool", False),
        ('{% if "critic" %}' + ANY_ROLE + "{% endif %}", "critic", False),
        # An environment's turns are one of olmo's rules.
        ("olmo", "environment", False),
        # No template here writes roles.
        ("{% for m in messages %}<u>{{ m.content }}{% endfor %}<a>", "chatgpt", False),
        ("none", "chatgpt", False),
    ],
)
def test_roles_that_a_template_writes_without_naming_them_are_noted(encode, caplog, template, role, is_noted) -> None:
    """The model has not been trained on such turns."""
    rows = [[user("1")], [user("1"), say(role, "2"), user("3")], [say(role, "2"), user("3")]]
    name = template if template in ("olmo", "none") else "auto"
    with caplog.at_level(logging.WARNING):
        encode(template, *rows, chat_template_name=name)
    assert [record.getMessage() for record in caplog.records] == [
        f"2 rows of dataset, first dataset:2, have messages of the role {role!r}, which the chat template (auto) writes and does not "
        "name: the model may not know it; rename it to system, user, assistant or tool"
    ] * is_noted


def test_templates_that_change_a_content_or_strip_thinking_are_silent(encode, caplog) -> None:
    """A run must not be refused, or warned of, for what its template does on purpose."""
    result = '{"r": "\u00e9\n\\"2"}'
    with caplog.at_level(logging.WARNING):
        encode(
            QWEN3,
            [user("q?"), say("assistant", "<think>\nlong\n</think>\n\n4"), user(" 5 \n")],
            [user("q?"), say("assistant", "<think>\nall of it\n</think>"), user("5")],
            [user("q?"), say("assistant", "", tool_calls=calling("add", a=1)), say("tool", result)],
            [say("system", "s"), user("<tool_response>\n3\n</tool_response>")],
        )
        shouting = "{% for m in messages %}<u>{{ m.content | upper | replace('\n', ' ') | escape }}{% endfor %}<a>"
        encode(shouting, [say("system", "be\nbrief"), user("a < b?\nyes")])
        second_line = "{% for m in messages %}<u>{{ m.content.split('\n')[1] }}{% endfor %}<a>"
        encode(second_line, [user("1\n2")])
    assert caplog.text == ""


def test_a_template_that_refuses_numbers_is_judged_by_the_text(encode) -> None:
    """The check must not be the reason of an error."""
    odd = "{% for m in messages %}{{ m.content if m.content|length < 4 else raise_exception('long') }}{% endfor %}<a>"
    assert texts(encode(odd, [user("1+1")])) == ["1+1<a>"]


def test_calls_that_the_template_does_not_write_are_noted(encode, caplog) -> None:
    """A history without its calls is another conversation."""
    with caplog.at_level(logging.WARNING):
        encode(ANY_ROLE, [user("q"), say("assistant", "", tool_calls=calling("add", a=1)), say("tool", "2")])
    assert "first in dataset:1: tool_calls of assistant" in caplog.text


def test_rows_of_other_messages_and_one_prompt_are_named(encode, caplog) -> None:
    """What tells them apart is nowhere in the prompt; rows that repeat a question, or differ in spaces, are none of these."""
    last_only = "<u>{{ messages[-1].content | trim }}<a>"
    rows = [
        [user("1")],
        [user("1 ")],
        [say("assistant", "0"), user("2")],
        [say("assistant", "<think>3</think>0"), user("2")],
        [say("assistant", "7"), user("2")],
        {"prompt": "<u>2<a>"},
        [say("system", "5"), user("1")],
    ]
    with caplog.at_level(logging.WARNING):
        encode(last_only, *rows)
    assert caplog.records[-1].getMessage() == (
        "2 rows have other messages than an earlier row and the same prompt, first dataset:5 after dataset:3; what tells them apart "
        "is not in the prompt"
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        cut = {"overlong_prompt_policy": "truncate_left", "max_prompt_token_length": 4}
        assert texts(encode(KNOWN_ROLES, *[[user(f"{n}+1+1")] for n in range(3)], **cut)) == ["1+1<a>"] * 3
    assert "the same prompt" not in caplog.text


@pytest.mark.parametrize(
    "column",
    [
        [SCHEMA],
        json.dumps([SCHEMA]),
        [json.dumps(SCHEMA)],
        SCHEMA,
        # As tables fill in what other rows have.
        [{**SCHEMA, "strict": None, "function": {**SCHEMA["function"], "returns": None}}],
    ],
)
def test_schemas_of_a_row_reach_the_template(encode, tokenizer, column: object) -> None:
    """A function-calling set without them asks for calls of functions that no prompt names."""
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + KNOWN_ROLES
    (text,) = texts(encode(template, {"messages": [user("3")], "tools": column}))
    assert text == tokenizer.apply_chat_template(
        [user("3")], tools=[SCHEMA], tokenize=False, add_generation_prompt=True, chat_template=template
    )
    assert text.startswith('[{"type": "function", "function": {"name": "add", "description": "adds"')


@pytest.mark.parametrize("column", [None, [], "", "[]", "x", ["search"], '["search"]', {"a": 1}, "{not json", 7])
def test_a_column_tools_without_schemas_is_like_any_other(encode, column: object) -> None:
    """Data of others have such columns."""
    prompts = encode(NAMES, {"messages": [user("3")], "tools": column})
    assert texts(prompts) == ["<u>3<a>"] and prompts.prompt((0, 0)).columns["tools"] == column


def test_schemas_beside_names_are_an_error(encode) -> None:
    """Some of the tools would be missing from the prompt."""
    with pytest.raises(ValueError, match=r"dataset:1: tools: .* has schemas and other entries"):
        encode(NAMES, {"messages": [user("3")], "tools": [SCHEMA, "search"]})
    with pytest.raises(ValueError, match="chat_template_kwargs has tools"):
        encode(NAMES, {"messages": [user("3")], "tools": [SCHEMA]}, chat_template_kwargs='{"tools": []}')


@pytest.mark.parametrize("template", ["auto", "none"])
def test_schemas_that_the_template_does_not_write_are_noted(encode, caplog, template: str) -> None:
    """The user has to describe the functions then."""
    with caplog.at_level(logging.WARNING):
        encode(KNOWN_ROLES, {"messages": [user("3")], "tools": [SCHEMA]}, chat_template_name=template)
    assert "leaves out text of 1 rows of dataset, first in dataset:1: the column tools" in caplog.text


def test_a_template_with_the_date_is_noted(encode, caplog) -> None:
    """Prompts in the cache keep their day, and a resumed run without it has others."""
    dated = "{% if date_string is not defined %}{% set date_string = strftime_now('%d') %}{% endif %}{{ date_string }}"
    with caplog.at_level(logging.WARNING):
        encode(dated + KNOWN_ROLES, [user("3")], chat_template_kwargs='{"date_string": "1"}')
        assert caplog.text == ""
        encode(dated + KNOWN_ROLES, [user("3")])
    assert "the chat template writes the date (strftime_now)" in caplog.text
