"""The HTTP client below the `openai` client, with a bound on the length of every reply.

The `openai` client reads the body of an error whole before it raises, so a bound on its result would come too late.
"""

from __future__ import annotations

from typing import Any

import openai


class BoundedClient(openai.DefaultAsyncHttpxClient):
    """Reads every reply at once, and one longer than `most_bytes` only up to the first chunk beyond them.

    A compressed reply, which was not requested, is not read at all: one chunk of it could become a thousand.
    """

    def __init__(self, most_bytes: int, **options: Any) -> None:
        super().__init__(**options)
        self._most_bytes = most_bytes

    # Any: depending on openai's version, requests and responses are those of httpx or of httpx2.
    async def send(self, request: Any, **options: Any) -> Any:
        response = await super().send(request, **(options | {"stream": True}))
        headers = response.headers.copy()
        encoding = headers.pop("Content-Encoding", "identity")
        content = bytearray()
        try:
            if encoding != "identity":
                content += f"(a reply in Content-Encoding {encoding[:40]}, where identity was asked for)".encode()
            else:
                async for chunk in response.aiter_raw():
                    content += chunk
                    if len(content) > self._most_bytes:
                        break
        finally:
            await response.aclose()
        return type(response)(response.status_code, headers=headers, content=bytes(content), request=request)
