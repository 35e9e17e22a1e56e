"""Calls of a user's methods, plain or async, from an asyncio loop that must not stand still."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def called(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result: of a coroutine in the loop, of any other in a thread, which may give something to await."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments, **named)
    result, err = await asyncio.to_thread(_outcome, method, arguments, named)
    if err is not None:
        raise err
    return await result if inspect.isawaitable(result) else result


def _outcome(method: Callable[..., Any], arguments: Any, named: Any) -> tuple[Any, BaseException | None]:
    """The result or what was raised, apart: no asyncio future can hold a StopIteration."""
    try:
        return method(*arguments, **named), None
    except BaseException as err:
        return None, err
