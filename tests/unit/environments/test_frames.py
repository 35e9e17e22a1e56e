"""Chat templates that cannot be followed from turn to turn, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from mgrpo.environments.loop.bridge import BridgeError, Bridges
from tests.unit.environments.chat_templates import (
    BRACKETS,
    HEADERS,
    JOINED,
    TRIMMED,
    changed,
    end_token_of,
    make_tokenizer,
)

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def bridges(tokenizer: Any, template: str, *stops: str) -> Bridges:
    return Bridges(
        tokenizer,
        template,
        template_kwargs={},
        tools=[],
        stop_token_ids=tokenizer.convert_tokens_to_ids(list(stops)),
    )


BAD = {
    "drops messages of the role tool: ": changed(
        JOINED, "\n  {%- else %}\n", "\n  {%- elif m.role != 'tool' %}\n"
    ).replace("m.role == 'tool' %}", "m.role == 'nothing' %}"),
    "refused the messages .*no tools here": changed(TRIMMED, "m.tool_calls[0]", "raise_exception('no tools here')"),
    r"depends on what came before: '.*user3.*' or '.*user5": changed(
        JOINED, "'<|im_start|>user' }}", "'<|im_start|>user' + (messages | length) | string }}"
    ),
    "rewrites what a message of the role tool says": changed(
        JOINED, r"\n' + m.content + '\n</tool", r"\n' + m.content | replace('\t', ' ') + '\n</tool"
    ),
    r"no token that ends a turn of the model \('<\|im_end\|>'\) between": changed(BRACKETS, "eos_token", "' '"),
    "depends on what came before: '.*user1.*' or '.*user2": changed(
        JOINED,
        "'<|im_start|>user' }}",
        "'<|im_start|>user' + (messages | selectattr('role', 'equalto', 'tool') | list | length) | string }}",
    ),
    "drops messages of the role tool:": changed(HEADERS, r"{{ '<|observation|>\n' + m.content }}", ""),
    "drops the turns of the model": changed(JOINED, "\n  {%- else %}\n", "\n  {%- elif m.role == 'user' %}\n"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_template_that_cannot_be_followed_says_why(tokenizer: Any, reason: str) -> None:
    """A model that never sees an answer learns not to ask; that is found at the start, and not in the curves."""
    with pytest.raises(BridgeError, match=reason):
        bridges(tokenizer, BAD[reason], "<|im_end|>").check("tool")


def test_a_template_that_drops_one_of_two_answers_gets_them_as_one(tokenizer: Any) -> None:
    """Otherwise the model is shown the first, and takes it for the second."""
    template = changed(
        JOINED,
        "'\n<tool_response>".replace("\n", r"\n"),
        r"'' if not loop.first and messages[loop.index0 - 1].role == 'tool' else '\n<tool_response>",
    )
    made = bridges(tokenizer, template, "<|im_end|>")
    end = end_token_of(made)
    assert made.after_tools(["4", "5"], ["a", "b"], last=end) == made.after_tools(["4\n5"], ["a"], last=end)


def test_an_end_that_is_no_token_of_its_own_is_refused() -> None:
    """Its letters would merge with what the model wrote before them."""
    tokenizer = make_tokenizer()
    template = changed(JOINED, "<|im_end|>", "###")
    with pytest.raises(BridgeError, match="no token that ends a turn"):
        bridges(tokenizer, template, "<eos>").check("user")


def test_an_end_token_that_is_not_always_found_is_refused() -> None:
    """Such a token is part of a word where it follows one."""
    with pytest.raises(BridgeError, match=r"the tokenizer does not split a text at '<\|im_end\|>'"):
        bridges(make_tokenizer(single_word=True), JOINED, "<|im_end|>").check("user")
