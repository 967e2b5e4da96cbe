"""Wrong input to commands on volumes, and an LVM that hangs: one line, and nothing changes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from brine.common import cli, operation, paths
from brine.common.process import run_bounded
from brine.instance import store
from brine.instance.registry import define_instance
from brine.storage import lvm
from brine.storage.directory_notes import RECORDS
from component.own_lvm import loop_device, run_lvm, use_lvm_of
from component.test_volume_kills import offers

pytestmark = [
    pytest.mark.usefixtures("own_node"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes disks as root; ./dev test runs as root"),
]

MIB = 1 << 20
GROUP, OTHER = "brine-input", "brine-input2"
UUID = "33333333-2222-4333-8444-555555555555"
IN_METADATA = ("--driverloaded", "n", "-an", "-Zn", "-Wn")


class Place(NamedTuple):
    """A volume group of one physical volume, another one, a physical volume of neither, and a
    folder; all volumes are LVM's metadata alone."""

    devices: list[str]
    folder: str
    locks: Path

    def volumes(self) -> str:
        return run_lvm("lvs", "-o", "vg_name,lv_name,lv_size,lv_tags")

    def state(self) -> tuple[Any, ...]:
        """All that a command could have changed."""
        lvm.forget()
        files = sorted(str(one) for one in Path(self.folder).rglob("*") if one.name != RECORDS)
        specs = {name: store.load(name) for name in store.names()}
        physical = run_lvm("pvs", "-o", "pv_name,vg_name,pv_free,pv_attr")
        return specs, self.volumes(), physical, files, operation.pending()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """With an instance, web1, whose disk is in the group."""
    monkeypatch.setattr(cli, "entry_points", offers)
    monkeypatch.setattr(operation, "entry_points", offers)
    monkeypatch.setattr(paths, "ETC_DIR", tmp_path / "etc")
    (tmp_path / "etc").mkdir()
    devices: list[str] = []
    with tempfile.TemporaryDirectory(prefix="brine-input-", dir="/srv") as folder:
        settings = f'directories = ["{folder}"]\ndefault_unit = "{GROUP}"\n'
        (tmp_path / "etc/storage.toml").write_text(settings)
        try:
            for name in "abc":
                devices.append(loop_device(tmp_path / name, 64 * MIB))
            use_lvm_of(devices, tmp_path / "lvm", monkeypatch)
            run_lvm("pvcreate", *devices)
            run_lvm("vgcreate", GROUP, devices[0])
            run_lvm("vgcreate", OTHER, devices[1])
            tags = ("brine", f"brine.disk={UUID}", "brine.owner=web1", "brine.name=data")
            marks = [word for tag in tags for word in ("--addtag", tag)]
            run_lvm("lvcreate", *IN_METADATA, "-L8M", "-n", f"brine-{UUID}", *marks, GROUP)
            run_lvm("lvcreate", *IN_METADATA, "-L8M", "-n", "theirs", GROUP)
            lvm.forget()
            define_web1()
            yield Place(devices, folder, tmp_path / "lvm/locks")
        finally:
            for device in devices:
                subprocess.run(["losetup", "--detach", device], check=True)


def define_web1() -> None:
    path = f"/dev/{GROUP}/brine-{UUID}"
    data = {"name": "data", "uuid": UUID, "unit": GROUP, "path": path, "size_mib": 8}
    theirs = {"name": "theirs", "path": f"/dev/{GROUP}/theirs", "read_only": True}
    disks = [{**one, "format": "raw"} for one in (data, theirs)]
    define_instance({"name": "web1", "accel": "tcg", "disks": disks})


Brine = Callable[..., tuple[int, str, str]]


@pytest.fixture
def brine(capsys: pytest.CaptureFixture[str]) -> Brine:
    """Runs a command; its status, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        lvm.forget()  # each command is a process
        try:
            status = cli.main(words)
        except SystemExit as error:
            assert isinstance(error.code, int)
            status = error.code
        return status, *capsys.readouterr()

    return run


@contextlib.contextmanager
def locked(file: Path, how: int) -> Iterator[None]:
    """Have commands of LVM's wait for a lock."""
    with file.open("w") as lock:
        fcntl.flock(lock, how)
        yield


