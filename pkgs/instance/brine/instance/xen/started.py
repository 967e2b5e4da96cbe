"""What xl was given when an instance started: the only trace of it where its spec is gone."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from brine.common import marks
from brine.common.marks import Kind
from brine.common.regular_file import read_regular
from brine.common.wholefile import write_whole
from brine.instance.control import BELIEVED_S, domain_file
from brine.instance.schema import to_json
from brine.instance.spec import Spec
from brine.instance.xen.configuration import configuration

_MODE = 0o600
_WRITER = "# Brine, process "
_RUN = "# In the run "
_SPEC = "# Of the spec "
_HEADING_LINES = 3
_UUID = re.compile(r'^uuid = "([0-9a-f-]{36})"$', re.MULTILINE)


def write(spec: Spec) -> Path:
    """Write the configuration of an instance's domain; returns where.

    :raises OSError: if that fails.
    """
    file = domain_file(spec.name)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    heading = [f"{_WRITER}{os.getpid()}", f"{_RUN}{_run()}", _SPEC + json.dumps(to_json(spec))]
    text = "\n".join([*heading, configuration(spec)])
    write_whole(file, text.encode(), mode=_MODE, alone=True)
    return file


def spec_in(name: str) -> Any:
    """The spec that the domain of an instance was started with, as JSON has it; None if there was
    no such start.

    :raises OSError: if that can't be read.
    :raises ValueError: if it is none.
    """
    for line in _heading(name):
        if line.startswith(_SPEC):
            return json.loads(line.removeprefix(_SPEC))
    return None


def was_asked(name: str) -> bool:
    """Whether the guest of this run was told to shut down not long ago, and may do so now."""
    mark = marks.read_mark(Kind.ASKED, name, run=_run())
    return mark is not None and 0 <= time.time() - mark.made_at < BELIEVED_S


def is_by(name: str, pid: int) -> bool:
    """Whether it is that process which wrote the configuration, and became the xl that reads it.

    :raises OSError: if that can't be read.
    """
    return f"{_WRITER}{pid}" in _heading(name)


def is_of_this_run(name: str) -> bool:
    """Whether the configuration was written by a start of this very run of the unit. One that was
    refused has written none, and what there is is not its own.

    :raises OSError: if that can't be read.
    """
    return f"{_RUN}{_run()}" in _heading(name)


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
    """Whether the start of this run has succeeded. That is asked of no clock, as one may be set
    back meanwhile."""
    return marks.read_mark(Kind.STARTED, name, run=_run()) is not None


def _heading(name: str) -> list[str]:
    """What the configuration says of who wrote it; nothing if there is none."""
    try:
        lines = read_regular(domain_file(name)).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return lines[:_HEADING_LINES]


def _run() -> str:
    """Which run of the unit this process is of; empty if of none."""
    return marks.this_run()
