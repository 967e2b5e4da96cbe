"""Names of files, VMs and the like, which may have any bytes, in a line of text."""

from __future__ import annotations


def printable(name: str) -> str:
    """*name* fit for one line of text: odd bytes and control characters become escapes."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