VERBS: list[tuple[str, ...]] = [
    ("storage", "list"),
    ("storage", "facts"),
    ("storage", "modify", "lvm-pv", "{device}", "--allocatable", "no"),
    ("storage", "orphans"),
    ("storage", "evacuate", "lvm-pv", "{device}"),
    ("disk", "add", "web1", "--size", "4M"),
    ("disk", "grow", "web1", "data", "12M"),
    ("disk", "status", "web1"),
    ("disk", "adopt", "web1", "theirs"),
    ("disk", "snapshot", "web1"),
    ("disk", "snapshot", "web1", "--list"),
    ("disk", "snapshot", "web1", "--remove", "one"),
    ("disk", "rollback", "web1", "one"),
    ("disk", "move", "web1", "data", "--to", "{folder}"),
    ("instance", "clone", "web1", "web2"),
    ("instance", "define", "{spec}"),
]
LAST: list[tuple[str, ...]] = [
    ("disk", "remove", "web1", "data", "--delete"),
    ("instance", "undefine", "web1", "--delete-volumes", "--yes"),
]


def given(place: Place, words: tuple[str, ...]) -> list[str]:
    spec = paths.SPECS_DIR.parent / "spec.json"
    data: dict[str, Any] = json.loads((paths.SPECS_DIR / "web1.json").read_text())
    data["disks"].append({"name": "new", "size_mib": 4, "unit": GROUP})
    spec.write_text(json.dumps(data))
    return [
        one.format(device=place.devices[0], folder=place.folder, spec=spec, other=place.devices[1])
        for one in words
    ]


def test_an_lvm_that_hangs_is_one_line_that_names_its_command(
    place: Place, brine: Brine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lvm, "TIMEOUT_S", 0.5)
    before = place.state()
    for words in (*VERBS, *LAST[1:]):
        with locked(place.locks / "P_global", fcntl.LOCK_EX):
            status, _, err = brine(*given(place, words))
        assert (status, "Traceback" in err) == (1, False), (words, err)
        if words != ("disk", "status", "web1"):  # its table says why
            faults = [one for one in err.splitlines() if one.startswith("brine: error: ")]
            assert len(faults) == 1, (words, err)
            assert "lvm " in err, words
        assert place.state() == before, words


