"""Bodies of HTTP replies from programs that are not trusted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

PLAIN = {"Accept-Encoding": "identity"}
"""Headers of requests whose replies `plain_body` reads: of a compressed reply a few kilobytes become gigabytes."""

KEEP_ALIVE_S = 2.0
"""Seconds for which a client reuses an idle connection: a server closes it after 5 s (uvicorn) or more, and a call on a connection
that has just been closed fails."""


async def plain_body(headers: Mapping[str, str], pieces: AsyncIterator[bytes], most_bytes: int) -> bytes:
    """The body of a reply.

    Args:
        headers: the reply's, with case-insensitive names.
        pieces: of the body as it was sent.
    Raises:
        ValueError: it is compressed or longer than `most_bytes`; the caller closes the connection.
    """
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"the answer is in Content-Encoding {encoding[:40]}, asked for was none")
    body = bytearray()
    async for piece in pieces:
        body += piece
        if len(body) > most_bytes:
            raise ValueError(f"the answer is longer than {most_bytes:,} bytes")
    return bytes(body)
