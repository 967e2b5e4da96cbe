"""What a person at the node's terminal types and reads."""

from __future__ import annotations

from lab.node import Node


class Terminal:
    """Runs commands on a node, and shows them and what they say."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def type(self, command: str, *, check: bool = True) -> str:
        """Run a shell command, and show it with all that it says; return that.

        Raises LabError, with `check`, when it fails.
        """
        print(f"\n# {command}", flush=True)
        said = self.node.shell(f"{command} 2>&1", check=check)
        print(said, end="", flush=True)
        return said