def test_a_change_that_hangs_is_undone_or_never_begins(
    place: Place, brine: Brine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LVM tells what there is, and waits when something is to be changed."""

    def impatient(command: Sequence[str], **how: Any) -> Any:
        reads = command[1] in ("lvs", "pvs", "fullreport")
        return run_bounded(command, **{**how, "timeout_s": how["timeout_s"] if reads else 0.5})

    monkeypatch.setattr("brine.storage.lvm.run_bounded", impatient)
    before = place.state()
    for words in (*VERBS[2:], *LAST):
        with locked(place.locks / f"V_{GROUP}", fcntl.LOCK_SH):
            _, _, err = brine(*given(place, words))
        assert "Traceback" not in err
        if words in LAST:
            assert (
                "brine storage orphans lists it" in err
            )  # the disk has gone, and its volume stays
            assert place.volumes() in before
            assert operation.pending() == []
            define_web1()
        else:
            assert place.state() == before, words


WRONG: list[tuple[tuple[str, ...], int, str]] = [
    *(
        (("disk", "add", "web1", "--size", size), status, named)
        for size, status, named in [
            ("0", 2, "0"),
            ("0G", 2, "0G"),
            ("-1G", 2, "--size"),
            ("10x", 2, "10x"),
            ("1", 2, "1"),
            ("1K", 2, "1M"),
            ("1B", 2, "1B"),
            ("9G", 1, "free"),
            ("16384P", 2, "16384P"),
            ("900000T", 1, "size_mib"),
        ]
    ),
    *(
        (("disk", "grow", "web1", "data", size), status, named)
        for size, status, named in [
            ("0G", 2, "0G"),
            ("+0G", 2, "0G"),
            ("-1G", 2, "SIZE"),
            ("+-1G", 2, "-1G"),
            ("10x", 2, "10x"),
            ("1K", 1, "shrink"),
            ("4M", 1, "shrink"),
            ("9G", 1, "free"),
            ("+9G", 1, "free"),
            ("900000T", 1, "size_mib"),
        ]
    ),
    *(
        (("disk", "snapshot", "web1", "--size", size), status, named)
        for size, status, named in [("0G", 2, "0G"), ("10x", 2, "10x")]
    ),
    *(
        (("disk", "snapshot", "web1", "--name", name), status, named)
        for name, status, named in [
            ("a/b", 2, "a/b"),
            ("..", 2, ".."),
            ("../up", 2, "../up"),
            (".hidden", 2, ".hidden"),
            ("Upper", 2, "Upper"),
            *((f"a{word}", 1, word) for word in ("_tmeta", "_tdata1", "_cdata", "_rimage_0")),
            *((f"a{word}", 1, word) for word in ("_pmspare", "_vorigin", "_mlog", "_rmeta")),
        ]
    ),
    *(
        (("disk", "add", "web1", "--size", "4M", "--name", name), status, named)
        for name, status, named in [("a/b", 1, "/name"), ("..", 1, "/name"), ("../up", 1, "/name")]
    ),
    *(
        (("disk", "add", "web1", "--size", "4M", "--unit", unit), 1, named)
        for unit, named in [
            ("..", "/unit"),
            ("a/b", "/unit"),
            ("/srv/../etc", "/unit"),
            ("/etc", "/etc"),
            ("pvmove0", "pvmove0"),
            ("snapshot", "snapshot"),
            ("brine-none", "brine-none"),
        ]
    ),
    (("disk", "add", "web1", "--size", "4M", "--format", "qcow2"), 1, "raw"),
    (("disk", "add", "web1", "--size", "4M", "--uuid", "../up"), 2, "../up"),
    (("disk", "adopt", "web1", "theirs", "--unit", OTHER), 1, OTHER),
    (("disk", "adopt", "web1", "theirs", "--unit", "{folder}"), 1, "theirs"),
    (("disk", "adopt", "web1", "none"), 1, "none"),
    (("disk", "move", "web1", "data", "--to", "../up"), 2, "../up"),
    (("disk", "move", "web1", "data", "--to", "brine-none"), 1, "brine-none"),
    (("disk", "move", "web1", "theirs", "--to", OTHER), 1, "adopt"),
    (("disk", "rollback", "web1", "../up"), 1, "../up"),
    (("storage", "orphans", "--remove", "../up"), 2, "../up"),
    (("storage", "evacuate", "lvm-pv", "/dev/none"), 1, "/dev/none"),
    (("storage", "create", "file", "/srv/../etc"), 1, "/etc"),
    (("storage", "modify", "lvm-pv", "../up", "--allocatable", "no"), 1, "../up"),
]


def test_what_can_not_be_is_one_line_and_changes_nothing(place: Place, brine: Brine) -> None:
    before = place.state()
    for words, status, named in WRONG:
        found, out, err = brine(*given(place, words))
        assert (found, out) == (status, ""), (words, out, err)
        assert len([one for one in err.splitlines() if "error: " in one]) == 1, (words, err)
        assert named in err, words
        assert "Traceback" not in err
        assert place.state() == before, words


def test_of_two_devices_with_one_physical_volume_neither_is_changed(
    place: Place, brine: Brine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(tmp_path / "a", tmp_path / "copy")
    place.devices.append(loop_device(tmp_path / "copy", 64 * MIB))
    use_lvm_of(place.devices, tmp_path / "lvm2", monkeypatch)
    before = place.state()
    for words in (
        ("storage", "modify", "lvm-pv", place.devices[0], "--allocatable", "no"),
        ("storage", "modify", "lvm-pv", place.devices[3], "--allocatable", "no"),
        ("disk", "add", "web1", "--size", "4M"),
        ("disk", "adopt", "web1", "theirs"),
    ):
        status, _, err = brine(*words)
        print(words, status, err)
        assert status == 1
        assert len([one for one in err.splitlines() if "error: " in one]) == 1, err
        assert place.state() == before


@pytest.mark.parametrize("said", ["qcow2", ""])
def test_an_image_of_another_format_is_not_adopted(place: Place, brine: Brine, said: str) -> None:
    image, other = f"{place.folder}/image", f"{place.folder}/other"
    for path, kind in ((image, said or "raw"), (other, "raw" if said else "qcow2")):
        subprocess.run(["qemu-img", "create", "-q", "-f", kind, path, "4M"], check=True)
    row = {"name": "image", "path": image} | ({"format": said} if said else {})
    define_instance({"name": "web1", "accel": "tcg", "disks": [row]})
    os.rename(other, image)  # a definition refuses what does not match
    before = place.state()
    status, _, err = brine("disk", "adopt", "web1", "image")
    assert (status, err.count("error: ")) == (1, 1), err
    assert image in err
    assert place.state() == before
