"""Ports for servers that other processes open."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens, below those that connections and servers are given without asking for one.

    A port that the kernel gave and that is closed again may be another connection's before its server opens it.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = random.randrange(first_given // 2, first_given)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError("no port is free")
