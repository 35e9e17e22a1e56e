"""Copies of files between nodes, over separate connections, each of which proves that it holds the run's secret.

Copies are not encrypted. Standard library and the run's own greeting only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mgrpo.checkpoint.folder import LocalFolder, step_of
from mgrpo.checkpoint.manifest import file_name
from mgrpo.processes.tcp_links import GREETING_S, MAX_PROOF_BYTES, is_proof, notice_silence, reach

TIMEOUT_S = 60.0
"""Seconds within which the other end of a copy must go on."""
_MAX_LINE = 4096
_CHUNK = 4 << 20
Address = tuple[str, int]


class CopyServer:
    """Server of files in the folder of a node's near states, for ranks that hold the secret. Always `close` it."""

    def __init__(self, folder: Path, host: str, secret: str) -> None:
        """
        Args:
            host: the address at which other nodes reach this one.
        """

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    _serve(self.request, folder, secret)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None: ...

        self._server = Server((host, 0), Handler)
        self.address: Address = host, self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="near-states", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._server.shutdown()
        self._server.server_close()


def put(address: Address, secret: str, path: Path) -> None:
    """Copy a file of a step's folder to the server; it is on its disk when this returns.

    Raises:
        OSError: it did not in time, or has no room.
    """
    with _ask(address, secret, {"put": path.name, "folder": path.parent.name, "bytes": path.stat().st_size}) as link:
        with open(path, "rb") as file:
            link.sendfile(file)
        if (answer := _line(link)) != {"kept": path.name}:
            raise OSError(f"{address[0]} has kept no copy of {path.name}: {answer.get('error', 'it does not say why')}")


def fetch(address: Address, secret: str, folder: str, name: str, place: Path) -> Path:
    """Copy of a file of a step's folder in `place`; FileNotFoundError if the server has none."""
    place.mkdir(parents=True, exist_ok=True)
    with _ask(address, secret, {"get": name, "folder": folder}) as link:
        answer = _line(link)
        if "bytes" not in answer:
            raise FileNotFoundError(f"{address[0]} has no {folder}/{name}")
        partial = place / f"{name}.partial-{secrets.token_hex(4)}"
        with open(partial, "wb") as file:
            _receive(link, file, int(answer["bytes"]))
    os.replace(partial, place / name)
    return place / name


@contextlib.contextmanager
def _ask(address: Address, secret: str, question: Mapping[str, Any]) -> Iterator[socket.socket]:
    try:
        link, nonce, _ = reach(address, timeout_s=TIMEOUT_S)
    except ValueError as err:
        raise OSError(f"{address[0]}:{address[1]} is not a rank of this run: {err}") from err
    with link.connection as connection:
        connection.settimeout(TIMEOUT_S)
        link.prove(secret, nonce, number=0)
        connection.sendall(json.dumps(question).encode() + b"\n")
        yield connection


def _serve(connection: socket.socket, folder: Path, secret: str) -> None:
    connection.settimeout(GREETING_S)
    notice_silence(connection)
    nonce = secrets.token_hex(16)
    connection.sendall(json.dumps({"nonce": nonce, "is_secret": True}).encode() + b"\n")
    if not is_proof(_read_line(connection, MAX_PROOF_BYTES), secret, nonce):
        return
    connection.settimeout(TIMEOUT_S)
    question = _line(connection)
    if step_of(str(question["folder"])) is None:
        return
    place, name = folder / question["folder"], file_name(question.get("put") or question.get("get"))
    if "get" in question:
        try:
            file = open(place / name, "rb")  # noqa: SIM115  closed below
        except OSError:
            connection.sendall(b"{}\n")
            return
        with file:
            connection.sendall(json.dumps({"bytes": os.fstat(file.fileno()).st_size}).encode() + b"\n")
            connection.sendfile(file)
        return
    try:
        with _Incoming(LocalFolder(place), connection, int(question["bytes"])) as incoming:
            incoming.keep(name)
        answer = {"kept": name}
    except OSError as err:
        answer = {"error": f"{err.strerror or err}"}
    connection.sendall(json.dumps(answer).encode() + b"\n")


class _Incoming:
    """A file that comes over a connection; nothing stays of it unless it has come whole."""

    def __init__(self, folder: LocalFolder, connection: socket.socket, num_bytes: int) -> None:
        self._folder, self._connection, self._num_bytes = folder, connection, num_bytes
        self._partial = f"incoming-{secrets.token_hex(8)}"

    def __enter__(self) -> _Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._folder.remove(self._partial)

    def keep(self, name: str) -> None:
        with self._folder.create(self._partial) as file:
            _receive(self._connection, file, self._num_bytes)
        os.replace(self._folder.path / self._partial, self._folder.path / name)


def _receive(connection: socket.socket, file: BinaryIO, num_bytes: int) -> None:
    remaining = num_bytes
    while remaining:
        data = connection.recv(min(_CHUNK, remaining))
        if not data:
            raise ConnectionResetError("the other end has gone")
        file.write(data)
        remaining -= len(data)


def _line(connection: socket.socket) -> dict[str, Any]:
    data = json.loads(_read_line(connection, _MAX_LINE))
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _read_line(connection: socket.socket, limit: int) -> bytes:
    line = b""
    # One byte at a time: later bytes are not for this function.
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data or len(line) > limit:
            raise ConnectionResetError("no line")
        line += data
    return line[:-1]
