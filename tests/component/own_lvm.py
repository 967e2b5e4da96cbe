"""LVM with a configuration of the tests' own: it sees their devices alone, and needs no udev."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from brine.storage import lvm

_CONFIGURATION = """
activation {{ udev_sync=0 udev_rules=0 verify_udev_operations=0 monitoring=0 }}
backup {{ backup=0 archive=0 }}
devices {{ filter=[ {filters} ] }}
global {{ locking_dir="{folder}/locks" thin_check_executable="" }}
"""


def loop_device(image: Path, size: int) -> str:
    """Make an image of so many bytes, and a block device of it, which the caller detaches."""
    image.touch()
    os.truncate(image, size)
    command = ["losetup", "--find", "--show", str(image)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def use_lvm_of(devices: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have LVM see these devices alone, with a configuration in a new folder."""
    (folder / "locks").mkdir(parents=True, exist_ok=True)
    filters = ", ".join([*(f'"a|^{one}$|"' for one in devices), '"r|.*|"'])
    text = _CONFIGURATION.format(filters=filters, folder=folder)
    (folder / "lvm.conf").write_text(text)
    monkeypatch.setenv("LVM_SYSTEM_DIR", str(folder))
    monkeypatch.setenv("LVM_SUPPRESS_FD_WARNINGS", "1")
    lvm.forget()


def run_lvm(*arguments: str) -> str:
    done = subprocess.run(["lvm", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"lvm {' '.join(arguments)}: {done.stderr}"
    return done.stdout
