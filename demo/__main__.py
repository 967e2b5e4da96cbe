"""`./dev demo`: where do these six virtual machines live, and who ended them?

It builds the packages, boots a throw-away Debian node, lets Salt wire it, asks the configuration
daemon for each instance's node, starts six real guests, plugs a NIC and a disk into one of them,
ends each in another way, and shows what Brine says of each.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from demo import cluster, hotplug
from demo.endings import ENDINGS
from demo.report import Seen, table
from lab.debian import RELEASES, host_release
from lab.errors import LabError
from lab.guest import Guest, start_guest
from lab.guest_image import guest_image
from lab.images import node_image
from lab.node import Node, boot_node
from lab.packages import build_packages
from lab.progress import say, step
from lab.salt import wire
from lab.signals import run_program
from lab.waiting import wait_for

VERDICT_TIMEOUT_S = 30.0


def main(args: Sequence[str]) -> int:
    """Run the demo; the exit status is 1 when a verdict or an answer is wrong."""
    parser = argparse.ArgumentParser(prog="./dev demo", description="Who ended these VMs?")
    parser.add_argument("release", nargs="?", choices=sorted(RELEASES), help="the node's Debian")
    release = parser.parse_args(args).release or host_release()
    try:
        packages = prepare(release)
        with boot_node(release, name="node1") as node:
            with step("salt-call --local state.apply brine (which installs the packages with apt)"):
                states = wire(node, packages, {"brine": cluster.pillar()})
            say(f"{len(states)} states applied: node1 is wired")
            with step("asking the configuration daemon where each instance lives"):
                answers = cluster.ask(node)
            with start_guests(node) as guests:
                with step(f"plugging a NIC and a disk into {guests[0].name}"):
                    plugged = hotplug.plug(node, guests[0])
                all_seen = end_guests(node, guests)
            journal = node.shell("journalctl --unit=brine-kvmd.service --no-pager --quiet")
    except LabError as error:
        print(f"dev: error: {error}", file=sys.stderr)
        return 1
    print(f"\n# {answers.command}\n{answers.said}", end="")
    print("\n" + plugged.done + "".join(f"{line}\n" for line in plugged.seen), end="")
    print(f"\n{table(all_seen)}\n\n# journalctl --unit=brine-kvmd.service\n{journal}", end="")
    right, asked = sum(seen.right for seen in all_seen), len(cluster.INSTANCE_IPS)
    print(f"\n{right} of {len(all_seen)} verdicts are right")
    print(f"{answers.right} of {asked} answers to where an instance lives are right")
    print(plugged.trouble or f"{len(plugged.seen)} of 2 devices were plugged in and used")
    is_right = (right, answers.right) == (len(all_seen), asked) and not plugged.trouble
    return 0 if is_right else 1


def prepare(release: str) -> list[Path]:
    """Build what is not there yet, two things at a time; return the packages."""
    with ThreadPoolExecutor(2) as pool:
        packages = pool.submit(build_packages)
        tree = pool.submit(node_image, release)
        guests = pool.submit(guest_image)
        everything: list[Future[Any]] = [packages, tree, guests]
        try:
            for work in as_completed(everything):
                work.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            # What runs beside it can't be ended, and the pool waits for it.
            if isinstance(error, LabError) and not all(work.done() for work in everything):
                say(f"{error.message.splitlines()[0]}: ending when what runs beside it is done")
            raise
        return packages.result()


@contextmanager
def start_guests(node: Node) -> Iterator[list[Guest]]:
    """A guest for each ending."""
    with ExitStack() as stack:
        with step(f"starting {len(ENDINGS)} guests (software emulation)"):
            guests = [stack.enter_context(start_guest(node, one.instance)) for one in ENDINGS]
            for guest in guests:
                guest.wait_ready(timeout_s=120)
        show = ["systemctl", "show", "--property=StatusText", "--value", "brine-kvmd.service"]
        say(f"brine-kvmd.service: {node.run(show).stdout.strip()}")
        yield guests


def end_guests(node: Node, guests: Sequence[Guest]) -> list[Seen]:
    """End the guests one after the other, and collect the verdicts."""
    all_seen = []
    for ending, guest in zip(ENDINGS, guests, strict=True):
        say(f"{ending.instance}: {ending.done}")
        acted_usec = time.time_ns() // 1000
        ending.act(node, guest)
        guest.wait()
        all_seen.append(Seen(ending, acted_usec, verdict_of(node, ending.instance)))
    return all_seen


def verdict_of(node: Node, instance: str) -> dict[str, object]:
    """The journal's record of the verdict on an instance; empty when none comes."""

    def look() -> list[dict[str, object]]:
        return node.journal("BRINE_EVENT=verdict", f"BRINE_INSTANCE={instance}")

    try:
        return wait_for("a verdict", look, timeout_s=VERDICT_TIMEOUT_S, interval_s=0.1)[0]
    except LabError:
        return {}


if __name__ == "__main__":
    run_program(main)
