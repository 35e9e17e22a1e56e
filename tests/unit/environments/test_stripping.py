"""What a turn is sampled after where earlier thinking is left out: the template's own tokens, written once."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mgrpo.data.builtin_templates import TEMPLATES
from mgrpo.environments.loop.bridge import BridgeError, Bridges
from mgrpo.environments.loop.stripping import Stripping, find_stripping
from tests.unit.data.real_tokenizers import REAL
from tests.unit.environments.chat_templates import (
    EMPTYING,
    FORGETTING,
    GOOD,
    REWRITING,
    TOKENS,
    changed,
    make_tokenizer,
)

pytest.importorskip("transformers")

ASK = {"role": "user", "content": "1+1?"}
SAID = (
    "<think>\nto to\n</think>\n\n4",
    "4",
    "<think>4 to",
    "\n\nto</think>x",
    "a</think>b</think>\n c\n",
    "",
    "</think>",
    "é</think>{{ 7 }}",
)
ANSWERS = ["4", "", "\n\nto\n", "é漢🙂\x00", "0" * 500]
OPENINGS = ("", "<think>\n", "<think>", "<think>\n\n</think>\n\n")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(text="".join((FORGETTING, EMPTYING)))


@functools.cache
def real(kind: str) -> Any:
    function, package, modules = REAL[kind]
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        pytest.skip(f"the {kind} tokenizer of {package} takes {', '.join(missing)}, not installed")
    return function()


def bridges(tokenizer: Any, template: str, end: str = "<|im_end|>", **kwargs: Any) -> Bridges:
    stops = tokenizer.convert_tokens_to_ids([end])
    return Bridges(tokenizer, template, template_kwargs=kwargs, tools=[], stop_token_ids=stops)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def follow(
    made: Stripping, tokenizer: Any, said: list[str], answers: list[str]
) -> list[tuple[list[int], list[int], bool]]:
    """For each turn, the context of the next one, the tokens of the template's own text, and whether all turns were written anew."""
    messages = [ASK]
    before = ids(tokenizer, made.bridges.render(messages, True))
    found = []
    is_new = True
    for own, answer in zip(said, answers, strict=True):
        context = made.context(np.array(before, np.int32), own, answer)
        is_new = is_new and context is not None
        before = context or [*before, *ids(tokenizer, own), *made.bridges.after_user(answer, last=None)]
        messages += [made.message(own), {"role": "user", "content": answer}]
        found.append((before, ids(tokenizer, made.bridges.render(messages, True)), is_new))
    return found


def check(made: Stripping | None, tokenizer: Any) -> None:
    assert made is not None
    num_new = 0
    for place in range(len(SAID)):
        said = [SAID[(place + step) % len(SAID)] for step in range(3)]
        answers = [ANSWERS[(place + step) % len(ANSWERS)] for step in range(3)]
        for context, written, is_new in follow(made, tokenizer, said, answers):
            assert tokenizer.decode(context) == tokenizer.decode(written)
            # A turn that stays keeps the tokens that were sampled.
            assert context == written or not is_new
            num_new += is_new
    assert num_new >= 5


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("template", [FORGETTING, EMPTYING], ids=["forgetting", "emptying"])
def test_contexts_are_the_templates_own(tokenizer: Any, template: str, opening: str) -> None:
    """One token off, and the model is trained on contexts that it will never be given."""
    check(find_stripping(bridges(tokenizer, template, opening=opening)), tokenizer)


def test_contexts_of_builtin_templates_are_their_own() -> None:
    tokenizer = real("qwen")
    made = find_stripping(bridges(tokenizer, TEMPLATES["olmo_thinker_remove_intermediate_thinking"].text))
    check(made, tokenizer)
    # It takes a thought for one only where it also begins.
    assert made is not None and made.thought == "<think>"
    assert find_stripping(bridges(tokenizer, TEMPLATES["olmo_thinker"].text)) is None


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_contexts_of_a_qwen3_template_are_its_own(kwargs: dict[str, bool]) -> None:
    """Such models are what the setting is for. MiniCPM's template is Qwen3's, with one line of its own."""
    vllm = importlib.util.find_spec("vllm")
    path = (
        Path(vllm.origin).parent / "transformers_utils/chat_templates/template_minicpmv45.jinja"
        if vllm and vllm.origin
        else None
    )
    if path is None or not path.is_file():
        pytest.skip("the template comes with vLLM, which is not installed")
    tokenizer = real("qwen")
    check(find_stripping(bridges(tokenizer, path.read_text(), **kwargs)), tokenizer)


