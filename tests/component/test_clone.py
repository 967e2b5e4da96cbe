"""Clones of instances with real block devices."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from brine.common import paths
from brine.instance.clone import clone_instance
from brine.instance.registry import define_instance
from brine.instance.store import InstanceError

pytestmark = pytest.mark.usefixtures("own_node")

_MIB = 1 << 20


@contextmanager
def block_device(image: Path) -> Iterator[str]:
    command = ["losetup", "--find", "--show", str(image)]
    device = subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[str]]:
    """Three block devices: of 6 MiB with content, of 6 MiB with another's, and of 1 MiB."""
    contents = (b"system" * _MIB, b"before" * _MIB, b"x" * _MIB)
    with ExitStack() as stack:
        found = []
        for number, content in enumerate(contents):
            image = tmp_path / f"{number}.img"
            image.write_bytes(content)
            found.append(stack.enter_context(block_device(image)))
        yield found


def test_block_devices_are_copied_to_those_that_are_named(
    tmp_path: Path, devices: list[str]
) -> None:
    source, target, small = devices
    file = tmp_path / "web1.img"
    file.write_bytes(b"data" + bytes(3 * _MIB))
    disks = [{"path": source, "format": "raw"}, {"path": str(file), "format": "raw"}]
    define_instance({"name": "web1", "disks": disks})
    with pytest.raises(InstanceError, match="is a block device") as caught:
        clone_instance("web1", "web2")
    assert "make one of 6 MiB" in (caught.value.hint or "")
    with pytest.raises(InstanceError, match="has 1 MiB, and 6 are needed"):
        clone_instance("web1", "web2", disks={source: small})
    clone_instance("web1", "web2", disks={source: target, str(file): f"{tmp_path}/other"})
    assert Path(target).read_bytes() == b"system" * _MIB
    assert (tmp_path / "other").read_bytes() == file.read_bytes()
    spec = json.loads((paths.SPECS_DIR / "web2.json").read_text())
    assert [disk["path"] for disk in spec["disks"]] == [target, f"{tmp_path}/other"]
    # From a device to a file: what is there must be another's no more.
    clone_instance("web1", "web3", disks={source: f"{tmp_path}/as-file"})
    assert (tmp_path / "as-file").read_bytes() == b"system" * _MIB
