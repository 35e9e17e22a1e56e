"""What a turn says in each format of tool calls: its calls, its content, and what the model is told of a broken call."""

from __future__ import annotations

import pytest

from mgrpo.environments.environment import Call
from mgrpo.environments.formats import Parsed, named
from tests.unit.environments.format_cases import ADD, TOOLS, add, as_json, code, hermes

MARKUP = code("print('</tool_call></think>', \"<think>\")\n# {1}")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("The answer is 408.<|im_end|>\n", "The answer is 408.", ()),
        (hermes(add(a=2)), "", (add(a=2),)),
        (f"Let me see. {hermes(add(a=2), code('1'))}<|im_end|>", "Let me see.", (add(a=2), code("1"))),
        (hermes(MARKUP), "", (MARKUP,)),
        (f"before {hermes(MARKUP, add(a=1))} after", "before \n after", (MARKUP, add(a=1))),
        ('<tool_call>{"name": "now"}</tool_call>', "", (Call(name="now", arguments={}),)),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", (add(a=1),)),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}<|im_end|>', "", (add(a=1),)),
    ],
)
def test_hermes_calls_are_read(text, content, calls):
    """A call that is missed is never run, and one that stays in the content is scored as the answer."""
    parsed = named("hermes", TOOLS).parse(text)
    assert parsed == Parsed(content=content, calls=calls)


@pytest.mark.parametrize(
    ("text", "content", "why"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 4', "", "Expecting ',' delimiter at character 36"),
        (
            'so <tool_call>{"name": "add", "arguments": {"a": 4}}}</tool_call> then',
            "so  then",
            "between the object and",
        ),
        ('<tool_call>{"name": 3}</tool_call>', "", 'not an object with a "name"'),
        ("<tool_call>[]</tool_call>", "", 'not an object with a "name"'),
        ('<tool_call>{"name": "add", "arguments": [4]}</tool_call>', "", "its arguments are not an object"),
        ('<tool_call>{"name": "add", "arguments": "4}"}</tool_call>', "", "its arguments are not"),
        ("<tool_call>add(4)</tool_call>", "", "not JSON"),
        ("<tool_call>", "", "not JSON"),
    ],
)
def test_broken_hermes_call_is_told_to_the_model(text, content, why):
    """Half a call is neither run nor taken for the answer: its last number would be scored."""
    parsed = named("hermes", TOOLS).parse(text)
    assert (parsed.content, parsed.calls) == (content, ())
    (told,) = parsed.unreadable
    assert why in told
    assert '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>' in told


def test_good_call_beside_a_broken_one_counts():
    """A turn of several calls loses only the broken one."""
    parsed = named("hermes", TOOLS).parse(f"<tool_call>{{</tool_call>{hermes(add(a=1))}")
    assert (parsed.calls, len(parsed.unreadable)) == ((add(a=1),), 1)


@pytest.mark.parametrize(
    ("text", "is_thinking", "content", "calls"),
    [
        (f"<think>{hermes(add(a=1))}</think>ok", False, "ok", ()),
        (f"<think>use <tool_call>?</think>ok {hermes(add(a=2))}", False, "ok", (add(a=2),)),
        (f"{hermes(add(a=1))} or not?</think>ok", False, "ok", ()),
        (f"use <tool_call>?</think>ok {hermes(add(a=2))}", False, "ok", (add(a=2),)),
        (f"<think>endless {hermes(add(a=1))}", False, "", ()),
        (f"endless {hermes(add(a=1))}", True, "", ()),
        (f"ok {hermes(MARKUP)}", False, "ok", (MARKUP,)),
        (f"<think>a</think>b{hermes(MARKUP)}<think>c{hermes(add(a=1))}</think>d", False, "bd", (MARKUP,)),
        (f"[THINK]{hermes(add(a=1))}[/THINK]ok", False, "ok", ()),
    ],
)
def test_call_in_a_thought_does_not_count(text, is_thinking, content, calls):
    """A model that weighs a call has not made it; a marker inside an argument is no thought."""
    parsed = named("hermes", TOOLS).parse(text, is_thinking=is_thinking)
    assert parsed == Parsed(content=content, calls=calls)


def test_legacy_call_is_the_text_between_tags():
    """Open Instruct's default: the tool's first required parameter takes the text as it is."""
    legacy = named("legacy", TOOLS)
    assert legacy.parse("so <code>\n1 < 2\n</code>") == Parsed(content="so", calls=(code("\n1 < 2\n"),))
    assert legacy.parse("<add>3</add> <other>x</other>") == Parsed(content="<other>x</other>", calls=(add(a="3"),))
    assert legacy.stop_strings == ("</add>", "</code>")
    broken = legacy.parse("so <code>1 + 1")
    assert (broken.content, broken.calls) == ("so", ())
    assert "</code> is missing" in broken.unreadable[0]


def test_legacy_call_in_a_thought_counts():
    """The models of this format reason, call and go on reasoning: what ends the turn is the closing tag."""
    legacy = named("legacy", TOOLS)
    assert legacy.parse("<think>so <code>1</code>") == Parsed(content="", calls=(code("1"),))
    assert legacy.parse("so <code>1</code>", is_thinking=True) == Parsed(content="", calls=(code("1"),))
    assert legacy.parse("thus</think><answer>4</answer>", is_thinking=True).content == "<answer>4</answer>"
    assert legacy.parse("thus</think>a<think>b</think>c").content == "ac"


def test_legacy_answers_in_the_turn_that_asked():
    """No template writes them; others leave it to their template."""
    assert named("legacy", TOOLS).answer(["1"]) == "<output>\n1\n</output>\n"
    assert named("legacy", TOOLS).answer(["1", "2"]) == "<output>\n1\n</output>\n\n<output>\n2\n</output>\n"
    assert named("hermes", TOOLS).answer(["1"]) is None


def test_unknown_name_says_what_is_known():
    """Found at the start, not after the first rollout."""
    with pytest.raises(
        ValueError, match=r"tool_parser_type='hermse' is unknown; expected auto or one of .*hermes.*legacy"
    ):
        named("hermse", [ADD])


def test_other_names_of_a_format_are_the_same_format():
    """Open Instruct's and vLLM's names."""
    for name in ("vllm_hermes", "qwen3_json"):
        assert named(name, TOOLS).parse(f"<tool_call>{as_json(add(a=1))}</tool_call>").calls == (add(a=1),)
