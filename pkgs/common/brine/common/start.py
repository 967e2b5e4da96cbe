"""What ``/usr/bin/brine`` runs.

Python makes an exception of SIGINT, wherever it is; before there is somebody to catch that, a
person who has changed their mind would get a traceback. So the signal ends the process until then,
as it ends any other program.
"""

from __future__ import annotations

import signal

_is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not of a shell's `&`
if _is_heard:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    """Run ``brine`` and return its exit status, as :func:`brine.common.cli.main` does."""
    from brine.common import cli  # takes most of the time that it takes to begin

    if not _is_heard:
        return cli.main()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return cli.main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
