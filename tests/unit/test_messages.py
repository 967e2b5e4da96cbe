"""The message catalogs explain exactly the messages that the code sends."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import brine.common.messages
import brine.confd.messages
import brine.kvmd.messages
import brine.moves.messages
from brine.common.message import Message
from brine.hotplug import messages as hotplug
from brine.instance import messages as instance
from brine.lifecycle import messages as lifecycle
from brine.vm.address import DeviceKind
from brine.watcher import messages as watcher

PKGS = Path(__file__).parents[2] / "pkgs"

PARTS = [
    pytest.param(brine.common.messages, "common", id="common"),
    pytest.param(brine.confd.messages, "confd", id="confd"),
    pytest.param(hotplug, "hotplug", id="hotplug"),
    pytest.param(instance, "instance", id="instance"),
    pytest.param(brine.kvmd.messages, "kvmd", id="kvmd"),
    pytest.param(lifecycle, "lifecycle", id="lifecycle"),
    pytest.param(brine.moves.messages, "moves", id="moves"),
    pytest.param(watcher, "watcher", id="watcher"),
]


def sent(messages: ModuleType) -> list[Message]:
    """The messages of one part, those in its tables included."""
    values = list(vars(messages).values())
    for table in [value for value in values if isinstance(value, dict)]:
        values.extend(table.values())
    return [value for value in values if isinstance(value, Message)]


def catalog_of(part: str) -> str:
    """A part's catalog."""
    return (PKGS / part / "system" / f"brine-{part}.catalog").read_text()


def listed(part: str) -> list[str]:
    """The ids that a part's catalog has entries for."""
    return re.findall(r"^-- ([0-9a-f]{32})$", catalog_of(part), re.MULTILINE)


def entry_fields(message: Message, part: str) -> set[str]:
    """The fields of a record that a message's entry has in its text."""
    entry = catalog_of(part).split(f"-- {message.id}\n")[1].split("\n-- ")[0]
    return set(re.findall(r"@(BRINE_[A-Z]+)@", entry))


def fields_told(
    message: Message,
    say: Callable[[], None],
    text: str,
    caplog: pytest.LogCaptureFixture,
    *,
    part: str,
) -> dict[str, str]:
    """The fields of the one record that comes of it, which must have all that its entry shows."""
    with caplog.at_level(logging.INFO):
        say()
    (record,) = caplog.records
    fields: dict[str, str] = record.__dict__["fields"]
    assert record.getMessage() == text
    assert (fields["MESSAGE_ID"], fields["BRINE_EVENT"]) == (message.id, message.event)
    assert entry_fields(message, part) <= fields.keys()
    return fields


@pytest.mark.parametrize(("messages", "part"), PARTS)
def test_every_message_has_a_catalog_entry_and_the_reverse(messages: ModuleType, part: str) -> None:
    assert sent(messages)
    assert sorted(listed(part)) == sorted(message.id for message in sent(messages))


def test_no_part_is_left_out() -> None:
    with_messages = {file.parts[-3] for file in PKGS.glob("*/system/brine-*.catalog")}
    assert with_messages == {part.id for part in PARTS}


def test_ids_are_unique() -> None:
    ids = [message.id for part in PARTS for message in sent(part.values[0])]  # type: ignore[arg-type]
    assert len(ids) == len(set(ids))


NIC, DISK = DeviceKind.NIC, DeviceKind.DISK
DEVICES = {NIC: "NIC nic-9fb0b0f9-pci-13", DISK: "disk disk-6a0f4f0d-pci-14"}
OF_NIC = {"mac": "52:54:00:00:00:01", "tap": "vm-web1-6zt2qk"}
OF_DISK = {"serial": "6a0f4f0d", "tap": None}
ADD = {"action": "add"}
TOLD_OF_DEVICES = [
    (hotplug.PLUGGED[NIC], NIC, OF_NIC, " (MAC 52:54:00:00:00:01, tap vm-web1-6zt2qk) plugged in"),
    (hotplug.UNPLUGGED[NIC], NIC, OF_NIC, " (MAC 52:54:00:00:00:01, tap vm-web1-6zt2qk) unplugged"),
    (hotplug.PLUGGED[DISK], DISK, OF_DISK, " (serial 6a0f4f0d) plugged in"),
    (hotplug.UNPLUGGED[DISK], DISK, OF_DISK, " (serial 6a0f4f0d) unplugged"),
    (hotplug.REFUSED, DISK, {"reason": "it said no"}, " refused by the guest: it said no"),
    (hotplug.FINISHED, NIC, ADD, ": add was interrupted, and is finished now"),
    (hotplug.UNDONE, NIC, ADD, ": add was interrupted, and is undone now"),
]


