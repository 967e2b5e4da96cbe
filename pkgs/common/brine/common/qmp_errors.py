"""What goes wrong in talking to a QEMU monitor."""

from __future__ import annotations

from brine.common.errors import BrineError


class QmpError(BrineError):
    """Talking to a QEMU monitor failed."""


class QmpProtocolError(QmpError):
    """The peer does not speak QMP."""


class QmpCommandError(QmpError):
    """QEMU refused a command.

    :param error_class: QEMU's, such as ``GenericError``, ``CommandNotFound`` or ``DeviceNotFound``.
    """

    def __init__(self, command: str, error_class: str, description: str) -> None:
        super().__init__(f"QEMU refused {command}: {description}")
        self.command = command
        self.error_class = error_class
        self.description = description


class QmpTimeoutError(QmpError):
    """QEMU did not answer in time."""


class QmpClosedError(QmpError):
    """The connection ended."""


def no_greeting(path: object, timeout_s: float) -> QmpTimeoutError:
    """The error of a monitor that did not speak in time."""
    return QmpTimeoutError(
        f"{path}: no greeting within {timeout_s:g} s",
        hint="another client may have this monitor: it serves one at a time",
    )
