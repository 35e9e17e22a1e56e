"""Unix sockets between processes of one machine and one user, under names that no file system holds. Standard library only."""

from __future__ import annotations

import os
import secrets
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


def listen(backlog: int) -> tuple[socket.socket, str]:
    """A listening socket and its name, which is random: it cannot mean another listener on another machine.

    The user's number is part of it, so that another user's process need not connect.
    """
    name = f"mgrpo-{os.geteuid()}-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(backlog)
    return listener, name


def connect(name: str, *, timeout_s: float) -> socket.socket:
    """A connection with the process that listens under that name.

    Raises:
        ConnectionRefusedError: no process on this machine does.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """True if the other end runs as this user: every user of the machine can see the names of sockets."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.geteuid()
