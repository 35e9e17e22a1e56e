"""The text of a prompt from a conversation: choice of the chat template, rendering, and the bos token.

Named templates are in `builtin_templates`. The text is to be encoded with `add_special_tokens=False`: the template, or
`add_bos`, has written every special token.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgrpo.data.builtin_templates import TEMPLATES
from mgrpo.data.rows import Message

NAMES: tuple[str, ...] = tuple(TEMPLATES)

_OWN = "auto"
_NO_TEMPLATE = "none"
_FILE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")
# Parameters of apply_chat_template that are not variables of a template.
_NOT_FOR_TEMPLATES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


def check_name(name: str) -> None:
    """Raise ValueError unless `chat_template_name` says auto, none, a built-in name or an existing file."""
    if name not in (_OWN, _NO_TEMPLATE) and name not in TEMPLATES:
        _file(name)


def find_template(name: str, tokenizer: Any) -> str | None:
    """The Jinja text that `chat_template_name` stands for; None for "none".

    Raises ValueError for "auto" with a tokenizer that has no template, so call it only if there are conversations.
    """
    if name == _NO_TEMPLATE:
        return None
    if name == _OWN:
        return _own_template(tokenizer)
    if name in TEMPLATES:
        return TEMPLATES[name].text
    path = _file(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ValueError(f"chat_template_name={name} is not UTF-8 text ({err}); expected a Jinja file") from err
    if not text.strip():
        raise ValueError(f"chat_template_name={name} is an empty file; expected a Jinja template")
    return text


def check_kwargs(kwargs: Mapping[str, object]) -> None:
    """Raise ValueError if `chat_template_kwargs` has arguments of apply_chat_template itself."""
    if taken := sorted(_NOT_FOR_TEMPLATES & kwargs.keys()):
        raise ValueError(
            f"chat_template_kwargs has {', '.join(taken)}, which the trainer sets itself; "
            'expected variables of the template, for example {"enable_thinking": false}'
        )


def render(
    messages: Sequence[Message],
    tokenizer: Any,
    template: str,
    *,
    add_bos: bool,
    kwargs: Mapping[str, object],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_opening: bool = True,
) -> str:
    """The prompt's text for a conversation.

    Args:
        template: Jinja text, of `find_template`.
        kwargs: variables for the template, in addition to the messages and the tokenizer's special tokens.
        tools: schemas of the tools that the model may call.
        add_opening: True to end the text with the opening of the model's turn.
    """
    check_kwargs(kwargs)
    if tools is not None and "tools" in kwargs:
        raise ValueError("chat_template_kwargs has tools, and the run has tools of its own; name them in one place")
    variables = {**kwargs, "tools": list(tools)} if tools else kwargs
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_opening, chat_template=template, **variables
        )
    except Exception as err:
        roles = ", ".join(str(message.get("role")) for message in messages) or "none"
        line = getattr(err, "lineno", None)
        reason = " ".join(str(err).split()) + (f" (line {line})" if line else "")
        raise ValueError(
            f"the chat template refused the messages (roles: {roles}): {type(err).__name__}: {reason}"
        ) from err
    return with_bos(text, tokenizer) if add_bos else text


def with_bos(text: str, tokenizer: Any) -> str:
    """`text` after the tokenizer's bos token; ValueError if the text already begins with it."""
    bos = tokenizer.bos_token
    if not bos:
        raise ValueError(
            "add_bos=true, but the tokenizer has no bos_token; set one in its tokenizer_config.json, or leave add_bos out"
        )
    if text.lstrip().startswith(bos):
        raise ValueError(
            f"add_bos=true would write {bos!r} twice: the prompt already begins with it ({text[:60]!r}); leave add_bos out"
        )
    return bos + text


def override_system(messages: Sequence[Message], system_prompt: str) -> list[Message]:
    """The conversation with `system_prompt` in place of its first system message, or in front if there is none."""
    rest = messages[1:] if messages and messages[0].get("role") == "system" else messages
    return [{"role": "system", "content": system_prompt}, *rest]


def with_changed_question(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message]:
    """The conversation with another text of the user's last message, or with a new message if there is none."""
    place = max((place for place, message in enumerate(messages) if message.get("role") == "user"), default=None)
    if place is None:
        return [*messages, {"role": "user", "content": change("")}]
    changed = {**messages[place], "content": change(messages[place]["content"])}
    return [*messages[:place], changed, *messages[place + 1 :]]


def stop_strings_for(name: str) -> tuple[str, ...]:
    """The stop strings of a built-in template; none for auto, none and files, whose models end with a token."""
    return TEMPLATES[name].stop_strings if name in TEMPLATES else ()


def missing_stop_strings(name: str, *, stop_strings: Collection[str], stop_tokens: Collection[str]) -> tuple[str, ...]:
    """Stop strings that a template needs and the run lacks.

    Args:
        stop_strings: of the run.
        stop_tokens: texts of the tokens that end a completion; most chat models end with <|im_end|> anyway.
    """
    return tuple(text for text in stop_strings_for(name) if text not in stop_strings and text not in stop_tokens)


def _own_template(tokenizer: Any) -> str:
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, Mapping):
        if "default" not in own:
            raise ValueError(
                f"the tokenizer has the chat templates {', '.join(sorted(own))} and no default; "
                "pass the path of one of them as chat_template_name"
            )
        own = own["default"]
    if not own:
        raise ValueError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template; pass chat_template_name none "
            "to join the messages' contents as plain text, the name of a template (for example simple_chat) or a Jinja file"
        )
    return own


def _file(name: str) -> Path:
    """The existing file that `name` must be, since it is not the name of a template."""
    path = Path(name)
    if name and path.is_file():
        return path
    if name and path.is_dir():
        raise ValueError(
            f"chat_template_name={name} is a folder; expected a Jinja file, for example chat_template.jinja"
        )
    if len(path.parts) > 1 or path.suffix in _FILE_SUFFIXES:
        raise ValueError(f"chat_template_name={name}: this file does not exist (looked for {path.absolute()})")
    known = (_OWN, _NO_TEMPLATE, *NAMES)
    opening = re.sub("[^a-z].*", "", name.lower())
    near = difflib.get_close_matches(name.lower(), known, n=3)
    near = near or [other for other in NAMES if opening and other.startswith(opening)]
    advice = f"did you mean {' or '.join(near)}?" if near else f"expected a Jinja file or one of {', '.join(known)}"
    raise ValueError(f"chat_template_name={name!r} is unknown; {advice}")
