"""What stands between two turns where messages of several roles follow the first: the template's own tokens, or a reason."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from mgrpo.data.builtin_templates import TEMPLATES
from mgrpo.environments.environment import Tool
from mgrpo.environments.loop.bridge import BridgeError, Bridges
from tests.unit.data.real_tokenizers import REAL
from tests.unit.environments.chat_templates import GOOD, JOINED, TOKENS, changed, end_token_of, make_tokenizer

pytest.importorskip("transformers")

HARD = ["4", " x", "\n\nto\n", "\to\r\n", '{"a": "\\n"}', "é漢🙂\x00", "qztext1zq", "{{ 7 }}"]
FOLLOWING = [
    ("tool", "user"),
    ("tool", "tool", "user"),
    ("tool", "user", "user"),
    ("tool", "system"),
    ("system", "user"),
    ("user", "system"),
    ("user", "user"),
    ("user", "user", "user"),
    ("system",),
    ("user", "tool"),
]
TOOL = Tool(name="look", description="Looks it up.", parameters={"type": "object", "properties": {}})
SAID = "qzturnzq"
USER = {"role": "user", "content": "1+1?"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@functools.cache
def real(kind: str) -> Any:
    function, package, modules = REAL[kind]
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        pytest.skip(f"the {kind} tokenizer of {package} takes {', '.join(missing)}, not installed")
    return function()


def bridges(tokenizer: Any, template: str, *stops: str) -> Bridges:
    ids = tokenizer.convert_tokens_to_ids(list(stops))
    return Bridges(tokenizer, template, template_kwargs={}, tools=[TOOL], stop_token_ids=ids)


def written(tokenizer: Any, template: str, messages: list[dict], *, opens: bool) -> str:
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tools=[TOOL.schema], tokenize=False, add_generation_prompt=opens
    )


def pasts(roles: tuple[str, ...], *, in_text: bool) -> list[list[dict]]:
    """Conversations up to a turn that such messages follow."""
    arguments = json.dumps({"x": SAID}) if in_text else {"x": SAID}
    calls = [
        {"type": "function", "id": f"{index:09d}", "function": {"name": "look", "arguments": arguments}}
        for index in range(roles.count("tool"))
    ]
    turn = {"role": "assistant", "content": SAID} | ({"tool_calls": calls} if calls else {})
    return [
        [USER, turn],
        [{"role": "system", "content": "Be short."}, USER, {"role": "assistant", "content": "2"}, USER, turn],
    ]


def observed(roles: tuple[str, ...], texts: list[str], tool_role: str) -> list[dict]:
    found: list[dict] = []
    for role, text in zip(roles, texts, strict=True):
        message = {"role": tool_role if role == "tool" else role, "content": text}
        if role == "tool":
            message |= {"name": "look", "tool_call_id": f"{len(found):09d}"}
        found.append(message)
    return found


def check(
    tokenizer: Any, template: str, stops: tuple[str, ...], roles: tuple[str, ...], tool_role: str = "tool"
) -> bool:
    """Compare a bridge with the template's own tokens; whether there is any."""
    made = bridges(tokenizer, template, *stops)
    try:
        made.check(*roles)
    except BridgeError:
        return False
    for start in range(len(HARD)):
        texts = [HARD[(start + index) % len(HARD)] for index in range(len(roles))]
        for past in pasts(roles, in_text=template == GOOD["headers"][0]):
            alone = written(tokenizer, template, past, opens=False).rstrip("\n").removesuffix("<eos>")
            whole = written(tokenizer, template, past + observed(roles, texts, tool_role), opens=True)
            last = tokenizer(alone, add_special_tokens=False)["input_ids"][-1]
            expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
            found = made.after(roles, texts, ["look" if role == "tool" else "" for role in roles], last=last)
            # Some rewrite what is before: Qwen3's gives the last turn a thought, OLMo's has a system of its own where there is none.
            before = expected[: len(expected) - len(found)]
            assert before + found == expected
            assert SAID in tokenizer.decode(before).rsplit("1+1?", 1)[1] and SAID not in tokenizer.decode(found)
    return True


# One takes one call a turn; of the other, the header of a system ends no turn.
UNABLE = {("trimmed", ("tool", "tool", "user")), ("headers", ("system", "user")), ("headers", ("system",))}


@pytest.mark.parametrize("roles", FOLLOWING, ids="-".join)
@pytest.mark.parametrize("name", GOOD)
def test_tokens_after_a_turn_are_the_templates_own(tokenizer: Any, name: str, roles: tuple[str, ...]) -> None:
    """Claude Code sends what tools answered with its own remarks; one token off, and each such turn is trained wrongly."""
    template, stops = GOOD[name]
    assert check(tokenizer, template, stops, roles) == ((name, roles) not in UNABLE)


