"""`./dev demo`: where do these six virtual machines live, and who ended them?

It builds the packages, boots a throw-away Debian node, lets Salt wire it, asks the configuration
daemon for each instance's node, runs six instances of the configuration, plugs a NIC and a disk
into one of them, ends each in another way, shows what Brine says of each, has the watcher bring
back those that crashed, and kills a job that owns an instance.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from demo import cluster, hotplug, owner
from demo.endings import ENDINGS, KILLED
from demo.guest import Guest
from demo.report import Score, Seen, scores, table
from demo.terminal import Terminal
from lab.debian import RELEASES, host_release
from lab.errors import LabError
from lab.guest_image import guest_image
from lab.images import node_image
from lab.node import Node, boot_node
from lab.packages import build_packages
from lab.progress import say, step
from lab.salt import wire
from lab.signals import run_program
from lab.waiting import wait_for

TIMEOUT_S = 30.0


def main(args: Sequence[str]) -> int:
    """Run the demo; the exit status is 1 when anything that is said is wrong."""
    parser = argparse.ArgumentParser(prog="./dev demo", description="Who ended these VMs?")
    parser.add_argument("release", nargs="?", choices=sorted(RELEASES), help="the node's Debian")
    release = parser.parse_args(args).release or host_release()
    try:
        packages = prepare(release)
        with boot_node(release, name="node1") as node:
            with step("salt-call --local state.apply brine (which installs the packages with apt)"):
                states = wire(node, packages, {"brine": cluster.pillar()})
            say(f"{len(states)} states applied: node1 is wired")
            cluster.furnish(node)
            all_scores = show(Terminal(node))
    except LabError as error:
        print(f"dev: error: {error}", file=sys.stderr)
        return 1
    print("", *all_scores, sep="\n")
    return 0 if all(score.right == score.of for score in all_scores) else 1


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


def show(terminal: Terminal) -> list[Score]:
    """Show what Brine does, and return how much of it was right."""
    node = terminal.node
    answers = cluster.ask(terminal)
    running = start_all(terminal)
    plugged = hotplug.plug(terminal, KILLED)
    all_seen = end_all(node)
    print(f"\n{table(all_seen)}", flush=True)
    terminal.type("brine instance list")
    terminal.type(f"brine instance info {KILLED} | sed '/^Spec/,$d'")
    looked_after = watch(terminal)
    Guest(node, KILLED).wait_ready()
    plugged_still = hotplug.use_again(node, KILLED)
    terminal.type(f"journalctl --quiet --no-hostname BRINE_INSTANCE={KILLED}")
    lost = owner.lose(terminal)
    return [answers, running, *scores(all_seen), looked_after, plugged, plugged_still, lost]


def start_all(terminal: Terminal) -> Score:
    """Define and start the instances; return how many run, once their guests have booted."""
    terminal.type("brine instance define --from-config")
    terminal.type("brine instance start --all")
    with step(f"{len(ENDINGS)} guests boot (software emulation)"):
        for ending in ENDINGS:
            Guest(terminal.node, ending.instance).wait_ready()
    terminal.type("brine instance list")
    running = sum(one["status"] == "running" for one in listed(terminal.node).values())
    return Score(running, len(ENDINGS), "instances ran")


def end_all(node: Node) -> list[Seen]:
    """End the instances one after the other, and collect what is said of them."""
    print(flush=True)
    for ending in ENDINGS:
        say(f"{ending.instance}: {ending.done}")
        ending.act(node, ending.instance)
        if ending.verdict:
            wait_for_verdict(node, ending.instance)

    def look() -> list[Seen]:
        now = listed(node)
        return [Seen(one, verdict_of(node, one.instance), now[one.instance]) for one in ENDINGS]

    with suppress(LabError):
        wait_for("the states", lambda: all(one.is_right for one in look()), timeout_s=TIMEOUT_S)
    return look()


def watch(terminal: Terminal) -> Score:
    """Have the watcher look after the instances, as its timer does every five minutes."""
    terminal.type("brine watcher run --dry-run")
    terminal.type("brine watcher run")
    terminal.type("brine instance list")
    now = listed(terminal.node)
    right = sum(now[ending.instance]["status"] == ending.then for ending in ENDINGS)
    return Score(right, len(ENDINGS), "instances came back, or stayed off, as they should")


def wait_for_verdict(node: Node, instance: str) -> None:
    """Wait until there is a verdict, or until there should be one: it is looked for again."""
    with suppress(LabError):
        wait_for(f"a verdict on {instance}", lambda: verdict_of(node, instance), interval_s=0.1)


def verdict_of(node: Node, instance: str) -> Mapping[str, Any]:
    """The journal's record of the first verdict on an instance; empty if there is none."""
    records = node.journal("BRINE_EVENT=verdict", f"BRINE_INSTANCE={instance}")
    return records[0] if records else {}


def listed(node: Node) -> dict[str, dict[str, Any]]:
    """What `brine instance list` says of each instance."""
    found = json.loads(node.run(["brine", "instance", "list", "--json"]).stdout)
    return {one["name"]: one for one in found}


if __name__ == "__main__":
    run_program(main)
