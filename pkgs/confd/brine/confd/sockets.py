"""The UDP sockets that requests come in at."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence

from brine.common.errors import BrineError

_RECEIVE_BUFFER = 4 * 1024 * 1024
"""In bytes; the kernel gives as much of it as net.core.rmem_max allows."""


class PortError(BrineError):
    """An address or port that can't be listened on."""


def open_sockets(
    addresses: Sequence[str], port: int, count: int, *, sole: bool = True
) -> list[list[socket.socket]]:
    """Open *count* sets of sockets, each with one for every address, all on one port.

    The kernel spreads clients over the sets (SO_REUSEPORT, :manpage:`socket(7)`).

    :param addresses: ``::`` takes IPv4 too, unless an IPv4 address is among them; where the
        kernel has no IPv6 it means all IPv4 addresses.
    :param sole: whether nothing else of this user may listen there, this process included.
    :raises PortError: if any of them can't be opened; then none is left open.
    """
    with contextlib.ExitStack() as undo:
        for address in addresses if sole else ():
            # With SO_REUSEPORT a second daemon of the same user would get half of the requests.
            # Without it the kernel says that there is another.
            _open(address, port, addresses, shared=False).close()
        sets = []
        for _ in range(count):
            sockets = []
            for address in addresses:
                opened = _open(address, port, addresses, shared=True)
                undo.callback(opened.close)
                sockets.append(opened)
            sets.append(sockets)
        undo.pop_all()
        return sets


def plain_address(address: str) -> str:
    """The address that a datagram came from, as people know it: to a socket of IPv6 that takes
    IPv4, too, 192.0.2.1 is ::ffff:192.0.2.1."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped) if mapped else address


def _open(address: str, port: int, beside: Sequence[str], *, shared: bool) -> socket.socket:
    wanted = ipaddress.ip_address(address)
    family = socket.AF_INET if wanted.version == 4 else socket.AF_INET6
    if address == "::" and not _has_ipv6():
        family, address = socket.AF_INET, "0.0.0.0"
    with _told(address, port):
        opened = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            if family == socket.AF_INET6:
                alone = address != "::" or any("." in other for other in beside)
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, alone)
            if shared:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            opened.bind(socket.getaddrinfo(address, port, family, socket.SOCK_DGRAM)[0][4])
        except BaseException:
            opened.close()
            raise
        return opened


@contextlib.contextmanager
def _told(address: str, port: int) -> Iterator[None]:
    place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        yield
    except OSError as error:
        hint = None
        if error.errno == errno.EADDRINUSE:
            hint = f"see who has the port: ss -ulpn 'sport = :{port}'"
        elif error.errno == errno.EADDRNOTAVAIL:
            hint = "it must be an address of this node: ip -brief address"
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise PortError(f"can't listen on {place}: {reason}", hint=hint) from error


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as trial:
            trial.bind(("::", 0))
    except OSError:
        return False
    return True
