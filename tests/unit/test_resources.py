"""The node's resources for a start of QEMU: files, memory, a password, and systemd's limits."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.instance.kvm import confinement, resources
from brine.instance.kvm.confinement import set_limits
from brine.instance.kvm.programs import version_of, with_machine_version
from brine.instance.kvm.resources import check_node, read_password
from brine.instance.registry import define_instance
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.vm.spec import Spec, SpecError, parse
from lab.scripted_systemctl import ScriptedSystemctl

MIB = 1 << 20
UNIT = "brine-instance@web1.service"


def web1(**keys: Any) -> Spec:
    return completed({"name": "web1", "accel": "tcg", "qemu": "/bin/true", **keys})


@pytest.mark.parametrize(
    ("machine", "then"),
    [
        ("pc", "pc-i440fx-7.2"),
        ("q35", "pc-q35-7.2"),
        ("pc-i440fx-6.0", "pc-i440fx-6.0"),
        ("isapc", "isapc"),
    ],
)
def test_a_start_records_the_version_of_the_machine_type(
    tmp_path: Path, machine: str, then: str
) -> None:
    qemu = tmp_path / "qemu"
    qemu.write_text(
        "#!/bin/sh\n[ \"$*\" = '-machine help' ] && cat <<END\nSupported machines are:\n"
        "pc                   Standard PC (i440FX + PIIX, 1996) (alias of pc-i440fx-7.2)\n"
        "pc-i440fx-7.2        Standard PC (i440FX + PIIX, 1996) (default)\n"
        "q35                  Standard PC (Q35 + ICH9, 2009) (alias of pc-q35-7.2)\n"
        "isapc                ISA-only PC\nEND\n"
    )
    qemu.chmod(0o755)
    assert with_machine_version(web1(qemu=str(qemu), machine=machine)).machine == then


@pytest.mark.parametrize("qemu", ["/bin/true", "/bin/false", "/none/here", "/etc/passwd"])
def test_a_qemu_that_lists_no_machine_types_changes_no_spec(qemu: str) -> None:
    assert with_machine_version(web1(qemu=qemu)).machine == "pc"


@pytest.mark.parametrize("key", ["firmware", "kernel", "initrd"])
def test_what_is_no_file_is_not_booted(tmp_path: Path, key: str) -> None:
    """QEMU would wait for somebody to write into a FIFO."""
    os.mkfifo(tmp_path / "image")
    keys = {"kernel": "/bin/true"} if key == "initrd" else {}
    with pytest.raises(InstanceError, match="image: .*Is no regular file"):
        check_node(web1(**keys, **{key: str(tmp_path / "image")}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qemu", "{}"),
        ("firmware", "{}"),
        ("extra_arguments", ["-netdev", "tap,id=n,downscript={},script=/etc/qemu-ifup"]),
    ],
)
def test_a_program_that_others_may_change_is_neither_defined_nor_started(
    own_node: Path, tmp_path: Path, key: str, value: str | list[str]
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "program").touch(0o755)
    program = str(folder / "program")
    given = (
        value.format(program) if isinstance(value, str) else [one.format(program) for one in value]
    )
    spec = {"name": "web1", "accel": "tcg", "qemu": "/bin/true", key: given}
    with pytest.raises(SpecError, match=f"^/{key}.* others than root may write {folder}"):
        define_instance(spec)
    with pytest.raises(InstanceError, match=f"web1: .* others than root may write {folder}"):
        check_node(completed(spec))
    folder.chmod(0o755)
    define_instance(spec)
    check_node(completed(spec))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda at: os.symlink("/dev/zero", at)])
def test_a_qemu_that_is_no_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """To open a FIFO would wait for a process that writes into it."""
    program = tmp_path / "qemu"
    make(program)
    assert with_machine_version(web1(qemu=str(program))).machine == "pc"
    with pytest.raises(InstanceError, match=f"^web1: {program}: Is (no regular file|a directory)$"):
        version_of(web1(qemu=str(program)))
    with pytest.raises(InstanceError, match=f"^web1: {program}: there is no such program$"):
        check_node(web1(qemu=str(program)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_the_version_is_asked_as_a_user_without_privileges(tmp_path: Path) -> None:
    program = tmp_path / "qemu"
    program.write_text("#!/bin/sh\necho version $(id -u).$(id -G)\n")
    program.chmod(0o755)
    tmp_path.chmod(0o700)  # which that user can't enter
    assert version_of(web1(qemu=str(program))) == (65534, 65534)
    program.chmod(0o700)
    with pytest.raises(InstanceError, match=f"{program}: .*Permission denied") as refused:
        version_of(web1(qemu=str(program)))
    assert refused.value.hint == f"chmod o+rx {program}"


def test_a_file_does_not_give_way_to_the_socket_of_vnc(tmp_path: Path) -> None:
    """QEMU would remove it, as root."""
    place = tmp_path / "vnc"
    check_node(web1(vnc_bind=str(place)))
    place.write_text("important")
    for each in (place, tmp_path):
        with pytest.raises(InstanceError, match="is there already, and is no socket"):
            check_node(web1(vnc_bind=str(each)))
    place.unlink()
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(place))
    check_node(web1(vnc_bind=str(place)))


def test_the_nodes_own_uefi_is_no_path() -> None:
    check_node(web1(firmware="uefi"))


@pytest.mark.parametrize(
    ("model", "limit_mib", "may_lock", "starts"),
    [
        ("none", None, False, True),
        ("none", 1, True, True),
        ("none", 1, False, False),
        ("none", 1024, False, False),  # and nothing for QEMU itself
        ("none", 2048, False, True),
        ("pool", 1, True, False),  # another user may not what root may
        ("pool", None, True, True),
    ],
)
def test_memory_that_may_not_be_locked_is_told_before_qemu_ends_at_it(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    limit_mib: int | None,
    *,
    may_lock: bool,
    starts: bool,
) -> None:
    limit = resource.RLIM_INFINITY if limit_mib is None else limit_mib * MIB
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resources, "may", lambda _: may_lock)
    check_node(web1(security_model=model))
    spec = web1(security_model=model, memory_mib=1024, memory_lock=True)
    if starts:
        check_node(spec)
        return
    with pytest.raises(InstanceError) as told:
        check_node(spec)
    said = f"web1: memory_lock takes 1280 MiB, and {limit_mib} MiB may be locked"
    assert str(told.value) == said
    assert "LimitMEMLOCK=" in (told.value.hint or "")


# VNC passwords: out of a file, to QEMU, and nowhere else


@pytest.fixture
def with_password(tmp_path: Path) -> Spec:
    return web1(vnc_bind="::1", vnc_password_file=str(tmp_path / "password"))


@pytest.mark.parametrize(
    ("content", "password"),
    [
        (b"hunter22", "hunter22"),
        (b"hunter2\r\n", "hunter2"),
        (b"x\nof web1, changed in May\n", "x"),
        (b" a b \n", " a b "),
        ("éàüö".encode(), "éàüö"),
    ],
)
def test_a_password_is_the_first_line(with_password: Spec, content: bytes, password: str) -> None:
    Path(with_password.vnc_password_file).write_bytes(content)
    assert read_password(with_password) == password


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a VNC password has 1 to 8 bytes"),
        (b"\nhunter2", "a VNC password has 1 to 8 bytes"),
        ("éàüöx".encode(), "a VNC password has 1 to 8 bytes"),
        (b"hunter\xff", "is no text"),
        (b"hunt\x1br", "has characters that can't be typed"),
        (None, "can't be read: No such file or directory"),
        (os.mkfifo, "can't be read: Is no regular file"),  # which holds nobody up
    ],
)
def test_what_is_no_password_is_refused_and_not_told(
    with_password: Spec, content: Any, said: str
) -> None:
    file = Path(with_password.vnc_password_file)
    if content is os.mkfifo:
        os.mkfifo(file)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(InstanceError) as told:
        check_node(with_password)
    assert str(told.value) == f"web1: {file}: {said}"
    assert "hunt" not in f"{told.value} {told.value.hint}"


# Limits


NOTHING = {"MemoryMax": "infinity", "MemorySwapMax": "infinity", "CPUQuota": ""}
NOTHING |= {"CPUWeight": "", "IOWeight": "", "IPAddressAllow": ""}


@pytest.fixture
def limits(systemctl: ScriptedSystemctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where systemd keeps the limits that were set before: there are none."""
    monkeypatch.setattr(confinement, "_SET_BEFORE", tmp_path / "system.control")
    return tmp_path / "system.control"


