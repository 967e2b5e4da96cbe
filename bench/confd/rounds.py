"""The measuring process: every size, round after round, one daemon and then the other.

Run in the sandbox as `python3 -m bench.confd.rounds PLAN`; takes a Plan and writes a list of Round,
both as JSON.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import machine, sandbox
from bench.confd import daemons, questions
from bench.confd.daemons import Daemon, Running
from bench.confd.generator import Orders, Saw, salt
from bench.confd.questions import KINDS, Kind, Size
from bench.confd.results import Load, Plan, Round
from lab import confd_wire, ganeti, ganeti_config
from lab.confd_answers import RightAnswers, normal
from lab.confd_wire import Asks

CLIENTS = 32
CLIENTS_OF_WORKERS = 128
"""More, since the kernel does not share few evenly: by their address, it is left to chance."""
MANY_BAD = 2000
MANY = 1000
"""So many different queries make a rate of first questions."""
START_PATIENCE_S = 60.0
_ASK_AGAIN_S = 5.0
_LOOK_AGAIN_S = 0.005
REPLACED_EVERY_S = 1.0
ONE_WORKER, TWO_WORKERS = "one worker on all cores", "two workers on all cores"
_ASKED_OF_WORKERS = (Asks.NODE_ROLE, Asks.NODE_IP_OF_INSTANCE_IP, Asks.NODE_INSTANCES)
WORKERS_KINDS = tuple(kind for kind in KINDS if kind.type in _ASKED_OF_WORKERS)
_LONGEST_COMPLAINT = 200
_SERIAL = 1234567
"""Of the configuration, before it is replaced: found in its text nowhere else."""


class Bench:
    """Both daemons' cluster at one size."""

    def __init__(self, size: Size, plan: Plan, cores: machine.Cores) -> None:
        self.size, self._plan, self._cores = size, plan, cores
        config = ganeti_config.ganeti_config(
            nodes=size.nodes, instances=size.instances, serial=_SERIAL
        )
        config["cluster"]["serial_no"] = _SERIAL
        self._text = json.dumps(config)
        self._right = RightAnswers(config)
        self._all_cores = os.sched_getaffinity(0)

    def measure(self, daemon: Daemon) -> Round:
        """Run a daemon through all that is asked, on its core."""
        result = Round(daemon.name, self.size.instances)
        with self._running(daemon, result, {self._cores.daemon}) as running:
            for kind in KINDS:
                if len(queries := questions.queries(kind, self.size)) >= MANY:
                    result.first[kind.title] = self._load(kind, queries, once=True)
            result.start_kib = running.pss_kib()
            for kind in KINDS:
                if self.size.fits(kind):
                    result.warm[kind.title] = self._load(kind)
            result.end_kib = running.pss_kib()
            if daemon.name == daemons.brine().name:
                result.bad_s = {name: _cost(running, bad) for name, bad in questions.BAD.items()}
            result.replacing = self._replace_under_load()
        return result

    def measure_floor(self) -> Round:
        """Run what sends everything back."""
        result = Round("echo", self.size.instances)
        with self._running(daemons.echo(), result, {self._cores.daemon}):
            result.warm[KINDS[0].title] = self._load(KINDS[0], verify=False)
        return result

    def measure_workers(self, count: int) -> Round:
        """Run brine-confd with some workers, and the load, on all cores."""
        name = ONE_WORKER if count == 1 else TWO_WORKERS
        daemon = daemons.renamed(daemons.brine(workers=count), name)
        result = Round(name, self.size.instances)
        with self._running(daemon, result, self._all_cores) as running:
            for kind in WORKERS_KINDS:
                result.warm[kind.title] = self._load(
                    kind, cores=self._all_cores, clients=CLIENTS_OF_WORKERS
                )
            result.end_kib = running.pss_kib()
        return result

    @contextlib.contextmanager
    def _running(self, daemon: Daemon, result: Round, cores: Collection[int]) -> Iterator[Running]:
        daemons.prepare(self._text)
        with daemons.running(daemon, cores, self._cores.generator) as running:
            result.favoured = running.favoured
            try:
                _wait_for_answer(running)
                result.start_s = time.monotonic() - running.started_at
                yield running
            except _SilentError:
                result.trouble = f"gave no answer in {START_PATIENCE_S:g} s"
            if (status := running.exit_status()) is not None:
                words = daemons.last_words(daemon)
                result.trouble += f"{', then' if result.trouble else 'it'} ended with {status}: "
                result.trouble += words

    def _load(
        self,
        kind: Kind,
        queries: list[Any] | None = None,
        *,
        once: bool = False,
        verify: bool = True,
        cores: Collection[int] = (),
        clients: int = CLIENTS,
    ) -> Load:
        orders = Orders(
            port=daemons.PORT,
            key=daemons.KEY.decode(),
            type=kind.type,
            queries=queries or questions.queries(kind, self.size),
            clients=clients,
            seconds=self._plan.seconds,
            warm_up_s=0.0 if once else self._plan.warm_up_s,
            once=once,
            fresh=kind.is_large and not once,
        )
        return self._verified(orders, self._generate(orders, cores), verify=verify)

    def _replace_under_load(self) -> Load:
        kind = next(kind for kind in KINDS if kind.type == Asks.NODE_IP_OF_INSTANCE_IP)
        renames = []
        for number in range(1, self._plan.replacements + 1):
            # As a replacement is: written beside it, and complete before it takes its place.
            file = daemons.CONFIG.with_name(f"config.{number}")
            text = self._text.replace(str(_SERIAL), str(_SERIAL + number))
            file.write_text(text, encoding="utf-8")
            renames.append((str(file), str(daemons.CONFIG)))
        orders = Orders(
            port=daemons.PORT,
            key=daemons.KEY.decode(),
            type=kind.type,
            queries=questions.queries(kind, self.size),
            clients=CLIENTS,
            seconds=REPLACED_EVERY_S * (self._plan.replacements + 1),
            warm_up_s=self._plan.warm_up_s,
            renames=renames,
            rename_every_s=REPLACED_EVERY_S,
        )
        return self._verified(orders, self._generate(orders), versions=len(renames) + 1)

    def _generate(self, orders: Orders, cores: Collection[int] = ()) -> Saw:
        with machine.favoured(cores or {self._cores.generator}):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "bench.confd.generator"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        output, _ = process.communicate(json.dumps(asdict(orders)))
        if process.returncode:
            raise RuntimeError("the load generator failed")
        return Saw(**json.loads(output))

    def _verified(
        self, orders: Orders, saw: Saw, *, verify: bool = True, versions: int = 1
    ) -> Load:
        wrong: list[str] = []
        found = set()
        for number, digits in saw.sample if verify else ():
            query = orders.queries[number % len(orders.queries)]
            try:
                heard = confd_wire.opened(daemons.KEY, bytes.fromhex(digits))
            except (ValueError, KeyError, confd_wire.ForgedError) as error:
                wrong.append(f"{query}: {error}")
                continue
            found.add(heard.serial)
            serials = {
                self._right.serial(orders.type),
                self._right.ganetis_serial(orders.type, query),
            }
            if orders.type != Asks.PING:
                serials |= {_SERIAL + later for later in range(versions)}
            if not (
                heard.salt == salt(number)
                and heard.status == 0
                and heard.serial in serials
                and normal(orders.type, heard.answer) == self._right.answer(orders.type, query)
            ):
                wrong.append(f"{query}: {heard}")
        return Load(
            saw.rate,
            saw.p50_s,
            saw.p99_s,
            saw.worst_s,
            saw.answers,
            saw.lost,
            len(wrong),
            wrong[0][:_LONGEST_COMPLAINT] if wrong else "",
            len(found),
        )


