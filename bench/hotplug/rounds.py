"""The measuring process, in the node: round after round, one contender after the other.

Run as `python3 -m bench.hotplug.rounds PLAN`; takes a Plan and writes Results, both as JSON.
"""

import sys
import time
from collections.abc import Iterator

from bench import machine
from bench.hotplug import contenders, singles
from bench.hotplug.contenders import Contender, Playback
from bench.hotplug.monitor import Order
from bench.hotplug.results import Device, Pair, Plan, Results, series
from bench.measurer import main, tell
from bench.turns import turned


def measure(plan: Plan) -> Results:
    """Run all rounds."""
    plugging = {series(Device.DISK, way): one for way, one in contenders.of_disks(plan).items()}
    plugging |= {series(Device.NIC, way): one for way, one in contenders.of_nics(plan).items()}
    alone = {**singles.of_starts(plan), **singles.of_taps(plan)}
    results = Results(
        pairs={name: [] for name in plugging},
        singles={name: [] for name in alone},
        orders=dict(_orders(plugging)),
    )
    for number in range(plan.rounds):
        tell(f"round {number + 1} of {plan.rounds}")
        for name, contender in turned(list(plugging.items()), number):
            results.pairs[name].append(_pair(contender, plan.settle_s))
        for name, run in turned(list(alone.items()), number):
            results.singles[name].append(run())
    return results


def _pair(contender: Contender, settle_s: float) -> Pair:
    added = contender.add()
    # Until the guest has found the device, it does not hear that it is to let go of it.
    time.sleep(settle_s)
    removed = contender.remove()
    time.sleep(settle_s)
    return Pair(added.total_s, removed.total_s, removed.guest_s)


def _orders(plugging: dict[str, Contender]) -> Iterator[tuple[str, int]]:
    for name, contender in plugging.items():
        if isinstance(contender, Playback):
            steps = [*contender.adding, *contender.removing]
            yield name, sum(isinstance(step, Order) for step in steps)


def _measure(plan: Plan) -> Results:
    machine.lead_own_group()
    return measure(plan)


if __name__ == "__main__":
    sys.exit(main(Plan, _measure))
