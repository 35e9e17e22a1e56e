"""What a turn says in each format of tool calls: its calls, its content, and what the model is told of a broken call."""

from __future__ import annotations

import json
import sys

import pytest

from mgrpo.data.builtin_templates import TEMPLATES
from mgrpo.environments.environment import Call, Tool
from mgrpo.environments.formats import Parsed, detected, families, named
from tests.unit.environments.format_cases import (
    ADD,
    GOOD,
    NOW_CALL,
    TOOLS,
    WRITERS,
    add,
    code,
    glm45,
    hermes,
    llama3_json,
    mistral_v11,
    qwen3_xml,
)

MARKUP = code("print('</tool_call></think>', \"<think>\")\n# {1}")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("The answer is 408.<|im_end|>\n", "The answer is 408.", ()),
        (hermes(add(a=2)), "", (add(a=2),)),
        (f"Let me see. {hermes(add(a=2), code('1'))}<|im_end|>", "Let me see.", (add(a=2), code("1"))),
        (hermes(MARKUP), "", (MARKUP,)),
        (f"before {hermes(MARKUP, add(a=1))} after", "before\nafter", (MARKUP, add(a=1))),
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
            "so\nthen",
            "between the object and",
        ),
        ('<tool_call>{"name": 3}</tool_call>', "", 'not an object with a "name"'),
        ("<tool_call>[]</tool_call>", "", 'not an object with a "name"'),
        ('<tool_call>{"name": "add", "arguments": [4]}</tool_call>', "", "its arguments are not an object"),
        ('<tool_call>{"name": "add", "arguments": "4}"}</tool_call>', "", "its arguments are not"),
        ("<tool_call>add(4)</tool_call>", "", "not JSON"),
        ("<tool_call>", "", "not JSON"),
        ('<tool_call>{"name": "add", "arguments": ' + "[" * 200_000, "", "nested too deeply"),
        (
            '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>",
            "",
            "nested too deeply",
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "", "too many digits"),
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
        (f"<think>a</think>b{hermes(MARKUP)}<think>c{hermes(add(a=1))}</think>d", False, "b\nd", (MARKUP,)),
        (f"[THINK]{hermes(add(a=1))}[/THINK]ok", False, "ok", ()),
        (f"a</think>b</think>{hermes(add(a=1))}", False, "b", (add(a=1),)),
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
    assert legacy.stop_strings == ("</add>", "</code>", "</now>")
    broken = legacy.parse("so <code>1 + 1")
    assert (broken.content, broken.calls) == ("so", ())
    assert "</code> is missing" in broken.unreadable[0]


def test_legacy_call_in_a_thought_counts():
    """The models of this format reason, call and go on reasoning: what ends the turn is the closing tag."""
    legacy = named("legacy", TOOLS)
    assert legacy.parse("<think>so <code>1</code>") == Parsed(content="", calls=(code("1"),))
    assert legacy.parse("so <code>1</code>", is_thinking=True) == Parsed(content="", calls=(code("1"),))
    assert legacy.parse("thus</think><answer>4</answer>", is_thinking=True).content == "<answer>4</answer>"
    assert legacy.parse("thus</think>a<think>b</think>c").content == "a\nc"


def test_legacy_answers_in_the_turn_that_asked():
    """No template writes them; others leave it to their template."""
    assert named("legacy", TOOLS).answer(["1"]) == "<output>\n1\n</output>\n"
    assert named("legacy", TOOLS).answer(["1", "2"]) == "<output>\n1\n</output>\n\n<output>\n2\n</output>\n"
    assert named("hermes", TOOLS).answer(["1"]) is None


@pytest.mark.parametrize("calls", GOOD, ids=["one", "no arguments", "all types", "three"])
@pytest.mark.parametrize("family", WRITERS)
def test_what_a_family_writes_is_read(family, calls):
    """Text, numbers, lists, objects, null and booleans arrive as the values that the model meant."""
    text = WRITERS[family](*calls)
    assert named(family, TOOLS).parse(text) == Parsed(content="", calls=calls)
    assert named(family, TOOLS).parse(f"<think>{text}</think>\n\n{text}").calls == calls


