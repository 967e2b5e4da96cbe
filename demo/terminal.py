"""A person's input and output at a node's terminal."""

from __future__ import annotations

from lab.node import Node


class Terminal:
    """Runs commands on a node, and shows them and what they say."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def show(self, command: str) -> None:
        """Show a command that is run in another way."""
        print(f"\n{self.node.name}# {command}", flush=True)

    def type(self, command: str, *, check: bool = True, timeout_s: float = 300) -> str:
        """Run a shell command, and show it with its output, and if it fails, with its messages;
        return that.

        Raises LabError, with `check`, when it fails.
        """
        self.show(command)
        # Salt's own commands warn of what is no concern of people here.
        shell = ["bash", "-uo", "pipefail", "-c", command]
        done = self.node.run(shell, check=check, timeout_s=timeout_s)
        said = done.stdout + (done.stderr if done.returncode else "")
        print(said, end="", flush=True)
        return said
