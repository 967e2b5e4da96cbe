"""An instance with a real QEMU where there is no systemd, of which a script says that it runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli, operation, paths, process
from brine.hotplug import target
from brine.instance import store
from brine.instance.kvm.live_definition import change_live
from brine.instance.observe import look
from brine.storage import lvm
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from lab.debian_kernel import on_debian_kernel
from lab.guest import Guest, start_guest
from lab.machine import Host
from lab.scripted_systemctl import ScriptedSystemctl
from tree_entry_points import of_tree

NAME = "web1"
_UNIT = f"brine-instance@{NAME}.service"


class LiveInstance:
    """The instance web1, whose spec is stored.

    :param guest: of its last run.
    """

    guest: Guest

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._systemctl = ScriptedSystemctl(folder / "systemctl-of-web1", monkeypatch)
        for module in (cli, operation):
            monkeypatch.setattr(module, "entry_points", of_tree)
        monkeypatch.setattr(process, "runs_in", lambda pid, unit: unit == _UNIT)
        # Commands run in this process, which other tests need with all that it may do.
        monkeypatch.setattr(target, "keep_only", lambda *_: None)

    @contextmanager
    def running(self) -> Iterator[Guest]:
        """It runs, for the time of the block, with the disks of its spec."""
        files = InstanceFiles(NAME)
        nothing: dict[str, Any] = {"disks": [], "nics": []}
        files.runtime.write_text(json.dumps({"spec": nothing, **nothing}))
        kvm = on_debian_kernel()
        with start_guest(Host(), NAME, control_dir=paths.CONTROL_DIR, kvm=kvm) as guest:
            self.guest = guest
            guest.wait_ready()
            state = {"ActiveState": "active", "MainPID": str(guest.pid), "InvocationID": "a" * 32}
            self._systemctl.unit(_UNIT, **state)
            spec = store.load(NAME)
            live = change_live(spec, None, look(NAME), dry_run=False)
            assert len(live.attached) == len(spec.disks), live
            try:
                yield guest
            finally:
                self._systemctl.unit(_UNIT, ActiveState="inactive", Result="success")

    def disk(self, name: str = "data") -> Disk:
        return next(one for one in store.load(NAME).disks if one.name == name)


def brine(*words: str) -> int:
    """Run a command of Brine's in this process; returns its status."""
    lvm.forget()  # as a process of its own
    try:
        return cli.main(words)
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code


def kill_when(is_so: Callable[[], bool], work: Callable[[], object]) -> None:
    """Do something in a process of its own, which is killed when something is so."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    try:
        while not is_so():
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it has ended"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
