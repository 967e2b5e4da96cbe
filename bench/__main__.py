"""`python3 -m bench NAME ...` runs a benchmark: its command line, and where it is measured."""

import argparse
import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from bench.harness import PYTHON, Length, Plan, Report, tell
from bench.nodes import node_with
from lab import ganeti, sandbox, xen_packages
from lab.debian import host_release
from lab.debian_kernel import run_on_debian_kernel
from lab.errors import LabError
from lab.machine import Machine, require_commands
from lab.packages import build_packages
from lab.progress import step
from lab.signals import run_program
from lab.tree import TREE
from lab.xen_node import boot_xen_node

MEASURE = "--measure"
_LVM_PROGRAMS = ("lvm", "dmsetup")
_EMULATED_S = 1800.0
_SCRIPT = """
import sys
sys.path[:0] = {path}
from bench.__main__ import main
sys.exit(main({order}))
"""
_NODE_FOLDER = "/srv/brine"


@dataclass(frozen=True)
class Subject:
    """A benchmark, which the module of its name measures.

    :param packages: of Brine's, which a throw-away node has, with those that they need. Without
        any, and without the rest, the daemon of the subject's name runs from the source tree,
        beside Ganeti's.
    :param needs: of Debian's, beside those; their archives are fetched as libvirt's are.
    :param library: a module of Ganeti's library; the subject is measured beside it, from the source
        tree.
    :param maps_devices: whether it runs on Debian's kernel instead, from the source tree: the
        kernel of a node may lack device-mapper.
    :param has_own_nodes: whether it boots nodes itself, and measures from outside of them.
    :param rounds: how many, and with ``--quick``; a trial has one.
    :param sizes: the numbers of instances or VMs; each must be at least *smallest*, and is that in
        a trial.
    """

    packages: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    with_libvirt: bool = False
    library: str = ""
    maps_devices: bool = False
    has_own_nodes: bool = False
    runs_on_xen: bool = False
    rounds: tuple[int, int] = (16, 3)
    sizes: tuple[int, ...] = ()
    smallest: int = 1

    @property
    def has_daemon(self) -> bool:
        """Whether it is a daemon from the source tree, beside Ganeti's."""
        return not (self.packages or self.library or self.maps_devices or self.has_own_nodes)


SUBJECTS = {
    "confd": Subject(rounds=(3, 1), sizes=(200, 20_000), smallest=10),
    "hotplug": Subject(("brine-hotplug",), with_libvirt=True),
    "instance": Subject(("brine-instance", "brine-kvmd"), with_libvirt=True),
    "kvmd": Subject(rounds=(3, 1), sizes=(200, 1000, 5000), smallest=103),
    "lifecycle": Subject(("brine-lifecycle",), rounds=(1, 1), sizes=(10, 100, 1000), smallest=2),
    "locks": Subject(library="ganeti.locking"),
    "moves": Subject(has_own_nodes=True, rounds=(8, 3)),
    "salt": Subject(("brine-instance", "brine-kvmd", "brine-watcher")),
    "storage": Subject(
        ("brine-instance", "brine-storage"), needs=("lvm2",), with_libvirt=True, rounds=(12, 3)
    ),
    "volumes": Subject(maps_devices=True, rounds=(8, 3)),
    "watcher": Subject(("brine-watcher",), runs_on_xen=True),
}


def main(arguments: Sequence[str]) -> int:
    """Measure a subject, and print what was found."""
    name, *rest = arguments
    if name == MEASURE:
        return _measure(*rest)
    subject = SUBJECTS[name]
    options = _parser(name, subject).parse_args(rest)
    try:
        plan = Plan(
            rounds=options.rounds or (*subject.rounds, 1)[options.length],
            length=options.length,
            sizes=options.sizes or _sizes(subject, options.length),
            on_xen=options.xen,
            peer=ganeti.daemon(name) if subject.has_daemon else None,
            library=ganeti.library(subject.library) if subject.library else None,
        )
        found = json.loads(_measured(name, subject, plan))
    except LabError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    print(found.pop("text"))
    if options.json:
        found = {"plan": asdict(plan), **found}
        options.json.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
    for missing in found["missing"]:
        print(f"bench: error: no number of Brine's: {missing}", file=sys.stderr)
    return 0 if found["is_right"] and not found["missing"] else 1


def _sizes(subject: Subject, length: Length) -> Sequence[int]:
    return [subject.smallest] if subject.sizes and length is Length.TRIAL else subject.sizes