def instance(**keys: Any) -> Spec:
    return parse(Spec, {"name": "web1", **keys})


def told(systemctl: ScriptedSystemctl) -> dict[str, str]:
    """The properties that were set, the only time."""
    (args,) = systemctl.asked("set-property")
    assert "--runtime" in args[:2]
    settings = [pair.split("=", 1) for pair in args[args.index(UNIT) + 1 :]]
    assert settings[5] == ["IPAddressAllow", ""]  # the list of the last run goes first
    return dict(settings)


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        ({"vnc_bind": "127.0.0.1"}, {"IPAddressAllow": "localhost"}),
        ({"vnc_bind": "::1"}, {"IPAddressAllow": "localhost"}),
        ({"vnc_bind": "0.0.0.0"}, {"IPAddressAllow": "any"}),
        ({"extra_arguments": ["-spice", "port=5930"]}, {"IPAddressAllow": "any"}),
        ({"cpu_weight": 50}, {"CPUWeight": "50"}),
        (
            {"memory_max_mib": 1, "cpu_limit_percent": 2, "cpu_weight": 3, "io_weight": 4},
            {
                "MemoryMax": "1M",
                "MemorySwapMax": "1M",
                "CPUQuota": "2%",
                "CPUWeight": "3",
                "IOWeight": "4",
            },
        ),
    ],
)
def test_each_limit_is_a_property_and_the_others_are_taken_back(
    limits: Path, systemctl: ScriptedSystemctl, keys: dict[str, Any], changed: dict[str, str]
) -> None:
    set_limits(instance(**keys))
    assert told(systemctl) == {**NOTHING, **changed}


