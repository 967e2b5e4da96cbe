"""Kinds of log records, and the sender of a record of the journal."""

from __future__ import annotations

import pwd
from collections.abc import Mapping
from typing import Any, NamedTuple

INFO, NOTICE, WARNING, ERROR = 20, 25, 30, 40
"""Levels of :mod:`logging`, and between two of them syslog's notice: normal, but worth a line of
its own."""


class Message(NamedTuple):
    """A kind of log record that has an entry in the message catalog.

    :param id: 32 hexadecimal digits, given once and never changed.
    :param event: the word for ``BRINE_EVENT=``.
    :param text: of the record, with fields in braces; empty where each record has its own.
    """

    id: str
    event: str
    level: int
    text: str = ""


class EventKind(NamedTuple):
    """A kind of record that operators' programs are told of; see :mod:`brine.common.node_event`.

    :param name: in one word, such as ``crash``.
    :param sender: the user whose records count, beside root.
    """

    message: Message
    name: str
    sender: str = "root"


# Any process can put a record in the journal. Only the fields that begin with an underscore are the
# journal's own (:manpage:`systemd.journal-fields(7)`).

KVMD_USER = "brine-kvmd"


def is_from(entry: Mapping[str, Any], user: str) -> bool:
    """Whether root or that system user has sent a record of systemd's journal.Reader."""
    sender = entry.get("_UID")
    if sender == 0:
        return True
    try:
        return sender == pwd.getpwnam(user).pw_uid
    except KeyError:
        return False