def _cost(running: Running, bad: bytes) -> float:
    """The processor time that the daemon spends on such a datagram, and on receiving it.

    A ping after each says that it is done with; what that costs is taken off.
    """
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", daemons.PORT))
        client.settimeout(_ASK_AGAIN_S)
        ping = confd_wire.request(daemons.KEY, Asks.PING, None, "ping")
        for datagrams in ((ping,), (bad, ping)):
            before_s = running.cpu_s()
            for _ in range(MANY_BAD):
                for datagram in datagrams:
                    client.send(datagram)
                client.recv(65536)
            times.append(running.cpu_s() - before_s)
    return (times[1] - times[0]) / MANY_BAD


class _SilentError(Exception):
    """A daemon that does not begin to answer."""


def _wait_for_answer(running: Running) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("127.0.0.1", daemons.PORT))
        # A daemon may take requests before it can answer, and should not find many when it can.
        client.settimeout(_ASK_AGAIN_S)
        while time.monotonic() < running.started_at + START_PATIENCE_S:
            if running.exit_status() is not None:
                break
            try:
                client.send(confd_wire.request(daemons.KEY, Asks.NODE_IPS, None, "start"))
                # What echoes gives back a request, which has no status.
                if json.loads(json.loads(client.recv(65536)[4:])["msg"]).get("status", 0) == 0:
                    return
            except ConnectionRefusedError:  # nobody has the port yet
                pass
            except TimeoutError:
                continue
            time.sleep(_LOOK_AGAIN_S)
    raise _SilentError


def _all_rounds(plan: Plan) -> Iterator[Round]:
    chosen: list[Daemon] = []
    if plan.with_brine:
        chosen.append(daemons.brine())
    if plan.ganeti:
        package, version = plan.ganeti["package"], plan.ganeti["version"]
        root, program = Path(plan.ganeti["root"]), Path(plan.ganeti["program"])
        chosen.append(daemons.peer(ganeti.Confd(package, version, root, program)))
    cores = machine.share_cores()
    benches = [Bench(Size(instances), plan, cores) for instances in plan.sizes]
    for number in range(plan.rounds):
        # Who goes first changes, so that a machine that warms up favours nobody; and a machine
        # that others disturb for a while does so at every size.
        order = 1 if number % 2 == 0 else -1
        for bench in benches[::order]:
            where = f"{bench.size.instances:,} instances, round {number + 1} of {plan.rounds}"
            yield _told(bench.measure_floor())
            for daemon in chosen[::order]:
                print(f"bench: {where}: {daemon.name}", file=sys.stderr)
                yield _told(bench.measure(daemon))
            if bench is benches[0] and plan.with_brine:
                for workers in (1, 2)[::order]:
                    print(f"bench: {where}: {workers} on all cores", file=sys.stderr)
                    yield _told(bench.measure_workers(workers))


def _told(result: Round) -> Round:
    if result.trouble:
        print(f"bench: {result.daemon}: {result.trouble}", file=sys.stderr)
    return result


def main() -> None:
    """Measure what the plan says."""
    plan = Plan(**json.loads(sys.argv[1]))
    machine.lead_own_group()
    sandbox.hide_state({})
    sandbox.raise_loopback()
    json.dump([asdict(result) for result in _all_rounds(plan)], sys.stdout)


if __name__ == "__main__":
    main()
