"""``brine node state``: the boot, the kernel and the daemons of a node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from brine.instance.node_state import newest_kernel

_UNITS = [
    ("brine-kvmd.service", "active", "running"),
    ("brine-watcher.timer", "active", "waiting"),
    ("brine-lifecycle-executor.socket", "active", "listening"),
    ("brine-instances.target", "active", "active"),
    ("brine-instance@web1.service", "active", "running"),
    ("brine-claims.service", "failed", "failed"),
    ("postfix.service", "active", "running"),
    ("odd.mount", "failed", "failed"),
    ("brine-confd.service", "active", "running"),
]
_ON_DEMAND = "brine-kvmd.service"


@pytest.mark.parametrize(
    ("running", "others", "newest"),
    [
        ("6.1.0-9-amd64", ["6.1.0-28-amd64", "6.1.0-30-cloud-amd64"], "6.1.0-28-amd64"),
        ("6.1.0-28-amd64", ["6.12.41+deb13-amd64"], "6.12.41+deb13-amd64"),
        ("6.12~rc6-amd64", ["6.12-amd64"], "6.12-amd64"),
        ("6.12-amd64", ["6.12~rc6-amd64"], "6.12-amd64"),
        (
            "5.14.0-503.11.1.el9_5.x86_64",
            ["5.14.0-570.el9_6.x86_64", "5.14.0-570.el9_6.x86_64+debug", "0-rescue-0b5e"],
            "5.14.0-570.el9_6.x86_64",
        ),
    ],
)
def test_the_next_boot_takes_the_newest_kernel_of_the_flavour(
    running: str, others: list[str], newest: str
) -> None:
    assert newest_kernel(running, [f"vmlinuz-{one}" for one in [*others, running]]) == newest


def test_where_the_kernel_is_no_file_of_the_node_none_is_known_to_be_newest() -> None:
    assert newest_kernel("6.1.0-9-amd64", ["vmlinuz-6.1.0-28-amd64"]) == ""


def test_it_shows_the_daemons_that_a_reboot_has_to_bring_back(
    brine: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"unit": unit, "active": active, "sub": sub} for unit, active, sub in _UNITS]
    files = [
        {"unit_file": unit, "state": "disabled" if unit == _ON_DEMAND else "enabled"}
        for unit, _, _ in _UNITS
        if unit.startswith("brine-") and "@" not in unit
    ]
    systemctl = tmp_path / "bin/systemctl"
    systemctl.parent.mkdir()
    (tmp_path / "list-units").write_text(json.dumps(rows))
    (tmp_path / "list-unit-files").write_text(json.dumps(files))
    systemctl.write_text(f'#!/bin/sh\ncat {tmp_path}/"$1"\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}:/usr/bin:/bin")
    status, out, _ = brine("state", "--json", noun="node")
    found = json.loads(out)
    assert status == 0
    assert found["boot_id"]
    assert found["daemons"] == [
        "brine-confd.service",
        "brine-lifecycle-executor.socket",
        "brine-watcher.timer",
    ]
    assert found["failed"] == ["brine-claims.service", "odd.mount"]
    assert "brine-confd.service" in brine("state", noun="node")[1]
    systemctl.write_text("#!/bin/sh\necho no JSON\n")
    status, out, errors = brine("state", "--json", noun="node")
    assert status == 1
    assert "systemctl" in errors
