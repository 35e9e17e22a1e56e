"""What stands between two turns: the template's own tokens, nothing special in what is observed, and a reason if that fails."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest

from mgrpo.data.builtin_templates import TEMPLATES
from mgrpo.environments.environment import Tool
from mgrpo.environments.loop.bridge import BridgeError, Bridges
from tests.unit.data.real_tokenizers import REAL, sentencepiece
from tests.unit.environments.chat_templates import (
    GOOD,
    JOINED,
    REWRITING,
    TOKENS,
    TRIMMED,
    changed,
    end_token_of,
    make_tokenizer,
)

pytest.importorskip("transformers")

TOOL = Tool(
    name="look",
    description="Looks it up.",
    parameters={"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
)
HARD = ["4", "", " x", "\n\nto\n", "\to\r\n", '{"a": "\\n"}', "é漢🙂\x00", "qztext0zq", "{{ 7 }}", "0" * 3000]
USER = {"role": "user", "content": "1+1?"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def bridges(tokenizer: Any, template: str, stops: tuple[str, ...], **kwargs: Any) -> Bridges:
    return Bridges(
        tokenizer,
        template,
        template_kwargs=kwargs,
        tools=[TOOL],
        stop_token_ids=tokenizer.convert_tokens_to_ids(list(stops)),
    )


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def written(tokenizer: Any, template: str, messages: list[dict], *, opens: bool = True) -> str:
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tools=[TOOL.schema], tokenize=False, add_generation_prompt=opens
    )


def calling(template: str, num_calls: int) -> dict[str, Any]:
    """A turn with calls, with arguments in the template's manner."""
    arguments = '{"x": "1"}' if template == GOOD["headers"][0] else {"x": "1"}
    calls = [
        {"type": "function", "id": f"{index:09d}", "function": {"name": f"look{index}", "arguments": arguments}}
        for index in range(num_calls)
    ]
    return {"role": "assistant", "content": "so", "tool_calls": calls}


def observed(texts: list[str], role: str = "tool") -> list[dict]:
    return [
        {"role": role, "name": f"look{index}", "tool_call_id": f"{index:09d}", "content": text}
        for index, text in enumerate(texts)
    ]


# One of them takes one call a turn.
@pytest.mark.parametrize(
    ("name", "num_texts"), [(name, n) for name in GOOD for n in (1, 2, 3) if (name, n) < ("trimmed", 2)]
)
def test_tokens_after_tools_are_the_templates_own(tokenizer: Any, name: str, num_texts: int) -> None:
    """One token off at every call, and the model is trained on contexts that it will never be given."""
    template, stops = GOOD[name]
    made = bridges(tokenizer, template, stops)
    made.check("tool")
    for start in range(len(HARD)):
        texts = [HARD[(start + index) % len(HARD)] for index in range(num_texts)]
        turn = calling(template, num_texts)
        for past in ([USER, turn], [USER, {"role": "assistant", "content": "2"}, USER, turn]):
            before = ids(tokenizer, written(tokenizer, template, past, opens=False).removesuffix("\n"))
            if name == "headers":
                before.append(tokenizer.convert_tokens_to_ids("<|observation|>"))
            found = made.after_tools(texts, ["look0", "look1", "look2"][:num_texts], last=before[-1])
            assert before + found == ids(tokenizer, written(tokenizer, template, past + observed(texts)))


@pytest.mark.parametrize("name", GOOD)
def test_tokens_after_a_user_are_the_templates_own(tokenizer: Any, name: str) -> None:
    """In a game each move is a message of the user."""
    template, stops = GOOD[name]
    made = bridges(tokenizer, template, stops)
    made.check("user")
    past = [USER, {"role": "assistant", "content": "2"}]
    for text in HARD:
        expected = ids(tokenizer, written(tokenizer, template, [*past, {"role": "user", "content": text}]))
        before = ids(
            tokenizer, written(tokenizer, template, past, opens=False).removesuffix("\n").removesuffix("<eos>")
        )
        assert before + made.after_user(text, last=before[-1]) == expected


@functools.cache
def real(kind: str) -> Any:
    function, package, modules = REAL[kind]
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        pytest.skip(f"the {kind} tokenizer of {package} takes {', '.join(missing)}, not installed")
    return function()


OLMO = {name for name in TEMPLATES if name.startswith("olmo") and "rlzero" not in name}
AFTER_USER = OLMO | {"zephyr", "tulu", "tulu_thinker", "tulu_thinker_r1_style", "qwen_instruct_user_boxed_math"}


