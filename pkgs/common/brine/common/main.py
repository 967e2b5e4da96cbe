"""The program ``/usr/bin/brine``.

Python turns SIGINT into an exception, wherever it is. Until there is code that catches it, a user
who presses Ctrl-C would get a traceback. So until then the signal ends the process.
"""

from __future__ import annotations

import gc
import signal
import sys
from typing import Any, NoReturn

from brine.common import ALLOCATIONS
from brine.common.ahead import begin_ahead

_is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not of a shell's `&`
if _is_heard:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

_AGAIN_S = 0.01


def run() -> NoReturn:
    """Run ``brine``, and end this process with its exit status."""
    status = main()
    from brine.common.ending import end_process  # nearly all that it loads is there by now

    end_process(status)


def main() -> int:
    """Run ``brine`` and return its exit status, as :func:`brine.common.cli.main` does."""
    gc.set_threshold(ALLOCATIONS)
    sys.unraisablehook = _hear_again
    ahead = begin_ahead(sys.argv[1:])
    from brine.common import cli  # takes most of the time that it takes to begin

    if not _is_heard:
        return cli.main(ahead=ahead)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return cli.main(ahead=ahead)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _hear_again(dropped: Any) -> None:
    """Have a signal come again whose exception came in the callback of a weak reference, say, where
    Python drops an exception, and prints its traceback."""
    error = dropped.exc_value
    number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        number = max(error.code - 128, 0)  # see undo_when_told_to_end()
    if not number:
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(number))
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
