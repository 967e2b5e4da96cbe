"""Who has put a record in the journal: anybody can, and with any fields but those of the kernel's
knowledge (:manpage:`systemd.journal-fields(7)`)."""

from __future__ import annotations

import pwd
from collections.abc import Mapping
from typing import Any

KVMD_USER = "brine-kvmd"


def is_from(entry: Mapping[str, Any], user: str) -> bool:
    """Whether a record is root's or that system user's.

    :param entry: as systemd's journal.Reader gives it.
    """
    sender = entry.get("_UID")
    if sender == 0:
        return True
    try:
        return sender == pwd.getpwnam(user).pw_uid
    except KeyError:
        return False
