"""The commands that `./dev` runs as `python3 -m lab.cli COMMAND`. People use ./dev."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lab import cache
from lab.debian import RELEASES, host_release
from lab.errors import LabError
from lab.fedora import DNF_OF_RELEASE
from lab.from_source import run_from_source
from lab.node import boot_node
from lab.packages import build_packages
from lab.progress import step
from lab.rpm_packages import build_rpms
from lab.salt import wire
from lab.signals import run_program
from lab.tree import TREE
from lab.version import repeat_version


def main(args: Sequence[str]) -> int:
    """Run one command of `./dev`, and return its exit status."""
    parser = argparse.ArgumentParser(prog="./dev")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("debs", help="build the Debian packages into dist/, a signed repository")
    rpms = commands.add_parser("rpms", help="build the RPMs into dist/rpms/, a signed repository")
    rpms.add_argument("release", nargs="?", choices=list(DNF_OF_RELEASE), default="trixie")
    node = commands.add_parser("node", help="a shell in a throw-away node")
    node.add_argument("release", nargs="?", choices=sorted(RELEASES), default="")
    run = commands.add_parser("run", help="run a command from the source tree")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="COMMAND")
    commands.add_parser("version", help="write the version of debian/changelog to all places")
    commands.add_parser("clean", help="remove the cached trees")
    given = parser.parse_args(args)
    try:
        if given.command == "debs":
            for package in build_packages():
                print(package.relative_to(TREE))
        elif given.command == "rpms":
            for package in sorted(build_rpms(given.release).glob("*.rpm")):
                print(package.relative_to(TREE))
        elif given.command == "node":
            return shell_in_node(given.release or host_release())
        elif given.command == "run":
            run_from_source(given.args)
        elif given.command == "version":
            for file in repeat_version():
                print(file.relative_to(TREE))
        else:
            cache.clean()
    except LabError as error:
        print(f"dev: error: {error}", file=sys.stderr)
        return 1
    return 0


def shell_in_node(release: str) -> int:
    """A shell on the terminal in a node that Salt has wired, as an operator's would be."""
    packages = build_packages()
    with boot_node(release) as node:
        with step(f"wiring a node, {release}, with Salt"):
            wire(node, packages)
            install = [
                "apt-get",
                "install",
                "--yes",
                "--quiet=2",
                "brine-confd",
                "brine-instance",
                "brine-watcher",
                "brine-lifecycle",
            ]
            node.run(["env", "DEBIAN_FRONTEND=noninteractive", *install], timeout_s=300)
        print("A throw-away node: it ends with this shell, and nothing of it stays.", flush=True)
        return node.enter()


if __name__ == "__main__":
    run_program(main)
