"""`./dev demo`: from a pillar to virtual machines on three nodes.

It builds the packages, boots three throw-away Debian nodes with a Salt master, and applies a
pillar that declares a cluster and its instances. It asks where each instance lives, powers one off
as its user, and changes the pillar: an instance gets a NIC while it runs, and another one is
stopped. The node of that with the NIC is rebooted: its guest counts on, on another node meanwhile.
Then it moves for itself, and any node can say where it is. The next highstate changes nothing. A
job owns an instance. Brine makes its disk by its size, and the disk grows while the instance runs.
Then the job is killed, and instances crash, which the watcher brings back. With --local, all is on
one node without a master.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from demo import moving, nic, owner
from demo.cluster import INSTANCES, SECOND_BRIDGE, Cluster, fleet, furnish, one_node
from demo.endings import ENDINGS, KILLED, OFF_BY_USER, OFF_IN_PILLAR, PANICKED, Ending
from demo.guest import Guest
from demo.report import Score, Seen, listed, scores, table, verdict_of
from demo.terminal import Terminal
from lab.debian import RELEASES, host_release
from lab.errors import LabError
from lab.guest_image import guest_image
from lab.images import node_image
from lab.packages import build_packages
from lab.progress import say, step
from lab.signals import run_program
from lab.waiting import wait_for

_CONFIG = "/var/lib/brine/config.data"
# For what takes seconds, but not where the machine is loaded.
_TIMEOUT_S = 300.0


def main(args: Sequence[str]) -> int:
    """Run the demo; the exit status is 1 when anything that is said is wrong."""
    parser = argparse.ArgumentParser(prog="./dev demo", description="From pillar to VMs.")
    parser.add_argument("release", nargs="?", choices=sorted(RELEASES), help="the nodes' Debian")
    parser.add_argument("--local", action="store_true", help="one node, without a Salt master")
    chosen = parser.parse_args(args)
    release = chosen.release or host_release()
    boot = one_node if chosen.local else fleet
    try:
        with boot(release, prepare(release)) as cluster:
            for node in cluster.nodes:
                furnish(node)
            all_scores = show(cluster)
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


def show(cluster: Cluster) -> list[Score]:
    """Show what Brine does, and return how much of it was right."""
    cluster.declare()
    cluster.highstate()
    host = Terminal(cluster.nodes[-1])
    found = [
        boot_guests(cluster),
        cluster.ask(),
        power_off(cluster),
        *change(cluster),
    ]
    if cluster.spread:
        moving.begin_count(cluster.node_of(KILLED.instance), KILLED.instance)
        found += moving.reboot(cluster, KILLED.instance)
        found += moving.move(cluster, KILLED.instance)
    owner.begin(host)
    found += [change_nothing(cluster), owner.grow(host)]
    # Its end takes a few seconds, while others crash and come back.
    owner.lose(host)
    return [
        *found,
        *crash(cluster),
        nic.use(cluster.node_of(KILLED.instance), KILLED.instance, "after a crash"),
        owner.wait_ended(host),
    ]


def boot_guests(cluster: Cluster) -> Score:
    """Wait until the guests have booted; return how many instances run."""
    if cluster.spread:
        say("node1 has made the configuration: the master gives the others what is theirs of it")
    with step(f"{len(INSTANCES)} guests boot (software emulation)"):
        for name in INSTANCES:
            Guest(cluster.node_of(name), name).wait_ready()
    if cluster.spread:
        cluster.operator.type("salt-run brine.list")
    else:
        cluster.operator.type("brine instance list")
    running = sum(listed(cluster.node_of(name), name)["status"] == "running" for name in INSTANCES)
    return Score(running, len(INSTANCES), "instances run")


def power_off(cluster: Cluster) -> Score:
    """Have an instance's user power it off, and wait until the cluster's configuration says so."""
    name = OFF_BY_USER.instance
    node = cluster.node_of(name)
    print(flush=True)
    say(f"{name}: {OFF_BY_USER.done}")
    began = time.monotonic()
    Guest(node, name).power_off()
    if not cluster.spread:
        # In a fleet, a beacon and the master do this.
        outbox = ["brine", "outbox", "list", "--json"]
        told = partial(node.run, outbox)
        wait_for(
            "it in the outbox",
            lambda: told().stdout.strip() != "[]",
            timeout_s=_TIMEOUT_S,
            interval_s=0.2,
        )
        record = f"brine config record --node {node.name} -"
        cluster.operator.type(f"{' '.join(outbox)} | {record}")

    writer = cluster.nodes[0]

    def is_recorded() -> bool:
        instances = json.loads(writer.read(_CONFIG))["instances"].values()
        (source,) = (one.get("admin_state_source") for one in instances if one["name"] == name)
        return bool(source == "user")

    with suppress(LabError):
        wait_for("it in the configuration", is_recorded, timeout_s=_TIMEOUT_S)
        took_s = time.monotonic() - began
        say(f"the configuration on {writer.name} has it, {took_s:.1f} s after that")
    said = cluster.operator.type(f"brine config show /instances/{name} | grep admin_state")
    is_shown = '"down"' in said and '"user"' in said
    return Score(int(is_shown), 1, "poweroff is in the cluster's configuration")


def change(cluster: Cluster) -> list[Score]:
    """Change the pillar: one instance gets a NIC while it runs, and another one is to be down."""
    nics = cluster.instances[KILLED.instance]["nics"]
    more = {"ip": "203.0.113.2", "nicparams": {"link": SECOND_BRIDGE}}
    edited: dict[str, dict[str, Any]] = {
        KILLED.instance: {"nics": [*nics, more]},
        OFF_IN_PILLAR.instance: {"admin_state": "down"},
    }
    cluster.edit(edited)
    cluster.bring_about()
    node = cluster.node_of(KILLED.instance)
    Terminal(node).type(f"brine nic list {KILLED.instance}")
    status = listed(cluster.node_of(OFF_IN_PILLAR.instance), OFF_IN_PILLAR.instance)["status"]
    return [
        nic.use(node, KILLED.instance, "while the VM runs"),
        Score(int(status == OFF_IN_PILLAR.status), 1, "instance is down as pillar says"),
    ]


def change_nothing(cluster: Cluster) -> Score:
    """Apply all states once more."""
    answers = cluster.highstate()
    same = sum(not any(one.changes for one in answer) for answer in answers.values())
    return Score(same, len(answers), "nodes are as pillar says")


def crash(cluster: Cluster) -> list[Score]:
    """Crash instances, which come back; return what is right of what is said of all ends."""
    print(flush=True)
    killed, panicked = KILLED.instance, PANICKED.instance
    node = cluster.node_of(killed)
    say(f"{killed}: {KILLED.done}")
    unit = f"brine-instance@{killed}.service"
    node.run(["systemctl", "kill", "--kill-whom=main", "--signal=SIGKILL", unit])
    say(f"{panicked}: {PANICKED.done}")
    Guest(cluster.node_of(panicked), panicked).panic()

    def is_back(ending: Ending) -> bool:
        return look(cluster, ending).is_right

    with suppress(LabError), step("what crashed comes back"):
        for one in (KILLED, PANICKED):
            came = partial(is_back, one)
            wait_for(f"{one.instance} to be back", came, timeout_s=_TIMEOUT_S, interval_s=0.5)
        Guest(node, killed).wait_ready()
    seen = [look(cluster, one) for one in ENDINGS]
    print(f"\n{table(seen)}", flush=True)
    Terminal(node).type(f"journalctl --quiet --no-hostname BRINE_INSTANCE={killed}")
    return scores(seen)


def look(cluster: Cluster, ending: Ending) -> Seen:
    """The report on an instance's end, and on its state now."""
    node = cluster.node_of(ending.instance)
    return Seen(ending, verdict_of(node, ending.instance), listed(node, ending.instance))


if __name__ == "__main__":
    run_program(main)
