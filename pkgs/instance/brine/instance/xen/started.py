"""What xl was given when an instance started: the only trace of it where its spec is gone."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from brine.common.regular_file import read_regular
from brine.common.wholefile import write_whole
from brine.instance.control import BELIEVED_S, asked_file, control_of, domain_file
from brine.instance.marks import remove_mark
from brine.instance.spec import Spec
from brine.instance.xen.configuration import configuration

_MODE = 0o600
_WRITER = "# Brine, process "
_UUID = re.compile(r'^uuid = "([0-9a-f-]{36})"$', re.MULTILINE)


def write(spec: Spec) -> Path:
    """Write the configuration of an instance's domain; returns where.

    :raises OSError: if that fails.
    """
    file = domain_file(spec.name)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_mark(asked_file(spec.name))
    text = f"{_WRITER}{os.getpid()}\n{configuration(spec)}"
    write_whole(file, text.encode(), mode=_MODE, alone=True)
    return file


def was_asked(name: str) -> bool:
    """Whether the guest of an instance was told to shut down not long ago, and may do so now."""
    try:
        age_s = time.time() - asked_file(name).lstat().st_mtime
    except OSError:
        return False
    return 0 <= age_s < BELIEVED_S


def is_by(name: str, pid: int) -> bool:
    """Whether it is that process which wrote the configuration, and became the xl that reads it.

    :raises OSError: if that can't be read.
    """
    try:
        first, _, _ = read_regular(domain_file(name)).partition(b"\n")
    except FileNotFoundError:
        return False
    return first.decode(errors="replace") == f"{_WRITER}{pid}"


def uuid_of(name: str) -> str | None:
    """The UUID of the domain that was started last for an instance; None if it was none of Xen's.

    :raises OSError: if that can't be read.
    """
    try:
        found = _UUID.search(read_regular(domain_file(name)).decode(errors="replace"))
    except FileNotFoundError:
        return None
    return found[1] if found else None


def has_come_up(name: str) -> bool:
    """Whether the start that wrote the configuration has succeeded."""
    try:
        started = control_of(name).started.lstat().st_mtime_ns
        return started >= domain_file(name).stat().st_mtime_ns
    except FileNotFoundError:
        return False
