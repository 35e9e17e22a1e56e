"""OpenAI's chat completions as turns of a session: bodies, replies, events and errors. Pure.

Fields that would change the distribution that is trained are refused; fields without an effect are ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mgrpo.environments.endpoint.messages import BadRequest, Fault
from mgrpo.environments.endpoint.session import LONGEST_STOP, MOST_STOPS, Turned, TurnRequest

SAMPLING = frozenset(
    ["temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty"]
)
ANSWERED = frozenset(
    [
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
    ]
)
IGNORED = frozenset(
    [
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    ]
)
"""Fields that change neither the model's text nor the sampling."""
_OTHER_DISTRIBUTION = "it would sample from another distribution than the one that is trained"
REFUSED: Mapping[str, tuple[Sequence[object], str]] = {
    "n": ([1], "each call gets one turn; ask again for another"),
    "response_format": ([{"type": "text"}], _OTHER_DISTRIBUTION),
    "logit_bias": ([{}], _OTHER_DISTRIBUTION),
    "top_logprobs": ([0], "only the sampled tokens have log-probabilities"),
    "functions": ([[]], "give them as tools"),
    "function_call": ([], "use tool_choice"),
    "audio": ([], "the model writes text"),
    "modalities": ([["text"]], "the model writes text"),
    "moderation": ([], "nothing is moderated here"),
    "web_search_options": ([], "nothing is searched here"),
}
"""Values without an effect, besides null, and the reason why others are refused, by name."""


def request(body: Mapping[str, Any]) -> TurnRequest:
    """The turn request in a body of `POST /v1/chat/completions`.

    Raises:
        Fault: 400, in OpenAI's words, with the field as `param`.
    """
    for name, value in body.items():
        if name in REFUSED:
            plain, why = REFUSED[name]
            if value is not None and not any(_same(value, each) for each in plain):
                raise _refusal(name, f"{why}; leave it out")
        elif name not in ANSWERED | IGNORED | SAMPLING:
            raise BadRequest(f"Unknown parameter: '{name:.80}'.", "unknown_parameter", name[:80])
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise _refusal("tool_choice", f"only auto and none are possible: with any other {_OTHER_DISTRIBUTION}")
    options = body.get("stream_options")
    if not isinstance(options, Mapping | None):
        raise _refusal("stream_options", "expected an object")
    for name in ("stream", "logprobs"):
        if not isinstance(body.get(name), bool | None):
            raise _refusal(name, "expected true or false")
    limits = [_at_least_one(body.get(name), name) for name in ("max_completion_tokens", "max_tokens")]
    return TurnRequest(
        messages=body.get("messages"),
        tools=body.get("tools") or (),
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=_stops(body.get("stop")),
        reads_calls=choice == "auto",
        settings={name: body[name] for name in SAMPLING if body.get(name) is not None},
    )


def reply(turned: Turned, body: Mapping[str, Any]) -> dict[str, Any]:
    """The completion that answers a request."""
    message = turned.message
    shown = {**message, "content": message["content"] or (None if message.get("tool_calls") else ""), "refusal": None}
    choice = {
        "index": 0,
        "message": shown,
        "finish_reason": _finish_reason(turned),
        "logprobs": _logprobs(turned, body),
    }
    return _head(turned, body, "chat.completion") | {"choices": [choice], "usage": _usage(turned)}


def events(turned: Turned, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The reply as a stream; the deltas add up to the message."""
    head, message = _head(turned, body, "chat.completion.chunk"), turned.message
    has_usage = bool((body.get("stream_options") or {}).get("include_usage"))

    def chunk(delta: Mapping[str, Any], *, finish_reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return _sse(head | {"choices": [choice]} | ({"usage": None} if has_usage else {}))

    yield chunk({"role": "assistant", "content": ""})
    if thought := message.get("reasoning_content"):
        yield chunk({"reasoning_content": thought})
    if message["content"] or body.get("logprobs"):
        yield chunk({"content": message["content"]}, logprobs=_logprobs(turned, body))
    for index, call in enumerate(message.get("tool_calls", ())):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, finish_reason=_finish_reason(turned))
    if has_usage:
        yield _sse(head | {"choices": [], "usage": _usage(turned)})
    yield b"data: [DONE]\n\n"


def error(fault: Fault) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}}


def error_event(fault: Fault) -> bytes:
    """The end of a stream that has begun."""
    return _sse(error(fault))


def _head(turned: Turned, body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{turned.node.number}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or "policy",
    }


def _finish_reason(turned: Turned) -> str:
    if turned.node.finish_reason == "length":
        return "length"
    return "tool_calls" if turned.message.get("tool_calls") else "stop"


def _logprobs(turned: Turned, body: Mapping[str, Any]) -> dict[str, Any] | None:
    return {"content": turned.logprobs, "refusal": None} if body.get("logprobs") else None


def _usage(turned: Turned) -> dict[str, int]:
    num_context, num_sampled = turned.usage
    return {
        "prompt_tokens": num_context,
        "completion_tokens": num_sampled,
        "total_tokens": num_context + num_sampled,
    }


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise _refusal("stop", f"expected a string or a list of at most {MOST_STOPS}")
    if not all(isinstance(each, str) and 0 < len(each) <= LONGEST_STOP for each in stops):
        raise _refusal("stop", f"each must be a string of 1 to {LONGEST_STOP} characters")
    return tuple(stops)


def _at_least_one(value: Any, name: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise _refusal(name, "expected a whole number, at least 1")
    return value


def _same(value: object, plain: object) -> bool:
    return type(value) is type(plain) and value == plain


def _refusal(name: str, why: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{name}': {why}.", "invalid_value", name)


def _sse(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()