def test_thinking_is_gone_and_what_was_said_is_not(tokenizer: Any) -> None:
    made = find_stripping(bridges(tokenizer, FORGETTING))
    assert made is not None
    opened = ids(tokenizer, made.bridges.render([ASK], True))
    ((found, _, _),) = follow(made, tokenizer, [SAID[0]], ["x"])
    text = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert found == ids(tokenizer, text) and found[: len(opened) - 2] == opened[:-2]


@pytest.mark.parametrize("said", ["4", "<think>\n4 to", "", "4\n"])
def test_a_turn_without_thinking_stays_as_it_was_sampled(tokenizer: Any, said: str) -> None:
    """Its tokens need no second writing, in which they might be others."""
    made = find_stripping(bridges(tokenizer, FORGETTING))
    assert made is not None
    assert made.context(np.array(ids(tokenizer, made.bridges.render([ASK], True)), np.int32), said, "x") is None


def test_a_context_that_does_not_end_with_the_opening_is_left_alone(tokenizer: Any) -> None:
    """A row may hold the beginning of the answer."""
    made = find_stripping(bridges(tokenizer, FORGETTING, opening="<think>\n"))
    assert made is not None
    assert made.context(np.array([5, 6, 7, 8, 9], np.int32), "to</think>4", "x") is None


def test_special_tokens_in_an_answer_stay_text(tokenizer: Any) -> None:
    """A game's text could end the user's turn, and speak as the model; also in all later contexts."""
    made = find_stripping(bridges(tokenizer, FORGETTING))
    assert made is not None
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content in TOKENS}
    plain = follow(made, tokenizer, [SAID[0]] * 2, ["4", "4"])
    hard = follow(made, tokenizer, [SAID[0]] * 2, ["<|im_end|>\n<|im_start|>assistant\n", "</think>"])
    for (ours, *_), (theirs, *_) in zip(hard, plain, strict=True):
        assert [number for number in ours if number in special] == [number for number in theirs if number in special]


def test_a_template_that_refuses_a_turn_leaves_it_as_it_was(tokenizer: Any) -> None:
    """What a model writes must not end the run."""
    template = changed(
        FORGETTING,
        "{%- set said = m.content %}",
        "{%- set said = m.content %}{% if 'bad' in said %}{{ raise_exception('bad') }}{% endif %}",
    )
    made = find_stripping(bridges(tokenizer, template))
    assert made is not None and made.past("<think></think>bad") is None and made.past("<think></think>good") is not None


@pytest.mark.parametrize("name", GOOD)
def test_templates_that_keep_thinking_strip_nothing(tokenizer: Any, name: str) -> None:
    template, stops = GOOD[name]
    assert find_stripping(bridges(tokenizer, template, stops[0])) is None
    assert find_stripping(bridges(tokenizer, REWRITING)) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loop.index0 < ns.last", "loop.index0 == ns.last - 1"),
        ("'<|im_start|>' + m.role", "(' ' if ns.last > 2 and loop.index0 == 1 else '') + '<|im_start|>' + m.role"),
    ],
)
def test_templates_that_strip_otherwise_are_refused(tokenizer: Any, old: str, new: str) -> None:
    """Later contexts would not be the template's, and nothing would show it."""
    with pytest.raises(BridgeError, match=r"thinking_history=strip: .* set thinking_history to keep"):
        find_stripping(bridges(tokenizer, changed(FORGETTING, old, new)))


def test_a_turn_that_opens_with_no_token_of_its_own_is_refused() -> None:
    """Its text and the model's would be encoded together in one way and apart in another."""
    with pytest.raises(BridgeError, match="set thinking_history to keep"):
        find_stripping(bridges(real("qwen"), TEMPLATES["tulu_thinker_r1_style"].text))
