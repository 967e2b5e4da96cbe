"""The options that `brine nic` and `brine disk` have in common."""

from __future__ import annotations

import errno
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from brine.common import paths
from brine.common.errors import BrineError, UsageError
from brine.hotplug.cli import NIC
from brine.hotplug.errors import HotplugError
from brine.hotplug.target import find_socket, instance_of, runtime_file


def test_an_instance_of_our_own_has_its_runtime_file_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "CONTROL_DIR", tmp_path / "ctrl")
    monkeypatch.setattr(paths, "RUNTIME_DIR", tmp_path)
    monkeypatch.setattr(paths, "SPECS_DIR", tmp_path / "instances")
    own = tmp_path / "web1.example.com.json"
    own.write_text("{}")

    def found(socket: str, runtime: Path | None = None) -> Path | None:
        return runtime_file(Namespace(qmp=tmp_path / socket, runtime=runtime))

    assert found("ctrl/web1.example.com.qmp") == own
    assert found("ctrl/web2.qmp") is None
    assert found("elsewhere/web1.example.com.qmp") is None
    assert found("ctrl/web1.example.com.qmp", tmp_path / "other") == tmp_path / "other"


def test_an_instance_that_has_lost_its_runtime_file_is_not_changed(own_node: Path) -> None:
    paths.SPECS_DIR.mkdir()
    (paths.SPECS_DIR / "web1.json").write_text("{}")
    arguments = Namespace(qmp=paths.CONTROL_DIR / "web1.qmp", runtime=None)
    with pytest.raises(HotplugError, match="web1: there is no .*web1.json") as caught:
        runtime_file(arguments)
    assert "brine instance reboot web1" in str(caught.value.hint)
    # Who names one knows what he does.
    other = own_node / "other.json"
    assert runtime_file(Namespace(qmp=arguments.qmp, runtime=other)) == other


def test_an_instance_is_meant_by_its_socket_or_its_runtime_file(own_node: Path) -> None:
    def meant(qmp: Path, runtime: Path | None = None) -> str | None:
        return instance_of(Namespace(qmp=qmp, runtime=runtime))

    elsewhere = own_node / "web1.qmp"
    assert meant(paths.CONTROL_DIR / "web1.qmp") == "web1"
    assert meant(elsewhere) is None
    assert meant(elsewhere, paths.RUNTIME_DIR / "web1.json") == "web1"
    assert meant(elsewhere, own_node / "web1.json") is None


def test_a_socket_that_leads_nowhere_has_no_runtime_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert runtime_file(Namespace(qmp=tmp_path / "a", runtime=None)) is None


def parsed(*words: str) -> Namespace:
    """What `brine nic WORDS...` would run with."""
    parser = ArgumentParser()
    NIC.configure(parser)
    return parser.parse_args(words)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The socket of an instance web1 that runs."""
    monkeypatch.setattr(paths, "CONTROL_DIR", tmp_path)
    socket = tmp_path / "web1.qmp"
    socket.touch()
    return socket


def test_a_vm_is_an_instances_name_or_a_socket(running: Path) -> None:
    by_name, by_socket = parsed("list", "web1"), parsed("list", "--qmp", "/run/some.qmp")
    for arguments in (by_name, by_socket):
        find_socket(arguments)
    assert (by_name.qmp, by_socket.qmp) == (running, Path("/run/some.qmp"))


def test_a_device_is_named_after_its_vm(running: Path) -> None:
    by_name, by_socket = parsed("remove", "web1", "M"), parsed("remove", "M", "--qmp", "/s")
    assert (by_name.vm, by_name.device) == ("web1", "M")
    assert (by_socket.vm, by_socket.device) == (None, "M")


def test_whose_nic_it_is_is_another_matter() -> None:
    arguments = parsed("add", "--qmp", "/s", "--link", "br0", "--instance", "other")
    assert (arguments.vm, arguments.instance) == (None, "other")
    arguments = parsed("add", "web1", "--link", "br0", "--instance", "other")
    assert (arguments.vm, arguments.instance) == ("web1", "other")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list"], "which VM"),
        (["list", "web1", "--qmp", "/s"], "two names of a VM"),
        (["list", "web2"], "web2: does not run here"),
        (["list", "../web1"], "not the name of an instance"),
        (["list", ""], "not the name of an instance"),
    ],
)
def test_a_vm_that_is_not_to_be_found_is_told(running: Path, words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        find_socket(parsed(*words))
    assert caught.value.hint or said.startswith("not the name")


@pytest.mark.parametrize("verb", [["remove"], ["modify", "--link", "br1"]])
def test_a_device_that_is_forgotten_is_asked_for(running: Path, verb: list[str]) -> None:
    with pytest.raises(UsageError, match="which NIC") as caught:
        find_socket(parsed(*verb, "web1"))
    assert caught.value.hint == "brine nic list web1"


def test_one_that_is_defined_and_does_not_run_is_no_wrong_command_line(own_node: Path) -> None:
    paths.SPECS_DIR.mkdir()
    (paths.SPECS_DIR / "web2.json").write_text("{}")
    with pytest.raises(BrineError, match="^web2: does not run$") as caught:
        find_socket(parsed("add", "web2", "--link", "br0"))
    assert not isinstance(caught.value, UsageError)
    assert caught.value.hint == "brine instance start web2"


def test_who_may_not_look_is_told_who_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(BrineError, match="web1.qmp: Permission denied") as caught:
        find_socket(parsed("list", "web1"))
    assert caught.value.hint == "be root, or in the group brine-ctrl"


def test_what_only_changes_a_file_needs_no_running_vm(running: Path) -> None:
    words = ("add", "web2", "--link", "br0", "--no-hotplug")
    find_socket(parsed(*words))


@pytest.mark.parametrize(
    "words",
    [
        ["list", "--qmp", ""],
        ["remove", "web1", "M", "--runtime", ""],
        ["add", "web1", "--link", "br0", "--mac", "00:00:00:00:00:00"],
        ["add", "web1", "--link", "br0", "--mac", "01:00:5e:00:00:01"],
    ],
)
def test_what_can_not_be_meant_is_a_wrong_command_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed(*words)
    assert caught.value.code == 2
    assert "can't be empty" in (said := capsys.readouterr().err) or "not the MAC address" in said


def test_nothing_is_plugged_into_a_domain_of_xens(own_node: Path) -> None:
    paths.SPECS_DIR.mkdir()
    (paths.SPECS_DIR / "web2.json").write_text('{"hypervisor": "xen-pvh"}')
    with pytest.raises(BrineError, match="^web2: is a domain of Xen's"):
        find_socket(parsed("list", "web2"))