@pytest.mark.parametrize("family", WRITERS)
def test_cut_turn_never_gives_another_call(family):
    """A turn that ends early is no call with fewer arguments, and no number of it is left for the verifier to find."""
    calls = (add(a=408, note="it's [408] {408} <408>"), code("print(408)"))
    text = WRITERS[family](*calls)
    for length in range(len(text)):
        parsed = named(family, TOOLS).parse(text[:length])
        assert parsed.calls == calls[: len(parsed.calls)], text[:length]
        assert "408" not in parsed.content, text[:length]
        assert len(parsed.unreadable) <= 1


@pytest.mark.parametrize(
    ("family", "text", "content"),
    [
        ("hermes", "The answer is {408}.", "The answer is {408}."),
        ("qwen3_xml", "a < b, f(x) = <b>4</b>", "a < b, f(x) = <b>4</b>"),
        ("llama3_json", "The set {1, 2} and \\boxed{408}<|eot_id|>", "The set {1, 2} and \\boxed{408}"),
        (
            "llama3_json",
            '{"answer": {"name": "add", "parameters": {}}}',
            '{"answer": {"name": "add", "parameters": {}}}',
        ),
        ("llama3_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}'),
        ("llama3_json", '{"name": "Ada", "age": ', '{"name": "Ada", "age":'),
        ("pythonic", "[1, 2]", "[1, 2]"),
        ("pythonic", "[sqrt(2), pi]", "[sqrt(2), pi]"),
        ("pythonic", "[]", "[]"),
        ("pythonic", "so [add(a=1)]", "so [add(a=1)]"),
        ("olmo3", "[add(a=1)]", "[add(a=1)]"),
        ("mistral", '[{"name": "add"}]', '[{"name": "add"}]'),
        ("harmony", "<|channel|>final<|message|>408<|return|>", "408"),
        (
            "harmony",
            "<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant<|channel|>final<|message|>4",
            "Plan.\n4",
        ),
        ("harmony", "408", "408"),
    ],
)
def test_answer_that_looks_like_a_call_is_content(family, text, content):
    """A formula or an object in an answer must reach the verifier."""
    assert named(family, TOOLS).parse(text) == Parsed(content=content)


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        # The outer tags of the calls are optional, as for vLLM.
        ("qwen3_xml", "<function=add><parameter=a>2</parameter></function>", (add(a=2),)),
        ("qwen3_xml", "<function=code><parameter=code>\n\n x\n\n</parameter></function>", (code("\n x\n"),)),
        ("qwen3_xml", "<function=add><parameter=a>two</parameter></function>", (add(a="two"),)),
        ("qwen3_xml", "<function=add><parameter=note>3</parameter></function>", (add(note="3"),)),
        ("qwen3_xml", "<function=f><parameter=a>3</parameter></function>", (Call(name="f", arguments={"a": "3"}),)),
        ("qwen3_xml", "<function=add><parameter=limit>NULL</parameter></function>", (add(limit=None),)),
        ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value></tool_call>", (add(a=2),)),
        ("glm45", glm45(code("x\n")) + "<|observation|>", (code("x\n"),)),
        ("llama3_json", f"<|python_tag|>{llama3_json(add(a=1))}<|eom_id|>", (add(a=1),)),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', (Call(name="f", arguments={}),)),
        ("llama3_json", 'Sure: {"arguments": {"a": 1}, "name": "add"}', (add(a=1),)),
        ("pythonic", "<|python_start|>[add(a=1)]<|python_end|><|eot|>", (add(a=1),)),
        ("pythonic", "[ns.add (a = 1,), add(a=1)]", (Call(name="ns.add", arguments={"a": 1}), add(a=1))),
        ("pythonic", "[f(from=1)]", (Call(name="f", arguments={"from": 1}),)),
        ("olmo3", "<function_calls>add(a=1)</function_calls>", (add(a=1),)),
        ("mistral", mistral_v11(add(a=1), code("[TOOL_CALLS]")), (add(a=1), code("[TOOL_CALLS]"))),
        ("mistral", '[TOOL_CALLS]add{"a": 1}</s>', (add(a=1),)),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]abc123456[ARGS]{}", (Call(name="now", arguments={}, id="abc123456"),)),
        ("harmony", "<|channel|>analysis to=code code<|message|>print(1)<|call|>", (code("print(1)"),)),
        ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}", ()),
        ("harmony", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>", (NOW_CALL,)),
    ],
)
def test_other_spellings_of_a_call_are_read(family, text, calls):
    """What versions of a family differ in, and what schemas decide."""
    parsed = named(family, TOOLS).parse(text)
    assert (parsed.calls, parsed.unreadable) == (calls, ())


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it\\'s'", "it's"),
        ('"a\nb"', "a\nb"),
        (r"'\x41\u00e9\101\n\d\\'", "Aé" + "A\n\\d\\"),
        ("""\'\'\'a'b"c\'\'\'""", "a'b\"c"),
        ("r'\\d' '+'", "\\d+"),
        ("'a' \"b\"", "ab"),
        ("-0x1F", -31),
        ("007", 7),
        ("1_000.5e-1", 100.05),
        ("(1)", 1),
        ("(1,)", [1]),
        ("{1, 'a'}", [1, "a"]),
        ("{}", {}),
        ("{'a': (), 2: true}", {"a": [], "2": True}),
        ("[null, None, False,]", [None, None, False]),
    ],
)
def test_python_literals_are_read(literal, value):
    """As Python means them, and as models write them: line breaks in a string, JSON's words, zeros before a number."""
    assert named("pythonic", TOOLS).parse(f"[add(note={literal})]").calls == (add(note=value),)


