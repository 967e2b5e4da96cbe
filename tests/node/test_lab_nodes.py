"""The lab's nodes: those that boot side by side."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.command import run_command
from lab.errors import LabError
from lab.node import boot_nodes

NAMES = ["node1", "node2"]


def test_nodes_boot_side_by_side_and_are_gone_afterwards(release: str) -> None:
    with boot_nodes(release, NAMES) as nodes:
        assert [node.run(["hostname"]).stdout.strip() for node in nodes] == NAMES
        assert processes() != ""
    assert processes() == ""


def test_what_boots_is_ended_when_another_node_fails(release: str) -> None:
    def names() -> Iterator[str]:
        yield from NAMES
        assert processes() != ""
        raise LabError("no third node")

    with pytest.raises(LabError, match="no third node"), boot_nodes(release, names()):
        pass
    assert processes() == ""
    assert [*Path(tempfile.gettempdir()).glob(f"{ours()}*")] == []


def ours() -> str:
    """The prefix of the names that the host has for this process's nodes."""
    return f"brine-node-{os.getpid()}-"


def processes() -> str:
    """The numbers of the processes that run such nodes."""
    return run_command(["pgrep", "--full", f"[-]-machine={ours()}"], check=False).stdout
