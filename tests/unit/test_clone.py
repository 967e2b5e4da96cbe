"""Clones, as a person or a program makes them: real files, and a systemd that is scripted."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brine.common import paths
from brine.instance import store
from brine.vm.files import InstanceFiles

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder with the image a."""
    folder = tmp_path / "images"
    folder.mkdir()
    image(folder / "a")
    return folder


def image(path: Path, content: bytes = b"data", size: int = 1 << 20) -> Path:
    with path.open("wb") as f:
        f.write(content)
        f.truncate(size)
    return path


def spec(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((paths.SPECS_DIR / f"{name}.json").read_text())
    return found


def left(images: Path) -> list[str]:
    return sorted(os.listdir(images))


def define(brine: Run, *images: Path, **keys: Any) -> dict[str, Any]:
    """Define web1 with raw images."""
    disks = [{"path": str(one), "format": "raw"} for one in images]
    status, _, said = brine("define", "-", stdin={"name": "web1", "disks": disks, **keys})
    assert status == 0, said
    return spec("web1")


def test_a_clone_is_another_machine_with_the_same_content(brine: Run, images: Path) -> None:
    disks = [
        {"path": str(image(images / "web1.img")), "format": "raw", "serial": "S"},
        {"path": str(image(images / "data", b"more")), "format": "raw", "cache": "writeback"},
        {"path": str(image(images / "shared")), "format": "raw", "read_only": True},
    ]
    (images / "web1.img").chmod(0o640)
    nics = [{"link": "br0", "ips": ["192.0.2.1"]}]
    before = define(brine, disks=disks, nics=nics, vcpus=3, vnc_bind="::1", vnc_port=5907)
    status, out, said = brine("clone", "web1", "web2")
    assert (status, out) == (0, "cloned: web1 to web2; brine instance start web2\n")
    assert "its VNC takes a free port: 5907 is web1's" in said
    assert f"copying {images}/web1.img to {images}/web2.img, 1 MiB" in said
    after = spec("web2")
    assert [one["path"] for one in after["disks"]] == [
        f"{images}/web2.img",
        f"{images}/web2-data",
        f"{images}/shared",
    ]
    for name, content in (("web2.img", b"data"), ("web2-data", b"more")):
        copied = images / name
        assert copied.read_bytes() == content + bytes((1 << 20) - len(content))
        assert copied.stat().st_blocks * 512 < 1 << 20  # holes stay holes
    assert (images / "web2.img").stat().st_mode & 0o777 == 0o640
    assert left(images) == ["a", "data", "shared", "web1.img", "web2-data", "web2.img"]
    other = [(before["uuid"], after["uuid"])]
    other += [(before[key][0][one], after[key][0][one]) for key, one in _IDENTITIES]
    assert all(was and now and was != now for was, now in other)
    assert (after["vcpus"], after["vnc_port"], after["admin_state"]) == (3, 0, "down")
    assert (after["disks"][0]["serial"], after["disks"][1]["cache"]) == ("S", "writeback")
    assert after["nics"][0]["ips"] == []
    assert spec("web1") == before


_IDENTITIES = [("disks", "uuid"), ("nics", "uuid"), ("nics", "mac")]


def test_a_program_is_told_what_would_be_done(brine: Run, images: Path) -> None:
    define(brine, images / "a")
    status, out, _ = brine("clone", "web1", "web2", "--dry-run", "--json")
    told = json.loads(out)
    assert (status, told["dry_run"], told["source"], told["name"]) == (0, True, "web1", "web2")
    copy = {"source": f"{images}/a", "target": f"{images}/web2-a", "size_mib": 1}
    assert told["disks"] == [copy]
    assert told["spec"]["disks"][0]["path"] == f"{images}/web2-a"
    assert left(images) == ["a"]
    _, out, _ = brine("clone", "web1", "web2", "--dry-run")
    assert out.splitlines()[-1] == "would be cloned: web1 to web2"
    assert not (paths.SPECS_DIR / "web2.json").exists()


def test_disks_and_addresses_go_where_they_are_said_to(brine: Run, images: Path) -> None:
    disk = images / "a"
    nic = {"mode": "routed", "ips": ["192.0.2.1", "2001:db8::1"]}
    define(brine, disk, nics=[nic])
    status, _, said = brine("clone", "web1", "web2", "--address", "192.0.2.1=192.0.2.2")
    assert status == 1
    assert "--address 2001:db8::1=ANOTHER" in said
    addresses = ["--address", "192.0.2.1=192.0.2.2", "--address", "2001:db8::1=2001:db8::2"]
    (images / "sub").mkdir()
    assert brine("clone", "web1", "web2", *addresses, "--disk", f"{disk}={images}/sub/b")[0] == 0
    assert spec("web2")["nics"][0]["ips"] == ["192.0.2.2", "2001:db8::2"]
    assert spec("web2")["disks"][0]["path"] == f"{images}/sub/b"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["web2", "--disk", "/x=/y"], "web1 has no disk /x"),
        (["web2", "--address", "192.0.2.9=192.0.2.8"], "web1 has no address 192.0.2.9"),
        (["web2", "--address", "192.0.2.9=foo"], "web2: --address 192.0.2.9=foo: foo is no IP"),
        (["web2", "--disk", "x"], "no two values with = between them"),
        (["web1"], "that is the name of the original"),
        (["a/b"], "a/b"),
        (["old"], "there is an instance of that name already"),
    ],
)
def test_a_persons_mistakes(brine: Run, images: Path, arguments: list[str], text: str) -> None:
    define(brine, images / "a")
    assert brine("define", "-", stdin={"name": "old"})[0] == 0
    status, _, said = brine("clone", "web1", *arguments)
    assert status in (1, 2)
    assert text in said
    assert left(images) == ["a"]


