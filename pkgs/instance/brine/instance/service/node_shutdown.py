"""``brine-user-shutdowns.service``: notes users' shutdowns when the node shuts down.

What says so is a file in ``/run``, which is gone after a reboot: they would all be started again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from brine.common.errors import BrineError, die
from brine.common.markers import WHO_UNKNOWN
from brine.instance import store
from brine.instance.history import needed_verdicts
from brine.instance.intent import RESTART, keep_users_will, stays_off
from brine.instance.observe import look_at_all
from brine.instance.status import Observed
from brine.instance.store import InstanceError

_PROGRAM = "brine-instance"


def main() -> None:
    """Note it of all instances of this node."""
    try:
        for error in keep_users_wills():
            print(f"{_PROGRAM}: warning: {error}", file=sys.stderr)
    except BrineError as error:
        die(_PROGRAM, error, 1)


def keep_users_wills() -> list[BrineError]:
    """Set instances that their users have shut down to ``down``, by the user.

    :returns: what could not be noted.
    :raises UnitError: if systemd can't be asked.
    """
    failed: list[BrineError] = []
    found: list[Observed] = []
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            failed.append(seen)
        else:
            found.append(seen)
    unmarked = _unmarked(found)
    for seen in found:
        name = seen.name
        if name in unmarked or stays_off(seen):
            try:
                _note(name, is_told=name in unmarked)
            except BrineError as error:
                failed.append(error)
    return failed


def _unmarked(several: Iterable[Observed]) -> frozenset[str]:
    """Those that stay off by their users' will, as far as can be known, and have no marker of that:
    brine-kvmd was off."""
    ends = {seen.name for seen in several if seen.spec.user_shutdown != RESTART}
    try:
        verdicts = needed_verdicts(several)
    except OSError:
        return frozenset()  # there is no journal
    return frozenset(
        name for name in ends if name in verdicts and verdicts[name].who == WHO_UNKNOWN
    )


def _note(name: str, *, is_told: bool) -> None:
    with store.alone(name):
        if keep_users_will(name, is_told=is_told):
            print(f"{_PROGRAM}: {name}: stays off, as its user has shut it down")


if __name__ == "__main__":
    main()
