"""Interfaces in the kernel's own words: as much of rtnetlink as it takes to see and change them.

Every tap needs that, and pyroute2, which knows all of it, takes longer to load than a VM takes to
start. Source: :manpage:`netlink(7)`, :manpage:`rtnetlink(7)`, and ``if_link.h`` of Linux.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum

from brine.hotplug.network import Link

Attributes = dict[int, bytes]

IFF_UP = 0x1

_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_LINK_HEADER = struct.Struct("=BxHiII")  # family, type, index, flags, which of them change
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_TYPE_MASK = 0x3FFF  # without what says that there are attributes inside

_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP_CHANGED, _DUMP = 0x1, 0x4, 0x10, 0x300

_LARGEST_ANSWER = 1 << 17
_TIMEOUT_S = 30.0
_MOST_DUMPS = 10


class Request(IntEnum):
    """What can be asked of the kernel."""

    SET = 16
    DELETE = 17
    GET = 18


class Attribute(IntEnum):
    """What an interface has, beside its index and its flags."""

    ADDRESS = 1
    NAME = 3
    MTU = 4
    MASTER = 10
    INFORMATION = 18
    ALIAS = 20
    FILTER = 29
    CARRIER = 33
    CARRIER_CHANGES = 35


_SHORTER = {Attribute.FILTER: struct.pack("=I", 8)}  # RTEXT_FILTER_SKIP_STATS

# Within INFORMATION, and within what it has of a kind.
_KIND, _DATA = 1, 2
_BRIDGE_VLAN_FILTERING = 7
_TUN_OWNER, _TUN_GROUP, _TUN_PERSIST, _TUN_MULTI_QUEUE = 1, 2, 6, 7


class LinkSocket:
    """A connection to the kernel, in the network namespace of the thread that makes it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(_TIMEOUT_S)
        self._number = 0

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def links(self) -> list[Link]:
        """All interfaces.

        :raises OSError: what the kernel said.
        """
        for _ in range(_MOST_DUMPS):
            found, is_whole = self._ask(Request.GET, _DUMP, _link_message(0, _SHORTER))
            if is_whole:
                return list(map(link_of, found))
        raise OSError(errno.EBUSY, "the interfaces change all the time")

    def link(self, name: str) -> Link:
        """The interface of that name.

        :raises OSError: what the kernel said; ENODEV if there is none.
        """
        wanted = {Attribute.NAME: os.fsencode(name) + b"\0", **_SHORTER}
        found, _ = self._ask(Request.GET, _ACK, _link_message(0, wanted))
        return link_of(found[0])

    def change(
        self, index: int, attributes: Mapping[Attribute, bytes], *, up: bool | None = None
    ) -> None:
        """Change an interface.

        :param up: whether it is to be up; None leaves it as it is.
        :raises OSError: what the kernel said.
        """
        flags, mask = (IFF_UP if up else 0), (0 if up is None else IFF_UP)
        self._ask(Request.SET, _ACK, _link_message(index, attributes, flags=flags, mask=mask))

    def delete(self, index: int) -> None:
        """Delete an interface.

        :raises OSError: what the kernel said.
        """
        self._ask(Request.DELETE, _ACK, _link_message(index, {}))

    def _ask(self, request: Request, flags: int, message: bytes) -> tuple[list[bytes], bool]:
        """The kernel's answers, and whether nothing has changed between them."""
        self._number += 1
        size = _HEADER.size + len(message)
        header = _HEADER.pack(size, request, _REQUEST | flags, self._number, 0)
        self._socket.send(header + message)
        found: list[bytes] = []
        is_whole = True
        while True:
            for kind, said, number, body in _messages(self._socket.recv(_LARGEST_ANSWER)):
                if number != self._number:
                    continue  # what is left of an earlier one
                is_whole = is_whole and not said & _DUMP_CHANGED
                if kind in (_ERROR, _DONE):
                    (code,) = struct.unpack_from("=i", body)
                    if code:
                        raise OSError(-code, os.strerror(-code))
                    return found, is_whole
                found.append(body)


def link_of(message: bytes) -> Link:
    """An interface, of the kernel's message."""
    _, _, index, flags, _ = _LINK_HEADER.unpack_from(message)
    has = attributes_in(message[_LINK_HEADER.size :])
    information = attributes_in(has.get(Attribute.INFORMATION, b""))
    kind = _text(information.get(_KIND))
    data = attributes_in(information.get(_DATA, b"")) if kind in ("bridge", "tun") else {}
    of_bridge, of_tap = (data if kind == each else {} for each in ("bridge", "tun"))
    return Link(
        index=index,
        name=_text(has[Attribute.NAME]),
        kind=kind,
        alias=_text(has.get(Attribute.ALIAS)),
        mac=has.get(Attribute.ADDRESS, b"").hex(":"),
        mtu=_number(has.get(Attribute.MTU)) or 0,
        up=bool(flags & IFF_UP),
        carrier=bool(_number(has.get(Attribute.CARRIER))),
        carrier_changes=_number(has.get(Attribute.CARRIER_CHANGES)) or 0,
        master=_number(has.get(Attribute.MASTER)),
        vlan_filtering=bool(_number(of_bridge.get(_BRIDGE_VLAN_FILTERING))),
        persistent=bool(_number(of_tap.get(_TUN_PERSIST))),
        multi_queue=bool(_number(of_tap.get(_TUN_MULTI_QUEUE))),
        user=_number(of_tap.get(_TUN_OWNER)),
        group=_number(of_tap.get(_TUN_GROUP)),
    )


def attributes_in(data: bytes) -> Attributes:
    """The attributes that a message, or one of them, consists of."""
    found, start = {}, 0
    while start + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, start)
        if size < _ATTRIBUTE.size:
            break
        found[kind & _TYPE_MASK] = data[start + _ATTRIBUTE.size : start + size]
        start += _aligned(size)
    return found


def number(value: int) -> bytes:
    """A number as an attribute has it."""
    return struct.pack("=I", value)


def _link_message(
    index: int, attributes: Mapping[Attribute, bytes], *, flags: int = 0, mask: int = 0
) -> bytes:
    parts = [_LINK_HEADER.pack(0, 0, index, flags, mask)]
    for kind, value in attributes.items():
        size = _ATTRIBUTE.size + len(value)
        parts += [_ATTRIBUTE.pack(size, kind), value, bytes(_aligned(size) - size)]
    return b"".join(parts)


def _messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """The type, flags, number and body of each message of a datagram."""
    start = 0
    while start + _HEADER.size <= len(data):
        size, kind, flags, of_request, _ = _HEADER.unpack_from(data, start)
        yield kind, flags, of_request, data[start + _HEADER.size : start + size]
        start += _aligned(size)


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def _text(value: bytes | None) -> str:
    return os.fsdecode(value.rstrip(b"\0")) if value else ""


def _number(value: bytes | None) -> int | None:
    return int.from_bytes(value, sys.byteorder) if value else None