@pytest.mark.parametrize(("message", "kind", "known", "text"), TOLD_OF_DEVICES)
def test_what_is_told_of_a_device_has_the_fields_that_its_entry_shows(
    message: Message,
    kind: DeviceKind,
    known: dict[str, str | None],
    text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def say() -> None:
        hotplug.tell(message, "web1", kind, DEVICES[kind].split()[1], **known)

    fields_told(message, say, f"web1: {DEVICES[kind]}{text}", caplog, part="hotplug")


def test_what_is_told_of_a_leftover(caplog: pytest.LogCaptureFixture) -> None:
    def say() -> None:
        hotplug.tell_leftover_removed(
            "web1", "0", "vm-web1-6zt2qk", "tap", "no process has it open"
        )

    text = "web1: removed tap vm-web1-6zt2qk of NIC 0: no process has it open"
    fields_told(hotplug.LEFTOVER_REMOVED, say, text, caplog, part="hotplug")


TOLD_OF_VOLUMES = [
    (watcher.VOLUME_DEGRADED, "", "degraded", "its disk data in vg1 is degraded: partial"),
    (watcher.VOLUME_DEGRADED, "", "missing", "its disk data in vg1 is missing: partial"),
    (watcher.VOLUME_RECOVERED, "", "", "its disk data in vg1 is ok again"),
    (
        watcher.SNAPSHOT_FILLS,
        "one",
        "filling",
        "snapshot one of its disk data in vg1 has little space left: partial",
    ),
    (watcher.SNAPSHOT_LOST, "one", "lost", "snapshot one of its disk data in vg1 is lost: partial"),
    (
        watcher.SNAPSHOT_RECOVERED,
        "one",
        "",
        "snapshot one of its disk data in vg1 has space again: partial",
    ),
]


@pytest.mark.parametrize(("message", "snapshot", "fault", "text"), TOLD_OF_VOLUMES)
def test_what_is_told_of_a_volume_has_the_fields_that_its_entry_shows(
    message: Message, snapshot: str, fault: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    def say() -> None:
        watcher.tell_volume("web1", "data", "vg1", snapshot, fault, "partial")

    fields = fields_told(message, say, f"web1: {text}", caplog, part="watcher")
    assert fields["BRINE_STATUS"] == (fault or "ok")


@pytest.mark.parametrize("message", sent(instance), ids=lambda message: str(message.event))
def test_what_is_told_of_an_instance_has_the_fields_that_its_entry_shows(
    message: Message, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", "alice")
    names = set(re.findall(r"{(\w+)", message.text)) - {"by"}
    text = re.sub("{.*?}", "0.5", message.text.replace("{by}", "alice"))

    def say() -> None:
        instance.tell(message, "web1", **dict.fromkeys(names, 0.5))

    told = fields_told(message, say, f"web1: {text}", caplog, part="instance")
    assert told["BRINE_INSTANCE"] == "web1"


@pytest.mark.parametrize(
    ("sudo", "login", "group", "said"),
    [
        ("alice", "1001", "/user.slice/a.scope", "alice"),
        ("", "0", "/user.slice/session-1.scope", "root"),
        ("", "4294967295", "/system.slice/brine-instances.service", "brine-instances.service"),
        ("", "4294967295", "/", "root"),
        ("", "", "", "root"),
    ],
)
def test_who_asks_is_a_person_or_else_a_unit(
    monkeypatch: pytest.MonkeyPatch, sudo: str, login: str, group: str, said: str
) -> None:
    monkeypatch.setenv("SUDO_USER", sudo)
    files = {"/proc/self/loginuid": login, "/proc/self/cgroup": f"0::{group}" if group else ""}
    monkeypatch.setattr(instance, "text_of", files.__getitem__)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert instance.who_asks() == said


def test_a_command_without_a_journal_says_nothing_but_warnings(tmp_path: Path) -> None:
    program = f"""
import logging, pathlib
from brine.common import journal
from brine.hotplug import messages
journal.SOCKET = pathlib.Path({str(tmp_path / "none")!r})
journal.log_command("brine")
messages.tell(messages.REFUSED, "web1", messages.DeviceKind.NIC, "nic-9fb0b0f9", reason="no")
logging.getLogger("brine.hotplug").warning("a warning")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "brine: warning: a warning\n")
