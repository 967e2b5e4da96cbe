"""The measuring process, in the node: round after round, one contender after the other.

Run as `python3 -m bench.hotplug.rounds PLAN`; takes a Plan and writes Results, both as JSON.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

from bench import machine
from bench.errors import BenchError
from bench.hotplug import contenders, singles
from bench.hotplug.contenders import Contender, Playback
from bench.hotplug.monitor import Order
from bench.hotplug.results import Device, Pair, Plan, Results, series
from bench.turns import turned
from brine.common.errors import BrineError


def measure(plan: Plan, runner: asyncio.Runner) -> Results:
    """Run all rounds."""
    plugging = {
        series(Device.DISK, way): one for way, one in contenders.of_disks(plan, runner).items()
    }
    plugging |= {
        series(Device.NIC, way): one for way, one in contenders.of_nics(plan, runner).items()
    }
    alone = {**singles.of_starts(plan), **singles.of_taps(plan)}
    results = Results(
        pairs={name: [] for name in plugging},
        singles={name: [] for name in alone},
        orders=dict(_orders(plugging)),
    )
    for number in range(plan.rounds):
        print(f"bench: round {number + 1} of {plan.rounds}", file=sys.stderr)
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


def main() -> int:
    """Measure what the plan says."""
    plan = Plan(**json.loads(sys.argv[1]))
    machine.lead_own_group()
    try:
        with asyncio.Runner() as runner:
            json.dump(asdict(measure(plan, runner)), sys.stdout)
    except (BenchError, BrineError) as error:
        print(f"bench: error: {error}\n  hint: {error.hint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