QWEN3 = "qwen3"


def template_of(name: str) -> str:
    if name != QWEN3:
        return TEMPLATES[name].text
    # MiniCPM's template is Qwen3's, with one line of its own.
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vllm is not installed")
    path = Path(vllm.origin).parent / "transformers_utils/chat_templates/template_minicpmv45.jinja"
    if not path.is_file():
        pytest.skip("this vllm has no template of MiniCPM")
    return path.read_text()


@pytest.mark.parametrize("roles", FOLLOWING, ids="-".join)
@pytest.mark.parametrize("name", ["olmo", "tulu", "zephyr", QWEN3])
@pytest.mark.parametrize("kind", ["smollm2", "qwen"])
def test_tokens_of_real_templates_are_their_own(kind: str, name: str, roles: tuple[str, ...]) -> None:
    """Two of them have no place for what tools say, and one has a role of its own for that."""
    tokenizer = real(kind)
    able = check(
        tokenizer,
        template_of(name),
        ("<|im_end|>", "<|endoftext|>"),
        roles,
        tool_role="environment" if name == "olmo" else "tool",
    )
    assert able == (name in ("olmo", QWEN3) or "tool" not in roles)


@pytest.mark.parametrize("token", TOKENS)
def test_added_tokens_stay_text_in_all_messages(tokenizer: Any, token: str) -> None:
    """A remark that quotes a page is as dangerous as the page."""
    made = bridges(tokenizer, JOINED, "<|im_end|>")
    special = set(tokenizer.convert_tokens_to_ids(list(TOKENS)))
    roles, names = ("tool", "user", "system"), ["look", "", ""]
    plain = made.after(roles, ["4", "4", "4"], names, last=end_token_of(made))
    texts = [token, f"a{token}{token}", f"{token[:-1]}{token}"]
    found = made.after(roles, texts, names, last=end_token_of(made))
    assert [one for one in found if one in special] == [one for one in plain if one in special]
    assert all(text in tokenizer.decode(found) for text in texts)


def test_a_template_that_moves_a_message_is_not_followed(tokenizer: Any) -> None:
    """Some write every message of the system at the beginning: what was sampled before it was sampled without it."""
    moving = (
        "{%- for m in messages if m.role == 'system' %}{{ '<|im_start|>system\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        + changed(JOINED, "{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}")
    )
    made = bridges(tokenizer, moving, "<|im_end|>")
    made.check("user")
    with pytest.raises(BridgeError, match=r"drops|rewrites|no token|depends"):
        made.check("system", "user")


def test_a_template_that_joins_users_is_followed(tokenizer: Any) -> None:
    joining = changed(
        JOINED,
        "{{- '<|im_start|>' + m.role + '\\n' + m.content }}",
        "{%- if loop.index0 and messages[loop.index0 - 1].role == m.role %}{{- '\\n\\n' }}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\\n' }}{% endif %}{{- m.content }}",
    )
    joining = changed(
        joining,
        "{{- '<|im_end|>\\n' }}\n  {%- endif %}",
        "{%- if loop.last or messages[loop.index0 + 1].role != m.role %}{{- '<|im_end|>\\n' }}{% endif %}\n  {%- endif %}",
    )
    assert check(tokenizer, joining, ("<|im_end|>",), ("user", "user"))
    made = bridges(tokenizer, joining, "<|im_end|>")
    assert "a\n\nb<|im_end|>" in tokenizer.decode(made.after(("user", "user"), ["a", "b"], ["", ""], last=5))


def test_clients_cannot_fill_the_memory_with_kinds_of_bridges(tokenizer: Any) -> None:
    """A bridge of 500 messages takes a third of a second to find, in which nobody else is served."""
    made = bridges(tokenizer, JOINED, "<|im_end|>")
    for number in range(300):
        many = ["user" if number >> place & 1 else "system" for place in range(9)]
        made.after(many, ["x"] * 9, [""] * 9, last=5)
    assert len(made._known) == 256
    with pytest.raises(BridgeError, match="65 messages follow"):
        made.after(("user",) * 65, ["x"] * 65, [""] * 65, last=5)
    many_calls = made.after_tools(["x"] * 65, ["look"] * 65, last=5)
    assert many_calls == made.after_tools(["\n".join(["x"] * 65)], ["look"], last=5)


def test_a_refusal_can_be_repeated_for_ever(tokenizer: Any) -> None:
    """An exception that is raised again holds on to the frames of all its raises, and so to their requests."""
    made = bridges(tokenizer, GOOD["headers"][0], *GOOD["headers"][1])
    raised = []
    for _ in range(2):
        with pytest.raises(BridgeError) as caught:
            made.check("system")
        raised.append(caught.value)
    assert raised[0] is not raised[1] and str(raised[0]) == str(raised[1])
