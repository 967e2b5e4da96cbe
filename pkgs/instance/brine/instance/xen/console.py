"""The console of a domain, by Xen's own program."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from brine.instance.spec_files import InstanceError
from brine.instance.xen import started, xl
from brine.instance.xen.xl import XlError


def become_console(name: str) -> NoReturn:
    """Become ``xl console``, which has the same way out, and serves several at a time.

    :raises BrineError: if there is no domain, or no xl.
    """
    uuid = started.uuid_of(name)
    domain = xl.domain_of(uuid) if uuid else None
    if domain is None or not domain.lives():
        raise InstanceError(name, "has no domain that runs", hint=f"brine instance info {name}")
    if sys.stdin.isatty():
        print(f"Connected to {name}. Ctrl-] leaves.", file=sys.stderr, flush=True)
    try:
        os.execvp(xl.PROGRAM, [xl.PROGRAM, "console", str(domain.number)])
    except OSError as error:
        raise XlError(f"{xl.PROGRAM}: {error.strerror}") from error