def _parser(name: str, subject: Subject) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"bench {name}")
    parser.set_defaults(sizes=(), xen=False, length=Length.FULL)
    many, few = subject.rounds
    parser.add_argument("--rounds", type=number, help=f"how many ({many}; --quick: {few})")
    shorter = parser.add_mutually_exclusive_group()
    for length, help_ in (
        (Length.QUICK, "fewer rounds, shorter times"),
        (Length.TRIAL, "one round, as short and small as can be: is every number there?"),
    ):
        shorter.add_argument(
            f"--{length.name.lower()}",
            dest="length",
            action="store_const",
            const=length,
            help=help_,
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every number")
    if subject.sizes:

        def sizes(text: str) -> list[int]:
            found = [number(part) for part in text.replace("_", "").split(",")]
            if min(found) < subject.smallest:
                raise argparse.ArgumentTypeError(f"must be at least {subject.smallest}")
            return found

        help_ = f"how many instances or VMs ({','.join(map(str, subject.sizes))})"
        parser.add_argument("--sizes", type=sizes, metavar="N,...", help=help_)
    if subject.runs_on_xen:
        help_ = "instead: domains of an emulated Xen's"
        parser.add_argument("--xen", action="store_true", help=help_)
    return parser


def number(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


# ---- where it is measured


def _measured(name: str, subject: Subject, plan: Plan) -> str:
    """Have another process measure it: in a node, or in a sandbox that has the source tree."""
    order = [MEASURE, name, pickle.dumps(plan).hex()]
    if plan.peer:
        tell(f"peer: {plan.peer.package} {plan.peer.version}")
        return sandbox.run_module("bench", order, needs=[TREE, plan.peer.root])
    if plan.library:
        tell(f"peer: {plan.library.package} {plan.library.version}")
        return sandbox.run_module("bench", order, needs=[TREE, plan.library.root])
    if subject.maps_devices:
        return _measured_on_debian_kernel(order)
    if subject.has_own_nodes:
        return _measured_beside_nodes(order)
    with _xen_node() if plan.on_xen else _node(subject) as node:
        return _measured_in_node(node, order)


def _node(subject: Subject) -> contextlib.AbstractContextManager[Machine]:
    return node_with(subject.packages, needs=subject.needs, with_libvirt=subject.with_libvirt)


def _measured_beside_nodes(order: Sequence[str]) -> str:
    parts = sorted(TREE.glob("pkgs/*"))
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, (TREE, *parts)))}
    return _said_by([PYTHON, "-P", "-m", "bench", *order], environment)


def _measured_in_node(node: Machine, order: Sequence[str]) -> str:
    for folder in ("bench", "lab", "salt"):
        node.put(TREE / folder, f"{_NODE_FOLDER}/{folder}")
    # -P: the tree's own code stays out of what is measured, which is installed.
    python = ["env", f"PYTHONPATH={_NODE_FOLDER}", PYTHON, "-P", "-m", "bench"]
    return _said_by(node.command([*python, *order]))


def _said_by(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        text = f"the measuring process ended with {done.returncode}"
        raise LabError(text, hint="its message is above")
    return done.stdout


def _measured_on_debian_kernel(order: Sequence[str]) -> str:
    require_commands("this benchmark", _LVM_PROGRAMS)
    parts = sorted(TREE.glob("pkgs/*"))
    script = _SCRIPT.format(path=[str(TREE), *map(str, parts)], order=[*order])
    with step("measuring on Debian's kernel, in emulation"):
        said = run_on_debian_kernel(
            ["-P", "-c", script],
            paths=[TREE / "bench", TREE / "lab", *parts, Path("/etc/os-release")],
            programs=_LVM_PROGRAMS,
            timeout_s=_EMULATED_S,
        )
    return said.splitlines()[-1]  # what comes before tells of the progress


@contextlib.contextmanager
def _xen_node() -> Iterator[Machine]:
    packages, release = build_packages(), host_release()
    with boot_xen_node(release) as node:
        with step("installing Brine in a Xen node"):
            xen_packages.install(node, release, packages)
        yield node


def _measure(name: str, plan: str) -> int:
    """Be the measuring process: write what was found."""
    try:
        report: Report = import_module(f"bench.{name}").measure(pickle.loads(bytes.fromhex(plan)))
    except Exception as error:
        # Brine's own errors are known only where Brine is installed.
        if not hasattr(error, "hint"):
            raise
        hint = "" if isinstance(error, LabError) else f"\n  hint: {error.hint}"
        print(f"bench: error: {error}{hint}", file=sys.stderr)
        return 1
    found = {"text": report.text(), "missing": report.missing(), **asdict(report)}
    json.dump(found, sys.stdout, default=str)
    return 0


if __name__ == "__main__":
    run_program(main)
