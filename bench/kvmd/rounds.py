"""The measuring process: every size, round after round, one daemon and then the other.

Run in the sandbox as `python3 -m bench.kvmd.rounds PLAN`; takes a Plan and writes a list of Round,
both as JSON.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import machine, procfs, sandbox
from bench.errors import BenchError
from bench.kvmd import daemons, orders
from bench.kvmd.daemons import Daemon, Running
from bench.kvmd.load import Load, generating

WARM_UP = 3
"""VMs that come and go before the base is measured: a first connection loads what stays."""
TOGETHER = 100
START_PATIENCE_S = 20.0
BREATH_S = 1.0


@dataclass(frozen=True)
class Plan:
    """What to measure, how much; `ganeti_program` is a path in `ganeti_root`, both may be ""."""

    sizes: list[int]
    rounds: int
    samples: int
    bursts: int
    idle_s: float
    ganeti_root: str
    ganeti_program: str
    with_brine: bool


@dataclass
class Round:
    """One daemon at one size, once. None: it did not get so far, and `trouble` says why."""

    daemon: str
    size: int
    real_time: bool = False
    connected: int = 0
    connect_s: float | None = None
    start_s: float | None = None
    base_kib: int | None = None
    vm_kib: float | None = None
    idle_share: float | None = None
    idle_ticks: int | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    together_s: float | None = None
    missed: int = 0
    """VMs whose verdict file never came."""
    lost: int = 0
    """VMs that took the place of one that had ended, and were never connected to."""
    trouble: str = ""


def measure(daemon: Daemon, size: int, plan: Plan, cores: machine.Cores) -> Round:
    """Run a daemon through all phases at one size."""
    result = Round(daemon.name, size)
    with (
        generating(daemon, cores.generator) as load,
        daemons.running(daemon, cores) as running,
    ):
        result.real_time = running.real_time
        _measure_at_work(result, load, running, plan)
        _tell_trouble(result, daemon, running)
    if not result.trouble:
        _measure_start(result, daemon, cores)
    return result


def _measure_at_work(result: Round, load: Load, running: Running, plan: Plan) -> None:
    load.send(orders.Serve(patience_s=0))
    load.connected()
    # The daemon may still be on its way up: its first VM waits for it, with more patience.
    load.send(orders.Appear(WARM_UP, serve=False))
    load.connected()
    load.send(orders.Serve(START_PATIENCE_S))
    if load.connected().connected < WARM_UP:
        result.trouble = f"connected none of {WARM_UP} VMs"
        return
    load.send(orders.EndEach(WARM_UP))
    load.verdicts()
    time.sleep(BREATH_S)
    base = procfs.memory(running.pid)
    result.base_kib = base.pss_kib

    load.send(orders.Appear(result.size - WARM_UP, serve=True))
    seen = load.connected()
    result.connected = seen.most
    if seen.connected < seen.asked:
        result.trouble = f"connected {seen.most:,} of {seen.asked:,} VMs"
    else:
        result.connect_s = seen.last_at - seen.first_at
    if running.exit_status() is not None or seen.connected < WARM_UP + TOGETHER:
        return

    time.sleep(BREATH_S)
    before, began_at = procfs.cpu_time(running.pid), time.monotonic()
    time.sleep(plan.idle_s)
    after, ended_at = procfs.cpu_time(running.pid), time.monotonic()
    result.idle_ticks = after.ticks - before.ticks
    result.idle_share = (after.run_s - before.run_s) / (ended_at - began_at)
    grown_kib = procfs.memory(running.pid).anonymous_kib - base.anonymous_kib
    result.vm_kib = grown_kib / (seen.connected - WARM_UP)

    load.send(orders.EndEach(plan.samples))
    each = load.verdicts()
    result.missed, result.lost = each.missed, each.lost
    if len(each.seconds) > 1:
        percentiles = statistics.quantiles(each.seconds, n=100, method="inclusive")
        result.p50_s, result.p99_s = percentiles[49], percentiles[98]

    bursts: list[float] = []
    for _ in range(plan.bursts):
        load.send(orders.EndTogether(TOGETHER))
        together = load.verdicts()
        bursts += together.seconds
        result.missed += together.missed
        result.lost += together.lost
    if bursts:
        result.together_s = statistics.median(bursts)


def _measure_start(result: Round, daemon: Daemon, cores: machine.Cores) -> None:
    with generating(daemon, cores.generator) as load:
        load.send(orders.Appear(result.size, serve=False))
        load.connected()
        load.send(orders.Serve(START_PATIENCE_S))
        with daemons.running(daemon, cores) as running:
            seen = load.connected()
            if seen.connected < seen.asked:
                result.trouble = f"at start, connected {seen.most:,} of {seen.asked:,} VMs"
            else:
                result.start_s = seen.last_at - running.started_at
            _tell_trouble(result, daemon, running)


def _tell_trouble(result: Round, daemon: Daemon, running: Running) -> None:
    if (status := running.exit_status()) is not None:
        words = daemons.last_words(daemon)
        result.trouble += f"{', then' if result.trouble else 'it'} ended with {status}: {words}"


def _all_rounds(plan: Plan) -> Iterator[Round]:
    chosen: list[Daemon] = []
    if plan.with_brine:
        chosen.append(daemons.brine())
    if plan.ganeti_root:
        chosen.append(daemons.ganeti(Path(plan.ganeti_root), plan.ganeti_program))
    cores = machine.share_cores()
    for size in plan.sizes:
        for number in range(plan.rounds):
            # Who goes first changes, so that a machine that warms up or fills up favours nobody.
            for daemon in chosen if number % 2 == 0 else reversed(chosen):
                print(
                    f"bench: {size:,} VMs, round {number + 1} of {plan.rounds}: {daemon.name}",
                    file=sys.stderr,
                )
                result = measure(daemon, size, plan, cores)
                if result.trouble:
                    print(f"bench: {daemon.name}: {result.trouble}", file=sys.stderr)
                yield result


def allow_descriptors(sizes: list[int]) -> None:
    """Raise the soft limit to two a VM, which the generator needs: a listener and a connection."""
    needed = 2 * max(sizes) + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < needed:
        raise BenchError(
            f"{max(sizes):,} VMs need {needed:,} open files, and the hard limit is {hard:,}",
            hint="raise it (ulimit -Hn, as root), or give smaller --sizes",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


def main() -> None:
    """Measure what the plan says."""
    plan = Plan(**json.loads(sys.argv[1]))
    sandbox.hide_state(daemons.SANDBOX_FILES)
    json.dump([asdict(result) for result in _all_rounds(plan)], sys.stdout)


if __name__ == "__main__":
    main()
