"""What this part adds to the command line of ``brine node``."""

from __future__ import annotations

import argparse
from typing import Any

from brine.common.cli import add_verb
from brine.vm.arguments import instance_name
from brine.vm.spec import USUAL_QEMU

_MODULE = "brine.instance.node_commands"
_FACTS = "brine.instance.facts_commands"


def _program(text: str) -> str:
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"no absolute path: {text!r}")
    return text


def add_node_verbs(verbs: Any) -> None:
    """Add the verbs about what this node has, and knows of instances."""
    text = "list the instances that this node may not run, or forget the claim of one"
    claims = add_verb(verbs, "claims", f"{_MODULE}:claims", text)
    text = "have this node forget to which node an instance belongs"
    claims.add_argument("--forget", metavar="INSTANCE", type=instance_name, help=text)
    text = "show which processor QEMU can give a guest here"
    cpu = add_verb(verbs, "cpu", f"{_FACTS}:print_cpu", text)
    text = "show what this node can give to instances"
    facts = add_verb(verbs, "facts", f"{_FACTS}:print_facts", text)
    text = "also say why this instance could not start here: JSON, such as the spec of brine"
    text += " instance info --json on another node; - for stdin"
    program = facts.add_mutually_exclusive_group()
    program.add_argument("--spec", metavar="FILE", help=text)
    for each in (cpu, program):
        text = "the program (default: %(default)s)"
        each.add_argument("--qemu", metavar="FILE", type=_program, default=USUAL_QEMU, help=text)
    text = "show what this node has, what instances are promised of it, and what they use"
    info = add_verb(verbs, "info", "brine.instance.usage_commands:node_info", text)
    text = "show the boot, the kernel and the daemons of this node"
    state = add_verb(verbs, "state", "brine.instance.node_state:print_state", text)
    for each in (claims, cpu, facts, info, state):
        each.add_argument("--json", action="store_true", help="print JSON, for programs")
