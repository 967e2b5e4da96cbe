"""The command line of ``brine watcher``."""

from __future__ import annotations

import argparse

from brine.common.cli import Command, add_verb
from brine.vm.arguments import instance_name


def _configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, function: str, text: str) -> argparse.ArgumentParser:
        return add_verb(verbs, name, f"brine.watcher.commands:{function}", text)

    def of_a_pass(added: argparse.ArgumentParser) -> None:
        added.add_argument("--dry-run", action="store_true", help="only say what would be done")
        added.add_argument("--json", action="store_true", help="print JSON, for programs")
        added.add_argument(
            "--verbose", action="store_true", help="also print instances that need nothing"
        )

    run = verb("run", "run_pass", "bring each instance to its desired state")
    of_a_pass(run)
    run.add_argument(
        "--ended", action="store_true", help="only look at instances that have just ended"
    )
    of_a_pass(
        verb("cleanup", "clean_up", "remove what is left of ended domains, and start nothing")
    )
    pause = verb("pause", "pause_passes", "pause the watcher")
    pause.add_argument("time", type=str, metavar="TIME", help="how long: 90s, 30m, 2h, 3d, 1w")
    resume = verb("resume", "resume_passes", "end a pause")
    status = verb("status", "print_status", "show the pause, and the tries of each instance")
    forget = verb("forget", "forget_instance", "forget the tries of an instance")
    forget.add_argument("name", metavar="INSTANCE", type=instance_name)
    for each in (pause, resume, status, forget):
        each.add_argument("--json", action="store_true", help="print JSON, for programs")


COMMAND = Command(
    "bring instances to their desired state, and restart those that crashed", _configure
)