def test_without_limits_systemd_is_not_asked(limits: Path, systemctl: ScriptedSystemctl) -> None:
    (limits / "brine-instance@web2.service.d").mkdir(parents=True)
    set_limits(instance(memory_mib=64, vcpus=4))
    set_limits(instance(vnc_bind="/run/web1.vnc"))
    assert systemctl.asked("set-property") == []


def test_limits_that_are_no_more_are_taken_back(limits: Path, systemctl: ScriptedSystemctl) -> None:
    (limits / f"{UNIT}.d").mkdir(parents=True)
    set_limits(instance())
    assert told(systemctl) == NOTHING


def test_a_refusal_is_told_in_one_line(limits: Path, systemctl: ScriptedSystemctl) -> None:
    systemctl.refuse("set-property", "Failed to set unit properties: No.\nSee the journal.\n")
    with pytest.raises(InstanceError, match="^web1: its limits can't be set: ") as refused:
        set_limits(instance(cpu_weight=1))
    assert str(refused.value).endswith("Failed to set unit properties: No.")


# The noted version of a QEMU. Bash, which also says a version, stands for it.

WRONG = (99, 1)
"""A version that only a note can have."""


@pytest.fixture
def qemu(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A QEMU that was installed a minute ago."""
    now_s = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: now_s)
    return Path(shutil.copy("/bin/bash", own_node / "qemu"))


def said_by(qemu: Path) -> tuple[int, int]:
    return version_of(web1(qemu=str(qemu)))


def falsify() -> None:
    """Change each noted version: whoever reads the note shows it."""
    noted = json.loads(paths.QEMU_VERSIONS_FILE.read_text())
    paths.QEMU_VERSIONS_FILE.write_text(json.dumps(dict.fromkeys(noted, WRONG)))


def test_a_qemu_is_asked_for_its_version_once(qemu: Path) -> None:
    assert said_by(qemu) != WRONG
    falsify()
    assert said_by(qemu) == WRONG


def rewritten(qemu: Path) -> None:
    qemu.write_bytes(qemu.read_bytes())


def replaced(qemu: Path) -> None:
    new = shutil.copy2(qemu, qemu.with_name("new"))
    os.rename(new, qemu)


def longer(qemu: Path) -> None:
    """With its old time of change."""
    status = qemu.stat()
    with qemu.open("ab") as file:
        file.write(b"\n")
    os.utime(qemu, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [rewritten, replaced, longer])
def test_a_qemu_that_has_changed_is_asked_again(qemu: Path, change: Callable[[Path], None]) -> None:
    version = said_by(qemu)
    falsify()
    change(qemu)
    assert said_by(qemu) == version


@pytest.mark.parametrize(
    "note",
    ["", "{", "[]", "null", '{"a": 7}', '{"a": [1]}', '{"a": ["x", "y"]}', '{"a": [1, null]}'],
)
def test_a_damaged_note_is_none(qemu: Path, note: str) -> None:
    paths.QEMU_VERSIONS_FILE.write_text(note)
    version = said_by(qemu)
    assert version != WRONG
    falsify()  # it was replaced
    assert said_by(qemu) == WRONG


def test_a_note_that_others_may_have_written_is_not_believed(qemu: Path) -> None:
    version = said_by(qemu)
    falsify()
    paths.QEMU_VERSIONS_FILE.chmod(0o622)
    assert said_by(qemu) == version


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_note_of_another_user_is_not_believed(qemu: Path) -> None:
    version = said_by(qemu)
    falsify()
    os.chown(paths.QEMU_VERSIONS_FILE, 65534, -1)
    assert said_by(qemu) == version


def test_nothing_is_noted_of_a_script_and_of_a_program_that_has_just_been_written(
    own_node: Path,
) -> None:
    script = own_node / "script"
    script.write_text("#!/bin/sh\nexec bash --version\n")  # which may be another bash later
    script.chmod(0o755)
    for program in (script, Path(shutil.copy("/bin/bash", own_node / "qemu"))):
        said_by(program)
        assert not paths.QEMU_VERSIONS_FILE.exists()


def test_few_versions_are_noted(qemu: Path) -> None:
    for number in range(20):
        said_by(Path(shutil.copy("/bin/bash", qemu.with_name(f"qemu{number}"))))
    assert len(json.loads(paths.QEMU_VERSIONS_FILE.read_text())) == 16


def test_a_start_goes_on_where_nothing_can_be_noted(
    qemu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "QEMU_VERSIONS_FILE", qemu.with_name("none") / "here")
    assert said_by(qemu) == said_by(qemu) != WRONG
