"""Ending in good order when told to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_IGNORED_IN_BACKGROUND = (signal.SIGINT, signal.SIGQUIT)


def unwind_when_told_to_end() -> None:
    """Let SIGTERM, and a terminal that is closed, unwind this program as ^C does.

    So its nodes and guests end with it. A program under nohup(1) outlives its terminal.
    """

    def unwind(_number: int, _frame: FrameType | None) -> None:
        # Once is enough: timeout(1) tells twice, and a second time would break the unwinding off.
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        # pytest takes SystemExit for one more failed test, and goes on.
        raise KeyboardInterrupt

    for number in _ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, unwind)


def give_commands_default_signals() -> None:
    """Let commands of ours have SIGINT's and SIGQUIT's default actions.

    A shell's background job ignores both, and so would each command of it. This program goes on
    doing so: the kernel resets handlers at exec(), and leaves ignored signals ignored.
    """
    for number in _IGNORED_IN_BACKGROUND:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)


def run_program(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a program's `main` on its arguments, and leave with its status; told to end, with 130."""
    unwind_when_told_to_end()
    give_commands_default_signals()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