@pytest.mark.parametrize(
    ("family", "text", "why"),
    [
        ("qwen3_xml", "<tool_call>add</tool_call>", "<function=NAME> must follow"),
        (
            "qwen3_xml",
            "<function=add><parameter=a>1</parametre></function>",
            "</parameter> is missing after the value of a",
        ),
        ("qwen3_xml", "<function=add>1</function>", "only <parameter=KEY>VALUE</parameter>"),
        ("glm45", "<tool_call></tool_call>", "a name must follow"),
        ("glm45", "<tool_call>add 4</tool_call>", "only <arg_key>"),
        ("llama3_json", "<|python_tag|>print(408)", "an object must follow"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 408', "not JSON"),
        ("llama3_json", '{"name": "f", "parameters": 408}', "arguments are not an object"),
        ("pythonic", "[add(408)]", "the arguments of add must be key=value"),
        ("pythonic", "[add(a=400+8)]", "a comma or ) must follow"),
        ("pythonic", "[add(a=__import__('os').getpid())]", "must be literals"),
        ("pythonic", "[add(a=1), print]", "must be name(key=value"),
        ("pythonic", "[add(a=" + "[" * 3000 + ")]", "nested too deeply"),
        ("pythonic", "[add(a=" + "9" * 5000 + ")]", "number cannot be read"),
        ("pythonic", "[add(a={[1]: 2})]", "keys of a dict"),
        ("pythonic", "[add(a={1: 2, 3})]", "a key without a value"),
        ("olmo3", "<function_calls>\nadd(a=1)", "</function_calls> is missing"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "there is no call in it"),
        ("mistral", "[TOOL_CALLS][]", 'not an object with a "name"'),
        ("mistral", "[TOOL_CALLS]408", "not JSON"),
        ("mistral", "[TOOL_CALLS]", "a name and its arguments must follow"),
        ("mistral", "[TOOL_CALLS][408]", 'not an object with a "name"'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>add", "<｜tool▁sep｜> must follow"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{} 408<｜tool▁call▁end｜>", "text stands between"),
        ("harmony", "<|channel|>commentary to=functions.add", "<|message|> is missing"),
        ("harmony", "<|channel|>commentary to=add json<|message|>408<|call|>", "arguments are not an object"),
        ("harmony", "<|channel|>commentary to=f<|message|>{} 408<|call|>", "text stands after"),
        ("dr_tulu", "<call_tool name='x'>408</call_tool>", 'name="..." is missing'),
        ("dr_tulu", '<call_tool name="code">408', "</call_tool> is missing"),
    ],
)
def test_broken_call_is_told_to_the_model(family, text, why):
    """With what was expected; no number of the call is left in the content."""
    parsed = named(family, TOOLS).parse(text)
    assert why in parsed.unreadable[0]
    assert named(family, TOOLS).example in parsed.unreadable[0]
    assert parsed.content == ""


@pytest.mark.parametrize(("depth", "is_read"), [(100, True), (101, False)])
def test_a_value_between_tags_that_is_nested_too_deeply_stays_text(depth, is_read):
    """It is written out again, with more frames on the stack than here."""
    own = Tool(name="put", description="", parameters={"type": "object", "properties": {"x": {"type": "array"}}})
    text = "[" * depth + "]" * depth
    (call,) = named("qwen3_xml", [own]).parse(f"<function=put><parameter=x>{text}</parameter></function>").calls
    assert call.arguments == {"x": json.loads(text) if is_read else text}


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_xml", qwen3_xml(add(a=1)).replace("</parameter>", "</parametre>")),
        ("glm45", glm45(add(a=1)).replace("</arg_value>", "</arg_valeu>")),
    ],
)
def test_value_does_not_swallow_the_next_call(family, text):
    """A misspelt closing tag breaks its own call; the text up to the next closing tag is no value."""
    parsed = named(family, TOOLS).parse(text + WRITERS[family](code("x")))
    assert (parsed.calls, len(parsed.unreadable), parsed.content) == ((code("x"),), 1, "")


