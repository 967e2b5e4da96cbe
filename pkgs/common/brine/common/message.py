"""Kinds of log records, for who may have none to log: :mod:`logging` takes long to load."""

from __future__ import annotations

from dataclasses import dataclass

INFO, NOTICE, WARNING, ERROR = 20, 25, 30, 40
"""Levels of :mod:`logging`, and between two of them syslog's notice: normal, but worth a line of
its own."""


@dataclass(frozen=True)
class Message:
    """A kind of log record that has an entry in the message catalog.

    :param id: 32 hexadecimal digits, given once and never changed.
    :param event: the word for ``BRINE_EVENT=``.
    :param level: of :mod:`logging`, or :data:`NOTICE`.
    """

    id: str
    event: str
    level: int
