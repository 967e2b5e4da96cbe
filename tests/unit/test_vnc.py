"""VNC passwords: out of a file, to QEMU, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpCommandError
from brine.instance.kvm.guest import set_password
from brine.instance.kvm.resources import read_password
from brine.instance.spec import Spec
from brine.instance.store import InstanceError
from brine.instance.validate import define
from lab.fake_qemu import FakeQemus, Refused


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "password"


def instance(file: Path | None) -> Spec:
    password = {"vnc_password_file": str(file)} if file else {}
    return define({"name": "web1", "vnc_bind": "::1", **password})


@pytest.mark.parametrize(
    ("content", "password"),
    [
        (b"hunter22", "hunter22"),
        (b"hunter2\n", "hunter2"),
        (b"hunter2\r\n", "hunter2"),
        (b"x\nof web1, changed in May\n", "x"),
        (b" a b \n", " a b "),
        ("éàüö".encode(), "éàüö"),
    ],
)
def test_it_is_the_first_line(file: Path, content: bytes, password: str) -> None:
    file.write_bytes(content)
    assert read_password(instance(file)) == password


def test_a_fifo_in_its_place_holds_nobody_up(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(InstanceError, match="password: can't be read: Is no regular file"):
        read_password(instance(file))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a VNC password has 1 to 8 bytes"),
        (b"\nhunter2", "a VNC password has 1 to 8 bytes"),
        (b"hunter222", "a VNC password has 1 to 8 bytes"),
        ("éàüöx".encode(), "a VNC password has 1 to 8 bytes"),
        (b"hunter\xff", "is no text"),
        (b"hunt\0r", "has characters that can't be typed"),
        (b"hunt\x1br", "has characters that can't be typed"),
    ],
)
def test_what_is_none_is_refused_and_not_told(file: Path, content: bytes, said: str) -> None:
    file.write_bytes(content)
    with pytest.raises(InstanceError) as told:
        read_password(instance(file))
    assert str(told.value) == f"web1: {file}: {said}"
    assert "hunt" not in f"{told.value} {told.value.hint}"


def test_a_file_that_is_not_there(file: Path) -> None:
    with pytest.raises(InstanceError, match="password: can't be read: No such file"):
        read_password(instance(file))
    file.mkdir()
    with pytest.raises(InstanceError, match="password: can't be read: Is a directory"):
        read_password(instance(file))


def test_qemu_is_told_over_its_monitor(file: Path, tmp_path: Path, qemus: FakeQemus) -> None:
    file.write_text("hunter22\n")
    peer = qemus.start(tmp_path / "qmp")
    with QmpClient.connect(peer.path) as qmp:
        set_password(qmp, instance(file))
    assert peer.received == ["qmp_capabilities", "set_password"]
    assert peer.requests[-1]["arguments"] == {"protocol": "vnc", "password": "hunter22"}


def test_without_a_file_qemu_is_told_nothing(tmp_path: Path, qemus: FakeQemus) -> None:
    peer = qemus.start(tmp_path / "qmp")
    with QmpClient.connect(peer.path) as qmp:
        set_password(qmp, instance(None))
    assert peer.received == ["qmp_capabilities"]


def test_a_refusal_of_qemus_does_not_have_it(file: Path, tmp_path: Path, qemus: FakeQemus) -> None:
    file.write_text("hunter22\n")
    peer = qemus.start(tmp_path / "qmp", answers={"set_password": Refused("no VNC here")})
    with QmpClient.connect(peer.path) as qmp:
        with pytest.raises(QmpCommandError, match="no VNC here") as told:
            set_password(qmp, instance(file))
    assert "hunter" not in str(told.value)
