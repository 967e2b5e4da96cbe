"""`brine nic` and `brine disk`: what they load, which VM they mean, and how they are ended."""

from __future__ import annotations

import errno
import os
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brine.common import cli, paths
from brine.common.entry_points import EntryPoint
from brine.common.errors import BrineError, UsageError
from brine.hotplug import commands
from brine.hotplug.cli import NIC
from brine.hotplug.errors import HotplugError
from brine.hotplug.list_commands import target_of
from brine.hotplug.target import Target

# The VM that is meant.


def test_an_instance_of_our_own_has_its_runtime_file_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "CONTROL_DIR", tmp_path / "ctrl")
    monkeypatch.setattr(paths, "RUNTIME_DIR", tmp_path)
    monkeypatch.setattr(paths, "SPECS_DIR", tmp_path / "instances")
    own = tmp_path / "web1.example.com.json"
    own.write_text("{}")

    def found(socket: str, runtime: Path | None = None) -> Path | None:
        return Target(tmp_path / socket, runtime).runtime_file()

    assert found("ctrl/web1.example.com.qmp") == own
    assert found("ctrl/web2.qmp") is None
    assert found("elsewhere/web1.example.com.qmp") is None
    assert found("ctrl/web1.example.com.qmp", tmp_path / "other") == tmp_path / "other"


def test_an_instance_that_has_lost_its_runtime_file_is_not_changed(own_node: Path) -> None:
    paths.SPECS_DIR.mkdir()
    (paths.SPECS_DIR / "web1.json").write_text("{}")
    target = Target(paths.CONTROL_DIR / "web1.qmp")
    with pytest.raises(HotplugError, match="web1: there is no .*web1.json") as caught:
        target.runtime_file()
    assert "brine instance reboot web1" in str(caught.value.hint)
    # Who names one knows what he does.
    other = own_node / "other.json"
    assert Target(target.qmp, other).runtime_file() == other


def test_an_instance_is_meant_by_its_socket_or_its_runtime_file(own_node: Path) -> None:
    def meant(qmp: Path, runtime: Path | None = None) -> str | None:
        return Target(qmp, runtime).instance()

    elsewhere = own_node / "web1.qmp"
    assert meant(paths.CONTROL_DIR / "web1.qmp") == "web1"
    assert meant(elsewhere) is None
    assert meant(elsewhere, paths.RUNTIME_DIR / "web1.json") == "web1"
    assert meant(elsewhere, own_node / "web1.json") is None


def parsed(*words: str) -> Namespace:
    """The arguments of `brine nic WORDS...`, parsed."""
    parser = cli.Parser(prog="brine nic")
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
    by_name, by_socket = parsed("remove", "web1", "M"), parsed("remove", "M", "--qmp", "/s.qmp")
    assert (by_name.device, by_socket.device) == ("M", "M")
    assert target_of(by_name).qmp == running
    assert target_of(by_socket).qmp == Path("/s.qmp")
    # Whose NIC it is is another matter.
    arguments = parsed("add", "--qmp", "/s", "--link", "br0", "--instance", "other")
    assert (arguments.vm, arguments.instance) == (None, "other")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list"], "no VM is named"),
        (["list", "web1", "--qmp", "/s"], "two names of a VM"),
        (["list", "web2"], "web2: does not run here"),
        (["list", "../web1"], "not the name of an instance"),
        (["list", ""], "not the name of an instance"),
    ],
)
def test_a_vm_that_is_not_to_be_found_is_told(running: Path, words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        target_of(parsed(*words))
    assert caught.value.hint or said.startswith("not the name")


@pytest.mark.parametrize("verb", [["remove"], ["modify", "--link", "br1"]])
def test_a_device_that_is_forgotten_is_asked_for(running: Path, verb: list[str]) -> None:
    with pytest.raises(UsageError, match="which NIC") as caught:
        target_of(parsed(*verb, "web1"))
    assert caught.value.hint == "brine nic list web1"


def test_one_that_is_defined_and_does_not_run_is_no_wrong_command_line(own_node: Path) -> None:
    paths.SPECS_DIR.mkdir()
    (paths.SPECS_DIR / "web2.json").write_text("{}")
    with pytest.raises(BrineError, match="^web2: does not run$") as caught:
        target_of(parsed("add", "web2", "--link", "br0"))
    assert not isinstance(caught.value, UsageError)
    assert caught.value.hint == "brine instance start web2"


def test_who_may_not_look_is_told_who_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(BrineError, match="web1.qmp: Permission denied") as caught:
        target_of(parsed("list", "web1"))
    assert caught.value.hint == "be root, or in the group brine-ctrl"


def test_what_only_changes_a_file_needs_no_running_vm(running: Path) -> None:
    words = ("add", "web2", "--link", "br0", "--no-hotplug")
    assert target_of(parsed(*words)).qmp == running.with_name("web2.qmp")


@pytest.mark.parametrize(
    "words",
    [
        ["list", "--qmp", ""],
        ["remove", "web1", "M", "--runtime", ""],
        ["remove", "web1", ""],
        ["add", "web1", "--link", ""],
        ["add", "web1", "--link", "br0", "--mac", ""],
        ["add", "web1", "--link", "br0", "--ip", ""],
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
        target_of(parsed("list", "web2"))


# Verbs that are told to end while they work.


class Vm:
    """A VM in which a search sends this process a signal, and waits for what comes of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.undone: list[int] = []

    @contextmanager
    def working_on(self, *_: object, **__: object) -> Iterator[Vm]:
        try:
            yield self
        except BaseException:
            self.undone.append(self.number)
            raise

    def find(self, *_: object) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0.2)

    def refuse_boot_device(self, *_: object) -> None:
        """It has none."""


@pytest.fixture
def only_the_command_itself(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process keeps its rights and its log, and its signals when all is over."""
    monkeypatch.setattr(commands, "give_up_privileges", lambda _: None)
    monkeypatch.setattr(commands, "log_command", lambda _identifier: None)
    entry = EntryPoint("disk", "brine.hotplug.cli:DISK")
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] * (group == "brine.commands"))
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def remove_a_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, vm: Vm) -> int:
    monkeypatch.setattr(commands, "working_on", vm.working_on)
    return cli.main(["disk", "remove", "/never", "--qmp", str(folder / "web1.qmp")])


@pytest.mark.usefixtures("only_the_command_itself")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_told_to_end_it_undoes_what_it_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    vm = Vm(number)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        status: object = remove_a_disk(monkeypatch, tmp_path, vm)
    except SystemExit as ended:
        status = ended.code
    assert status == 128 + number
    assert vm.undone == [number]
    if number == signal.SIGINT:
        said = capsys.readouterr().err
        assert said.startswith("brine: interrupted: ")


@pytest.mark.usefixtures("only_the_command_itself")
def test_what_was_told_to_outlive_its_terminal_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vm = Vm(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert remove_a_disk(monkeypatch, tmp_path, vm) == 0
    assert vm.undone == []