def test_nothing_that_is_there_is_overwritten(brine: Run, images: Path) -> None:
    define(brine, images / "a")
    file, link, folder = (images / name for name in ("file", "link", "folder"))
    file.write_text("somebody's")
    link.symlink_to("/nowhere")
    folder.mkdir()
    for target in (file, link, folder):
        status, _, said = brine("clone", "web1", "web2", "--disk", f"{images}/a={target}")
        assert status == 1
        assert f"web2: {target}: is there already" in said
        assert "name another" in said
    assert file.read_text() == "somebody's"
    assert "web2" not in store.names()


NO_SPACE = '{ echo "cp: error writing: No space left" >&2; exit 1; }'


@pytest.fixture
def cp_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of cp."""

    def write(script: str) -> None:
        (tmp_path / "cp").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "cp").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return write


def test_what_fails_half_way_leaves_nothing(
    brine: Run, images: Path, cp_is: Callable[[str], None]
) -> None:
    define(brine, images / "a", image(images / "b"))
    cp_is(f"echo >>{images.parent}/n; [ $(wc -l <{images.parent}/n) = 1 ] || {NO_SPACE}")
    status, _, said = brine("clone", "web1", "web2")
    assert status == 1
    assert f"{images}/b: can't be copied to {images}/web2-b: No space left" in said
    assert left(images) == ["a", "b"]
    assert "web2" not in store.names()


def test_a_clone_that_is_killed_leaves_nothing(
    brine: Run, images: Path, cp_is: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    define(brine, images / "a")
    with monkeypatch.context():
        cp_is("kill -KILL $PPID; sleep 60")
        if (process := os.fork()) == 0:
            brine("clone", "web1", "web2")
            os._exit(1)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        assert left(images) == ["a"]
        cp_is('exec /bin/cp "$@"')
        assert brine("clone", "web1", "web2")[0] == 0
    assert (images / "web2-a").read_bytes() == (images / "a").read_bytes()
    assert left(images) == ["a", "web2-a"]


def test_a_file_system_without_unnamed_files_has_clones_too(
    brine: Run, images: Path, cp_is: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def without(path: str, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not there")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", without)
    define(brine, images / "a")
    assert brine("clone", "web1", "web2")[0] == 0
    assert left(images) == ["a", "web2-a"]
    cp_is(NO_SPACE)
    assert brine("clone", "web1", "web3")[0] == 1
    assert left(images) == ["a", "web2-a"]


def test_what_was_plugged_and_what_the_firmware_has_stored_go_along(
    brine: Run, images: Path
) -> None:
    whole = define(brine, firmware="uefi")
    InstanceFiles("web1").uefi_variables.write_bytes(b"boot entries")
    uuid = "0c000000-0000-4000-8000-00000000000c"
    hot: dict[str, Any] = {"uuid": uuid, "path": str(image(images / "hot"))}
    hot |= {"format": "raw", "cache": "none", "aio": "threads", "discard": True}
    hot |= {"read_only": False, "serial": None, "pci": 20, "hvinfo": {"driver": "virtio-blk-pci"}}
    runtime = {"spec": whole, "nics": [], "disks": [hot]}
    (paths.RUNTIME_DIR / "web1.json").write_text(json.dumps(runtime))
    assert brine("clone", "web1", "web2")[0] == 0
    assert [one["path"] for one in spec("web2")["disks"]] == [f"{images}/web2-hot"]
    assert InstanceFiles("web2").uefi_variables.read_bytes() == b"boot entries"
