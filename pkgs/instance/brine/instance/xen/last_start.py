"""The configuration file of a domain, as the last start of its instance has left it: the domain's
UUID, and the run and the process that wrote it.

It is the only record if the spec is gone. These functions raise OSError if they can't read it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from brine.common.files import read_regular
from brine.vm import end, markers
from brine.vm.files import InstanceFiles
from brine.vm.run import Run
from brine.vm.spec import Spec

if TYPE_CHECKING:
    from brine.instance.xen.xl import Domain

WRITER = "# Brine, process "
RUN = "# In the run "
"""How the first two lines of the file begin."""
_HEADING_LINES = 3
_UUID = re.compile(r'^uuid = "([0-9a-f-]{36})"$', re.MULTILINE)


def is_by(name: str, pid: int) -> bool:
    """Whether that process wrote the configuration, and became xl."""
    return f"{WRITER}{pid}" in _heading(name)


def is_of_this_run(name: str) -> bool:
    """Whether this run of the unit wrote the configuration. A start that was refused has written
    none."""
    return f"{RUN}{markers.this_run()}" in _heading(name)


def is_half_made(spec: Spec, domain: Domain) -> bool:
    """Whether a domain is the leftover of a start that was broken off, as by the end of its xl.

    A domain that another program makes or receives is none, and neither is one that ran and was
    paused then. A start in progress looks the same: the caller knows that there is none.
    """
    if not domain.never_ran() or not (domain.has_no_name() or domain.name == spec.name):
        return False
    run = Run.last(spec.name)
    return end.was_broken_off(run, is_by_run=f"{RUN}{run.id}" in _heading(spec.name))


def uuid_of(name: str) -> str | None:
    """The UUID of the last domain of an instance; None if it had none."""
    found = _UUID.search(_read(name))
    return found[1] if found else None


def _heading(name: str) -> list[str]:
    """The lines about the writer of the configuration; empty if there is none."""
    return _read(name).splitlines()[:_HEADING_LINES]


def _read(name: str) -> str:
    try:
        return read_regular(InstanceFiles(name).domain).decode(errors="replace")
    except FileNotFoundError:
        return ""
