"""What the target of a move has prepared: its answer to *prepare*, which the source gets with the
master's steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from brine.moves.cluster_keys import Agreement
from brine.moves.migration import MachineFacts, MoveError
from brine.moves.move_key import MoveKeyError

_MOST_PORT = 65535


class Prepared(NamedTuple):
    """What the target has prepared.

    :param address: of the target, and *port*: where it talks to the source.
    :param agreement: on the key of the move.
    :param machine: what its QEMU has; None if the guest is off.
    :param disks: whether each disk is copied: by its device id, and by its UUID if the guest is
        off.
    :param nbd_port: where its QEMU takes disks; None if it takes none.
    """

    address: str
    port: int
    agreement: Agreement
    machine: MachineFacts | None
    disks: Mapping[str, bool]
    nbd_port: int | None

    @classmethod
    def of(cls, data: Any, *, is_live: bool) -> Prepared:
        """:raises MoveError: if it can't be read, or lacks something that the move needs."""
        try:
            disks = {str(one): _flag(known["copies"]) for one, known in data["disks"].items()}
            has_port = is_live and any(disks.values())
            return cls(
                _text(data["address"]),
                _port(data["port"]),
                Agreement.of(data),
                _machine(data["machine"]) if is_live else None,
                disks,
                _port(data["nbd_port"]) if has_port else None,
            )
        except (LookupError, TypeError, ValueError, AttributeError, MoveKeyError) as error:
            raise MoveError(f"what the target has prepared can't be read: {error!r:.100}") from None

    def copied(self) -> list[str]:
        """The disks that are copied, as *disks* has them."""
        return sorted(one for one, is_copied in self.disks.items() if is_copied)


def _machine(data: Any) -> MachineFacts:
    devices = {_text(path): _text(one) for path, one in data["devices"].items()}
    return MachineFacts(
        _text(data["machine"]), _number(data["memory"]), _number(data["vcpus"]), devices
    )


def _port(data: Any) -> int:
    if not 0 < _number(data) <= _MOST_PORT:
        raise ValueError(f"no port: {data}")
    return _number(data)


def _number(data: Any) -> int:
    if type(data) is not int:
        raise TypeError(f"no number: {data!r:.50}")
    return data


def _text(data: Any) -> str:
    if type(data) is not str:
        raise TypeError(f"no text: {data!r:.50}")
    return data


def _flag(data: Any) -> bool:
    if type(data) is not bool:
        raise TypeError(f"not true or false: {data!r:.50}")
    return data
