"""Locks of threads beside those of Ganeti's library, and locks across processes.

A worker (``lock_worker.py``) has each contender in a process of its own: one imports Ganeti's
modules, the other one Brine's.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench import machine
from bench.harness import PYTHON, Plan, Report, Table, TableRow, in_turns
from bench.lock_worker import LISTENER, NAMES
from lab.errors import LabError
from lab.tree import TREE

PAIR_LIMIT, SET_LIMIT, ACROSS_LIMIT = 0.5, 0.2, 3.0
"""Beside the peer's: a pair in process, a set, and a pair across processes."""
CLIENTS = (1, 10, 100)

BRINE, PEER, FLOOR = "brine", "ganeti", "a bare mutex"
LOCKD, ECHO, LIBRARY = "brine-lockd", "echo", "by LockClient, 1 client"
TITLES = {
    "pair": "a lock, acquired and released",
    "shared": "the same, shared",
    "set": f"{NAMES} names, acquired together and released",
}

_WORKER = TREE / "bench/lock_worker.py"
_BACKLOG = 128
_LONGEST_S = 120.0
# A child of this process becomes the server: systemd, too, passes the socket as descriptor 3.
_START_LOCKD = "import runpy; runpy.run_module('brine.cluster.lock_server', run_name='__main__')"
_START_ECHO = (
    f"import runpy, sys; sys.argv = ['', 'echo']; runpy.run_path({str(_WORKER)!r}, "
    "run_name='__main__')"
)

Samples = Mapping[str, Sequence[Mapping[str, float]]]
"""Seconds by what was measured, in the order of the rounds, by contender."""


def measure(plan: Plan) -> Report:
    """Have each contender in turns, those within a process first."""
    assert plan.library
    pairs = plan.pick(50_000, 10_000, 1_000)
    seconds = plan.pick(1.0, 0.5, 0.05)
    ours = {"PYTHONPATH": os.pathsep.join(map(str, sorted(TREE.glob("pkgs/*"))))}
    threads: dict[str, Callable[[], Mapping[str, float]]] = {
        BRINE: partial(_worker, ours, "threads", "ours", pairs),
        PEER: partial(_worker, plan.library.environment(), "threads", "peer", pairs),
        FLOOR: partial(_worker, {}, "threads", "floor", pairs),
    }
    machine.lead_own_group()
    with (
        machine.placed(os.sched_getaffinity(0)) as is_ahead,
        _server(_START_LOCKD, ours) as lockd,
        _server(_START_ECHO, {}) as echo,
    ):
        within = in_turns("threads", plan.rounds, threads, warm_up=True)
        loads: dict[str, Callable[[], Mapping[str, float]]] = {
            f"{name}, {count}": partial(_worker, {}, "clients", path, count, seconds)
            for count in CLIENTS
            for name, path in ((LOCKD, lockd), (ECHO, echo))
        }
        loads[LIBRARY] = partial(_worker, ours, "library", lockd, pairs // 10)
        # A pair of the peer's belongs to the same moments as the pairs that are beside it.
        across = in_turns("processes", plan.rounds, {**loads, PEER: threads[PEER]}, warm_up=True)
    heads = [
        *machine.description(),
        f"peer: {plan.library.package} {plan.library.version}; rounds: {plan.rounds}",
        f"priority {'high' if is_ahead else 'normal: do not compare'}",
    ]
    notes = [
        f"{PEER}'s library has no sets any more: {NAMES} of its locks are acquired one by one",
        f"{ECHO}: a server that keeps no locks and has each answer at once",
    ]
    tables = [_within(within), _across(across)]
    return Report(heads, tables, {"within": within, "across": across}, notes)


def _within(samples: Samples) -> Table:
    rows = []
    for what, title in TITLES.items():
        values = {name: _median(samples, name, what) for name in (BRINE, FLOOR, PEER)}
        row = TableRow.of_values(title, "us", values)
        rows.append(row.at_most(SET_LIMIT if what == "set" else PAIR_LIMIT))
    return Table("within a process", rows, (BRINE, FLOOR, PEER))


def _across(samples: Samples) -> Table:
    rows = []
    for name in [*map(str, CLIENTS), LIBRARY]:
        ours = name if name == LIBRARY else f"{LOCKD}, {name}"
        echo = f"{ECHO}, {CLIENTS[0] if name == LIBRARY else name}"
        title = name if name == LIBRARY else f"{name} client{'s' if name != '1' else ''}"
        values = {
            LOCKD: _median(samples, ours, "pair"),
            ECHO: _median(samples, echo, "pair"),
            PEER: _median(samples, PEER, "pair"),
        }
        rows.append(TableRow.of_values(title, "us", values).at_most(ACROSS_LIMIT))
    return Table(
        "across processes: claimed and released", rows, (LOCKD, ECHO, f"{PEER}, in process")
    )


def _median(samples: Samples, contender: str, what: str) -> float | None:
    found = [one[what] for one in samples[contender] if what in one]
    return statistics.median(found) if found else None


def _worker(environment: Mapping[str, str], *order: object) -> Mapping[str, float]:
    """What a worker has measured."""
    what = " ".join(map(str, order))
    try:
        done = subprocess.run(
            [PYTHON, "-P", str(_WORKER), *map(str, order)],
            env={**os.environ, "PYTHONPATH": "", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{what}: no end after {_LONGEST_S:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise LabError(f"{what} ended with {done.returncode}: {said}")
    found: Mapping[str, float] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def _server(start: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """A server at work; yields the path of its socket."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder, "socket")
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        move = f"import os; os.dup2({listener.fileno()}, {LISTENER}); "
        process = subprocess.Popen(
            [PYTHON, "-P", "-c", move + start],
            env={**os.environ, "PYTHONPATH": "", **environment},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
        )
        try:
            yield path
        finally:
            process.kill()
            process.wait()
