"""Whom to ask: addresses from a command line, from ssconf, or from the configuration."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from brine.common.errors import BrineError
from brine.confd.protocol import PORT

_BRACKETED = re.compile(r"\[(?P<host>[^\[\]]+)\](?::(?P<port>.*))?")
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


class PeersError(BrineError):
    """There is nobody to ask, or an address that is none."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A node that may answer.

    :param host: an IPv4 or IPv6 address, or a name that resolves to some.
    :param port: of UDP.
    """

    host: str
    port: int = PORT

    def __str__(self) -> str:
        """As :func:`parse_peer` takes it; the usual port is left out."""
        if self.port == PORT:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_peer(text: str, *, port: int = PORT) -> Peer:
    """``192.0.2.1``, ``2001:db8::1`` or ``node1.example.com``, each perhaps with a port.

    With a port an IPv6 address stands in brackets: ``[2001:db8::1]:1815``.

    :param port: where *text* names none.
    :raises PeersError: if it is none of these.
    """
    if bracketed := _BRACKETED.fullmatch(text):
        host, port_text = bracketed["host"], bracketed["port"]
    elif text.count(":") == 1:
        host, port_text = text.split(":")
    else:
        host, port_text = text, None
    if not (_is_address(host) or (not bracketed and _HOST.fullmatch(host))):
        hint = "try 192.0.2.1, node1.example.com:1814 or [2001:db8::1]:1814"
        raise PeersError(f"not an address: {text!r}", hint=hint)
    if port_text is None:
        return Peer(host, port)
    if not (port_text.isascii() and port_text.isdigit() and 0 < int(port_text[:6]) < 65536):
        raise PeersError(f"not a port, which is from 1 to 65535: {text!r}")
    return Peer(host, int(port_text))


def parse_peers(texts: Iterable[str], *, port: int = PORT) -> tuple[Peer, ...]:
    """Several addresses, each once."""
    return tuple(dict.fromkeys(parse_peer(text, port=port) for text in texts))


def find_peers(*, ssconf_dir: Path, config_file: Path, port: int = PORT) -> tuple[Peer, ...]:
    """The master candidates, as far as this node knows them.

    :param ssconf_dir: every node has one; its ``master_candidates_ips`` has an address a line.
    :param config_file: a master candidate's own configuration, where ssconf is not filled.
    :param port: that all of them listen on.
    :raises PeersError: if neither names one.
    """
    addresses = _from_ssconf(ssconf_dir) or _from_configuration(config_file)
    if not addresses:
        message = f"this node knows no master candidates: neither {ssconf_dir} nor {config_file}"
        hint = "name one or more with --peer; brine config export-ssconf fills the first"
        raise PeersError(message, hint=hint)
    return parse_peers(addresses, port=port)


def _from_ssconf(folder: Path) -> list[str]:
    file = folder / "ssconf_master_candidates_ips"
    try:
        return file.read_text(encoding="ascii").split()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        hint = "name whom to ask with --peer"
        raise PeersError(f"{file}: can't be read: {why}", hint=hint) from error


def _from_configuration(file: Path) -> list[str]:
    try:
        data = file.read_bytes()
    except (FileNotFoundError, PermissionError):  # most users may not read it
        return []
    except OSError as error:
        raise PeersError(f"{file}: can't be read: {error.strerror}") from error
    from brine.common.config.configuration import Configuration

    nodes = Configuration.parse(data).nodes.values()
    return [node.primary_ip for node in nodes if node.master_candidate and not node.offline]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
