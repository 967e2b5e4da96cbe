"""The floor for a tap: the system calls that make one a bridge's port, and nothing else.

Source: tuntap.rst, rtnetlink(7) and netlink(7).
"""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_RTM_NEWLINK = 16
_NLMSG_ERROR = 2
_NLM_F_REQUEST, _NLM_F_ACK = 0x1, 0x4
_IFLA_MASTER = 10
_IFF_UP = 0x1

_HEADER = "=IHHII"
_LINK = "=BxHiII"


def open_tap(name: str) -> int:
    """Make a tap; it ends when the descriptor is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    return descriptor


def connect(name: str, bridge: str) -> None:
    """Make an interface a bridge's port, and put it up, in one message."""
    attribute = struct.pack("=HHI", 8, _IFLA_MASTER, socket.if_nametoindex(bridge))
    index = socket.if_nametoindex(name)
    body = struct.pack(_LINK, socket.AF_UNSPEC, 0, index, _IFF_UP, _IFF_UP) + attribute
    size = struct.calcsize(_HEADER) + len(body)
    flags = _NLM_F_REQUEST | _NLM_F_ACK
    header = struct.pack(_HEADER, size, _RTM_NEWLINK, flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(header + body)
        answer = kernel.recv(4096)
    _, kind, _, _, _ = struct.unpack_from(_HEADER, answer)
    (error,) = struct.unpack_from("=i", answer, struct.calcsize(_HEADER))
    if kind == _NLMSG_ERROR and error:
        raise OSError(-error, os.strerror(-error))


@contextlib.contextmanager
def tap(name: str) -> Iterator[int]:
    """A tap that is connected to nothing."""
    descriptor = open_tap(name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
