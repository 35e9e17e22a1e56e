"""Where other machines reach this one, by its routes: what names resolve to may be a machine's own business.

Debian and many images of clouds map a machine's name to 127.0.1.1 on the machine itself, where nobody else can reach it.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""


def own_address(towards: str) -> str:
    """This machine's IPv4 address on the way to `towards`, a name or an address. Nothing is sent.

    Raises:
        OSError: the name is unknown, or there is no way.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        try:
            link.connect((towards, 1))
        except OSError as err:
            raise OSError(f"{socket.gethostname()} has no way to {towards} over IPv4: {err}") from err
        return link.getsockname()[0]


def interface_of(address: str) -> str | None:
    """Name of the interface with this IPv4 address; None for a second address of one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(link, _SIOCGIFADDR, struct.pack("40s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
