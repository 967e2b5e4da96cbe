"""The measuring process, in the node: round after round, one contender after the other.

Run as `python3 -m bench.instance.rounds PLAN`; takes a Plan and writes Results, both as JSON.
"""

import contextlib
import sys
import time

from bench.instance import contenders, lists
from bench.instance.contenders import Contender
from bench.instance.results import Plan, Results, Start
from bench.measurer import main, tell
from bench.turns import turned


def measure(plan: Plan) -> Results:
    """Run all rounds."""
    return Results(starts=measure_starts(plan), lists=measure_lists(plan))


def measure_starts(plan: Plan) -> dict[str, list[Start]]:
    """All starts, in turns."""
    with contextlib.ExitStack() as stack:
        starting = {**contenders.of_guests(plan, stack), **contenders.of_floors(stack)}
        # libvirt asks QEMU once what it can do, and kvmd is started by the first instance.
        for contender in starting.values():
            _start(contender, plan.settle_s)
        starts: dict[str, list[Start]] = {name: [] for name in starting}
        for number in range(plan.rounds):
            tell(f"starts: round {number + 1} of {plan.rounds}")
            for name, contender in turned(list(starting.items()), number):
                starts[name].append(_start(contender, plan.settle_s))
    return starts


def measure_lists(plan: Plan) -> dict[str, list[float]]:
    """All lists, in turns."""
    tell(f"defining {plan.instances} instances, and starting {plan.running}")
    lists.populate(plan)
    lists.favour()
    listing = lists.of_lists()
    for run in listing.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in listing}
    for number in range(plan.rounds):
        tell(f"lists: round {number + 1} of {plan.rounds}")
        for name, run in turned(list(listing.items()), number):
            samples[name].append(run())
    return samples


def _start(contender: Contender, settle_s: float) -> Start:
    found = contender.start()
    contender.stop()
    time.sleep(settle_s)
    return found


if __name__ == "__main__":
    sys.exit(main(Plan, measure))
