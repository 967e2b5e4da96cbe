"""The lab's Xen nodes, and the states of domains that real Xen shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.command import CommandError
from lab.errors import LabError
from lab.waiting import wait_for
from lab.xen_domain import (
    create,
    free_memory_mib,
    order,
    rows,
    state_of,
    wait_ready,
    wait_state,
)
from lab.xen_node import XenNode

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("no_domains"),
    # Tests of instances show the other release's.
    pytest.mark.parametrize("release", ["bookworm"], scope="session"),
]

XEN = {"bookworm": "4.17", "trixie": "4.20"}


def test_a_node_is_a_machine(xen_node: XenNode, tmp_path: Path, release: str) -> None:
    node = xen_node
    assert node.run(["xl", "info", "xen_version"]).stdout.startswith(XEN[release])
    assert node.shell("cat; echo err >&2", stdin="given\n") == "given\n"
    with pytest.raises(CommandError) as failed:
        node.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    caught = failed.value
    assert (caught.returncode, caught.stdout, caught.stderr) == (3, "out\n", "err\n")
    assert node.run(["no-such-command"], check=False).returncode == 127
    node.write("/srv/a/b/text", "text\n", mode=0o600)
    assert node.read("/srv/a/b/text") == "text\n"
    (tmp_path / "folder/below").mkdir(parents=True)
    (tmp_path / "folder/below/file").write_text("below")
    node.put(tmp_path / "folder", "/srv/c")
    node.put(tmp_path / "folder/below/file", "/srv/c/other")
    stat = ["stat", "--format=%U:%G %a %s", "/srv/a/b/text", "/srv/c/below/file", "/srv/c/other"]
    assert node.run(stat).stdout == "root:root 600 5\n" + "root:root 644 5\n" * 2
    with pytest.raises(LabError, match="another machine"):
        node.path("/srv")


def test_a_command_that_takes_too_long_is_ended(xen_node: XenNode) -> None:
    with pytest.raises(CommandError, match="took too long"):
        xen_node.run(["sleep", "4321"], timeout_s=10)

    def gone() -> bool:
        return xen_node.run(["pgrep", "--full", "sleep 432[1]"], check=False).returncode == 1

    wait_for("the command to end", gone, timeout_s=120)


def test_states_that_xl_list_shows(xen_node: XenNode) -> None:
    node = xen_node
    seen = {}
    free = free_memory_mib(node)
    create(node, "paused", "-p")
    seen["paused from the start"] = wait_state(node, "paused", "--p---")
    create(node, "web1")
    wait_ready(node, "web1")
    seen["idle"] = wait_state(node, "web1", "-b----")
    node.run(["xl", "pause", "web1"])
    seen["paused when idle"] = wait_state(node, "web1", "-bp---|--p---")
    node.run(["xl", "unpause", "web1"])
    order(node, "web1", "poweroff")
    seen["powered off by its user"] = wait_state(node, "web1", "---s--")
    create(node, "db1")
    wait_ready(node, "db1")
    order(node, "db1", "crash")
    seen["crashed"] = wait_state(node, "db1", ".*c.")
    node.run(["xl", "unpause", "paused"])
    wait_ready(node, "paused")
    order(node, "paused", "busy")
    seen["busy"] = wait_state(node, "paused", "r-----|------")
    node.run(["xl", "shutdown", "--wait", "paused"], timeout_s=600)
    seen["told to shut down"] = state_of(node, "paused")
    print(seen)
    assert seen["crashed"] == "---sc-"
    assert seen["told to shut down"] == "---s--"
    assert len(rows(node)) == 3
    assert free_memory_mib(node) < free - 3 * 50
    for name in ("paused", "web1", "db1"):
        node.run(["xl", "destroy", name])
    assert rows(node) == []
    assert free_memory_mib(node) == free