def test_dr_tulu_call_is_text_and_attributes():
    """The other attributes are arguments, as the schema types them."""
    dr_tulu = named("dr_tulu", TOOLS)
    text = '<think>so <call_tool name="add" note="x" limit="5"> 3 </call_tool>'
    assert dr_tulu.parse(text) == Parsed(content="", calls=(add(note="x", limit=5, a="3"),))
    assert dr_tulu.parse('<call_tool name="f">x</call_tool>').calls == (Call(name="f", arguments={"text": "x"}),)
    assert dr_tulu.stop_strings == ("</call_tool>",)
    assert dr_tulu.answer(["1"]) == "<tool_output>\n1\n</tool_output>\n"


def test_tokens_that_end_a_turn_are_those_of_the_family():
    """With such a token sampled and unknown to the engine, the model would go on and write the answer itself."""
    assert "<|eom_id|>" in named("llama3_json", TOOLS).stop_tokens
    assert "<|observation|>" in named("glm45", TOOLS).stop_tokens
    assert "<|call|>" in named("harmony", TOOLS).stop_tokens
    assert named("hermes", TOOLS).stop_tokens == named("hermes", TOOLS).stop_strings == ()


def test_unknown_name_says_what_is_known():
    """Found at the start, not after the first rollout."""
    with pytest.raises(
        ValueError, match=r"tool_parser_type='hermse' is unknown; expected auto, hermes, .*legacy.* vllm:NAME"
    ):
        named("hermse", [ADD])


def test_door_to_vllm_says_what_to_install(monkeypatch):
    """Where vLLM is not installed, or a parser imports what vLLM does not install."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", None)
    with pytest.raises(ValueError, match=r"tool_parser_type='vllm:hermes' cannot be imported: .*vllm.*; install vLLM"):
        named("vllm:hermes", TOOLS, tokenizer=object())


@pytest.mark.parametrize(("name", "family"), families.ALIASES.items())
def test_other_names_of_a_format_are_the_same_format(name, family):
    """Open Instruct's and vLLM's names."""
    assert named(name, TOOLS).name == family
    assert named(name, TOOLS).parse(WRITERS[family](add(a=1))).calls == (add(a=1),)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<tool_call>' + (call | tojson) }}", "hermes"),
        ("{{ '<tool_call>\n<function=' + call.name }}", "qwen3_xml"),
        ("{{ '<tool_call>' + call.name + '<arg_key>' }}", "glm45"),
        ("""Respond in the format {"name": function name, "parameters": dictionary of argument name""", "llama3_json"),
        ("{{ '<|python_tag|>' + call.name }}", "llama3_json"),
        ("Respond in the format [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("<|tool_list_start|>[", "lfm2"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ 'function<｜tool▁sep｜>' + name + '\n```json' }}", "deepseek_v3"),
        ("{{ name + '<｜tool▁sep｜>' }}", "deepseek_v31"),
        ("{{ '<|channel|>analysis' }}", "harmony"),
        ('<call_tool name="search">', "dr_tulu"),
        (TEMPLATES["olmo"].text, "olmo3"),
        (TEMPLATES["r1_simple_chat_postpend_think_tool_vllm"].text, "legacy"),
    ],
)
def test_template_tells_the_family(template, family):
    """`tool_parser_type=auto`."""
    assert detected(template) == family


def test_template_without_a_format_is_refused():
    """A run whose calls are never seen trains the model not to call."""
    with pytest.raises(
        ValueError, match=r"auto finds no format of tool calls in the chat template; .* hermes, .*legacy"
    ):
        detected(TEMPLATES["tulu"].text)
