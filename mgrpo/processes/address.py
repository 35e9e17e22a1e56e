"""The address at which other machines reach this one, by its routes: its name may resolve to something else on each machine.

Debian and many images of clouds map a machine's name to 127.0.1.1 on the machine itself, where no other machine can reach it.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface of a machine over which gloo and NCCL reach others."""
_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""


def own_address(towards: str) -> str:
    """This machine's IPv4 address on the route to `towards`, a name or an address. Nothing is sent.

    Raises:
        OSError: the name does not resolve, or there is no route.
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


def own_interfaces(address: str) -> dict[str, str]:
    """Variables by which gloo and NCCL use the interface with this machine's `address`; each might choose another one.

    NCCL takes the first that is neither the loopback one nor Docker's: where pods or virtual machines have a bridge, often that.
    """
    interface = interface_of(address)
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface} | ({} if interface == "lo" else {"NCCL_SOCKET_IFNAME": f"={interface}"})
