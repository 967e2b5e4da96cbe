"""The program ``/usr/bin/brine``.

Python turns SIGINT into an exception, wherever it is. Until there is code that catches it, a user
who presses Ctrl-C would get a traceback. So until then the signal ends the process.
"""

from __future__ import annotations

import gc
import signal
import sys
from typing import NoReturn

from brine.common import ALLOCATIONS
from brine.common.ahead import begin_ahead

_is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not of a shell's `&`
if _is_heard:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run() -> NoReturn:
    """Run ``brine``, and end this process with its exit status."""
    status = main()
    from brine.common.ending import end_process  # nearly all that it loads is there by now

    end_process(status)


def main() -> int:
    """Run ``brine`` and return its exit status, as :func:`brine.common.cli.main` does."""
    gc.set_threshold(ALLOCATIONS)
    ahead = begin_ahead(sys.argv[1:])
    from brine.common import cli  # takes most of the time that it takes to begin

    if not _is_heard:
        return cli.main(ahead=ahead)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return cli.main(ahead=ahead)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
