"""What an instance needs of its node, and what is told where that lacks it."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from brine.instance.kvm import resources
from brine.instance.kvm.resources import check_node
from brine.instance.spec import Spec
from brine.instance.store import InstanceError
from brine.instance.validate import define

MIB = 1 << 20
IPC_LOCK = 1 << 14


def web1(**keys: Any) -> Spec:
    return define({"name": "web1", "accel": "tcg", "qemu": "/bin/true", **keys})


@pytest.mark.parametrize("key", ["firmware", "kernel"])
def test_what_is_no_file_is_not_booted(tmp_path: Path, key: str) -> None:
    """QEMU would wait for somebody to write into a FIFO."""
    os.mkfifo(tmp_path / "image")
    with pytest.raises(InstanceError, match="image: is no file"):
        check_node(web1(**{key: str(tmp_path / "image")}))


def test_the_nodes_own_uefi_is_no_path() -> None:
    check_node(web1(firmware="uefi"))


LIMITS = [
    # security model, limit in MiB (None is none), may lock, starts
    ("none", None, False, True),
    ("none", 1, True, True),
    ("none", 1, False, False),
    ("none", 1024, False, False),  # and nothing for QEMU itself
    ("none", 2048, False, True),
    ("pool", 1, True, False),  # another user may not what root may
    ("pool", None, True, True),
]


@pytest.mark.parametrize(("model", "limit_mib", "may_lock", "starts"), LIMITS)
def test_memory_that_may_not_be_locked_is_told_before_qemu_ends_at_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: str,
    limit_mib: int | None,
    *,
    may_lock: bool,
    starts: bool,
) -> None:
    limit = resource.RLIM_INFINITY if limit_mib is None else limit_mib * MIB
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    status = tmp_path / "status"
    rights = IPC_LOCK if may_lock else ~IPC_LOCK & 0x1FF_FFFF_FFFF
    status.write_text(f"Name:\tpython3\nCapEff:\t{rights:016x}\n")
    monkeypatch.setattr(resources, "_STATUS", status)
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
