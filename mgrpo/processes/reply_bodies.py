"""Bodies of HTTP replies from programs that are not trusted, through aiohttp."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

PLAIN = {"Accept-Encoding": "identity"}
"""Headers of requests whose replies `plain_body` reads, in sessions without `auto_decompress`: a few kilobytes become gigabytes."""


async def plain_body(reply: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The body; ValueError for one that is compressed or longer than `most_bytes`, whose connection is closed."""
    encoding = reply.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        reply.close()
        raise ValueError(f"the answer is in Content-Encoding {encoding[:40]}, asked for was none")
    body = bytearray()
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            reply.close()
            raise ValueError(f"the answer is longer than {most_bytes:,} bytes")
    return bytes(body)