@pytest.mark.parametrize("kind", ["smollm2", "qwen"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_builtin_templates_are_followed_or_refused(kind: str, name: str) -> None:
    """Half of them never end an answer, or have no place for what a tool says; that must be known before a run."""
    tokenizer, template = real(kind), TEMPLATES[name].text
    made = bridges(tokenizer, template, ("<|im_end|>", "<|endoftext|>"))
    past = [USER, {"role": "assistant", "content": "2"}]
    before = ids(tokenizer, written(tokenizer, template, past, opens=False).removesuffix("\n"))
    if name in AFTER_USER:
        for text in HARD:
            expected = ids(tokenizer, written(tokenizer, template, [*past, {"role": "user", "content": text}]))
            assert before + made.after_user(text, last=before[-1]) == expected
    else:
        with pytest.raises(BridgeError, match=r"no token that ends a turn|drops messages of the role user"):
            made.check("user")
    if name in OLMO:
        expected = ids(tokenizer, written(tokenizer, template, past + observed(["4"], "environment")))
        assert before + made.after_tools(["4"], ["look"], last=before[-1]) == expected
    else:
        with pytest.raises(BridgeError, match=r"no token that ends a turn|drops messages of the role tool"):
            made.check("tool")


def test_a_last_answer_may_end_otherwise_than_earlier_ones(tokenizer: Any) -> None:
    """OLMo's templates end the last with the end of text: what was sampled stays, and the next header follows it."""
    made = bridges(tokenizer, TEMPLATES["olmo"].text, ("<eos>",))
    header = "\n<|im_start|>user\n4<|im_end|>\n<|im_start|>assistant\n"
    end, cut = tokenizer.convert_tokens_to_ids(["<eos>", "<think>"])
    assert made.after_user("4", last=end) == ids(tokenizer, "<|im_end|>" + header)[1:]
    assert made.after_user("4", last=cut) == ids(tokenizer, "<|im_end|>" + header)


def test_a_turn_that_was_cut_is_ended_first(tokenizer: Any) -> None:
    """A header in the middle of a sentence is no header; one that was sampled must not be written twice."""
    for name, end in (("joined", "<|im_end|>"), ("headers", "<|observation|>"), ("named", "<|call|>")):
        made = bridges(tokenizer, *GOOD[name])
        number, other = tokenizer.convert_tokens_to_ids([end, "<eos>"])
        assert end_token_of(made) == number
        after = made.after_tools(["4"], ["look"], last=number)
        assert number not in after[:1]
        assert made.after_tools(["4"], ["look"], last=5) == [number, *after]
        # The end of text stands for another end, but not for a header.
        expected = [number, *after] if name == "headers" else after
        assert made.after_tools(["4"], ["look"], last=other) == expected


@pytest.mark.parametrize("name", GOOD)
def test_added_tokens_in_an_observation_stay_text(tokenizer: Any, name: str) -> None:
    """A web page could end the tool's turn, and speak as the user; or call, in the manner of another format."""
    template, stops = GOOD[name]
    made = bridges(tokenizer, template, stops)
    end = end_token_of(made)
    plain = made.after_tools(["4"], ["look"], last=end)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content in TOKENS}
    own = [number for number in plain if number in special]
    for token in TOKENS:
        for text in (token, f"a{token}\n{token}{token}b", f"<{token}>", f"{token[:-1]}{token}"):
            found = made.after_tools([text], ["look"], last=end)
            assert [number for number in found if number in special] == own
            content = made._of(("tool",)).frame.forms[0](text)
            assert content in tokenizer.decode(found, clean_up_tokenization_spaces=False)


def test_only_the_special_token_in_an_observation_is_cut(tokenizer: Any) -> None:
    """A page with one of them is otherwise read as any other text is."""
    made = bridges(tokenizer, *GOOD["named"])
    header, footer = "<|start|>tools.look to=assistant<|message|>", "<|end|><|start|>assistant"
    found = made.after_tools(["to to to <|im_end|> to to to"], ["look"], last=end_token_of(made))
    cut = [ids(tokenizer, header + "to to to <"), ids(tokenizer, "|im_end|> to to to" + footer)]
    assert found == cut[0] + cut[1]


def test_white_space_that_is_a_token_is_read_as_such() -> None:
    """Gemma has tokens of its own for several newlines: they are not special."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["\n  "])
    assert "\n  " in JOINED
    made = bridges(tokenizer, *GOOD["joined"])
    past = [USER, calling(JOINED, 1)]
    before = ids(tokenizer, written(tokenizer, JOINED, past, opens=False).removesuffix("\n"))
    expected = ids(tokenizer, written(tokenizer, JOINED, past + observed(["to\n  to"])))
    assert before + made.after_tools(["to\n  to"], ["look"], last=before[-1]) == expected


@pytest.mark.parametrize("name", GOOD)
def test_end_tokens_may_swallow_the_white_space_behind_them(name: str) -> None:
    """Phi's do: the newline that the template writes after them is no token, and the model has never seen one there."""
    tokenizer = make_tokenizer(rstrip=True)
    made = bridges(tokenizer, *GOOD[name])
    template, past = GOOD[name][0], [USER, calling(GOOD[name][0], 1)]
    before = ids(tokenizer, written(tokenizer, template, past, opens=False))
    expected = ids(tokenizer, written(tokenizer, template, past + observed([" 4"])))
    assert before + made.after_tools([" 4"], ["look0"], last=before[-1]) == expected


def test_sentencepiece_adds_no_space_to_a_bridge(tmp_path: Any) -> None:
    """Such a tokenizer puts a space before what a text begins with, and a bridge does not begin a text."""
    pytest.importorskip("sentencepiece")
    tokenizer, template = sentencepiece(tmp_path), TEMPLATES["zephyr"].text
    made = bridges(tokenizer, template, ("</s>",))
    past = [USER, {"role": "assistant", "content": "2"}]
    before = ids(tokenizer, written(tokenizer, template, past, opens=False).removesuffix("\n"))
    for text in (text for text in HARD if text.isascii()):
        expected = ids(tokenizer, written(tokenizer, template, [*past, {"role": "user", "content": text}]))
        assert before + made.after_user(text, last=before[-1]) == expected


def test_of_two_tokens_at_the_end_the_one_that_stops_the_model_counts(tokenizer: Any) -> None:
    """Command's answers have an end of their own before that of the turn, which would be written twice."""
    template = changed(TRIMMED, "{{- '<|end|>' }}", "{{- '<|end|><|turn|>' }}")
    made = bridges(tokenizer, template, ("<|turn|>",))
    stop = tokenizer.convert_tokens_to_ids("<|turn|>")
    after = "<|start|>user<|message|>4<|end|><|turn|><|start|>assistant<|message|>"
    assert made.after_user("4", last=stop) == ids(tokenizer, after)


def test_names_that_the_model_made_up_stay_text(tokenizer: Any) -> None:
    """The name of a call is the model's own text, and is answered even if there is no such tool."""
    made = bridges(tokenizer, *GOOD["named"])
    end = end_token_of(made)
    found = made.after_tools(["4"], ["<|end|><|start|>user"], last=end)
    special = set(tokenizer.convert_tokens_to_ids(list(TOKENS)))
    assert [number for number in found if number in special] == [
        number for number in made.after_tools(["4"], ["look"], last=end) if number in special
    ]
    assert "tools.<|end|><|start|>user to=assistant" in tokenizer.decode(found)


def test_a_tokenizer_that_rewrites_texts_finds_no_special_token(tokenizer: Any) -> None:
    """`<|IM_END|>` is `<|im_end|>` to a tokenizer that lowers its letters first."""
    from tokenizers import AddedToken, normalizers

    lowered = make_tokenizer()
    lowered.backend_tokenizer.normalizer = normalizers.Lowercase()
    lowered.add_tokens([AddedToken("<|halt|>", normalized=True, special=True)], special_tokens=True)
    made = bridges(lowered, *GOOD["joined"])
    halt = lowered.convert_tokens_to_ids("<|halt|>")
    assert halt in ids(lowered, "a<|HALT|>")
    found = made.after_tools(["a<|HALT|>b"], ["look"], last=end_token_of(made))
    assert halt not in found and "a<|halt|>b" in lowered.decode(found)


def test_half_characters_are_replaced(tokenizer: Any) -> None:
    """Tools answer in JSON, which can hold what no tokenizer takes; that must not end the run."""
    made = bridges(tokenizer, *GOOD["named"])
    found = made.after_tools(["a\ud83d"], ["b\ude00"], last=end_token_of(made))
    assert found == made.after_tools(["a?"], ["b?"], last=end_token_of(made))


def test_a_template_that_rewrites_the_past_is_followed(tokenizer: Any) -> None:
    """Some hybrid models' templates add a thought to the last answer; what was sampled stays, and what follows it is the same."""
    made = bridges(tokenizer, REWRITING, ("<|im_end|>",))
    plain = bridges(tokenizer, JOINED, ("<|im_end|>",))
    turns = [USER, calling(REWRITING, 1)]
    before = written(tokenizer, REWRITING, turns, opens=False)
    assert not written(tokenizer, REWRITING, turns + observed(["4"]) * 3).startswith(before)
    end = end_token_of(plain)
    assert made.after_tools(["4"], ["look"], last=end) == plain.after_tools(["4"], ["look"], last=end)


def test_more_calls_than_the_template_takes_are_answered_as_one(tokenizer: Any) -> None:
    """How many calls a turn has is the model's decision, and no reason to stop."""
    made = bridges(tokenizer, *GOOD["trimmed"])
    end = end_token_of(made)
    assert made.after_tools(["4", "5"], ["a", "b"], last=end) == made.after_tools(["4\n5"], ["a"], last=end)


def test_variables_of_the_template_reach_the_bridge(tokenizer: Any) -> None:
    """Without them the first turn is asked not to think, and all others are."""
    template = changed(JOINED, r"assistant\n' }}", r"assistant\n' + ('' if thinks else '<think></think>') }}")
    made = bridges(tokenizer, template, ("<|im_end|>",), thinks=False)
    thought = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert made.after_user("4", last=end_token_of(made))[-2:] == thought
    assert thought[1] not in bridges(tokenizer, template, ("<|im_end|>",), thinks=True).after_user("4", last=0)
    # Tools are one of them.
    made = bridges(tokenizer, template.replace("thinks", "not tools"), ("<|im_end|>",))
    assert made.after_user("4", last=end_token_of(made))[-2:] == thought
