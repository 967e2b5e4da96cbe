"""Noting for good which instances their users have shut down, as a node's shutdown forgets it.

What says so is a file in ``/run``, which is gone after a reboot: they would all be started again.
"""

from __future__ import annotations

import sys

from brine.common.errors import BrineError, die
from brine.instance import spec_files
from brine.instance.spec_files import InstanceError
from brine.instance.states import look_at_all
from brine.instance.user_shutdown import keep_users_will, stays_off

_PROGRAM = "brine-instance"


def main() -> None:
    """Note it of all instances of this node."""
    try:
        for error in keep_users_wills():
            print(f"{_PROGRAM}: warning: {error}", file=sys.stderr)
    except BrineError as error:
        die(_PROGRAM, error, 1)


def keep_users_wills() -> list[BrineError]:
    """Have instances that their users have shut down be so for good: ``down``, by the user.

    :returns: what could not be noted.
    :raises UnitError: if systemd can't be asked.
    """
    failed: list[BrineError] = []
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            failed.append(seen)
        elif stays_off(seen):
            try:
                _note(seen.spec.name)
            except BrineError as error:
                failed.append(error)
    return failed


def _note(name: str) -> None:
    with spec_files.alone(name):
        if keep_users_will(name):
            print(f"{_PROGRAM}: {name}: stays off, as its user has shut it down")


if __name__ == "__main__":
    main()
