"""``brine-user-shutdowns.service``: notes users' shutdowns when the node shuts down.

What says so is a file in ``/run``, which is gone after a reboot: they would all be started again.
"""

from __future__ import annotations

from brine.common.errors import BrineError, die, warn
from brine.instance import store
from brine.instance.history import needs_verdict, verdicts_on
from brine.instance.intent import RESTART, keep_users_will, stays_off
from brine.instance.observe import Observed, look_at_all
from brine.instance.store import InstanceError
from brine.vm.markers import WHO_UNKNOWN

_PROGRAM = "brine-instance"


def main() -> None:
    """Note it of all instances of this node."""
    try:
        for error in keep_users_wills():
            warn(str(error), program=_PROGRAM)
    except BrineError as error:
        die(_PROGRAM, error, 1)


def keep_users_wills() -> list[BrineError]:
    """Set instances that their users have shut down to ``down``; returns what was not noted."""
    failed: list[BrineError] = []
    found: list[Observed] = []
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            failed.append(seen)
        else:
            found.append(seen)
    # Some stay off by their users' will, and have no marker of that: brine-kvmd was off.
    ends = [seen for seen in found if needs_verdict(seen) and seen.spec.user_shutdown != RESTART]
    verdicts = verdicts_on(ends)
    for seen in found:
        name = seen.name
        is_unmarked = name in verdicts and verdicts[name].who == WHO_UNKNOWN
        if not is_unmarked and not stays_off(seen):
            continue
        try:
            with store.alone(name):
                if keep_users_will(name, is_told=is_unmarked):
                    print(f"{_PROGRAM}: {name}: stays off, as its user has shut it down")
        except BrineError as error:
            failed.append(error)
    return failed


if __name__ == "__main__":
    main()
