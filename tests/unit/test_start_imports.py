"""The modules that a start loads before QEMU runs, and those of `--help`: each costs time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SLOW = {"asyncio", "ssl", "tomllib", "uuid", "platform", "pyroute2", "brine.common.qmp.client"}
_OF_VOLUMES = {"brine.storage.unit", "brine.storage.lvm", "brine.storage.volumes"}
_OF_NICS = {"brine.vm.vif", "brine.hotplug.net.tap", "hashlib"}
_OF_CHANGES = {"brine.instance.validate", "brine.instance.shutdown", "brine.instance.history"}
_OF_QEMU = {"socket", "brine.common.qmp.wire", "brine.instance.kvm.guest"}
_OF_PLUGS = {"asyncio", "ssl", "tomllib", "logging", "ctypes", "dataclasses"}
_OF_CONFIG = {"brine.config.model", "brine.config.params", "jsonpointer"}
_OF_CONFD = {"asyncio", "brine.confd.client", "brine.config.model"}


def loaded_by(script: str) -> set[str]:
    """The modules that a new process has after it ran *script*."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {script}; print(*sys.modules)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("brine.instance.cli, brine.instance.start", _SLOW | _OF_NICS | _OF_CHANGES),
        # Nearly every instance has a NIC.
        (
            "brine.instance.service.run",
            _SLOW | _OF_CHANGES | _OF_VOLUMES | {"subprocess", "logging", "argparse"},
        ),
        ("brine.instance.service.ready, brine.instance.kvm.guest", {"argparse", *_OF_CHANGES}),
        # Most have ended in order, and there may be hundreds to list.
        (
            "brine.instance.cli, brine.instance.listing",
            _SLOW | _OF_QEMU | _OF_VOLUMES | {"shutil", "datetime", "brine.instance.xen.xl"},
        ),
        ("brine.hotplug.commands", {"brine.hotplug.net.netlink", "uuid", "asyncio"}),
        ("brine.hotplug.net.tap, brine.hotplug.net.wiring", _SLOW | {"subprocess", "shutil"}),
    ],
)
def test_what_takes_long_to_load_is_loaded_where_it_is_used(
    modules: str, unwanted: set[str]
) -> None:
    assert not loaded_by(f"import {modules}") & unwanted


@pytest.mark.parametrize(
    ("command", "unwanted"),
    [
        *((f"brine.hotplug.cli:{noun}", _OF_PLUGS) for noun in ("NIC", "DISK", "TAP")),
        ("brine.config.cli:COMMAND", _OF_CONFIG),
        ("brine.confd.cli:COMMAND", _OF_CONFD),
    ],
)
def test_help_loads_nothing_that_takes_long(command: str, unwanted: set[str]) -> None:
    module, name = command.split(":")
    script = f"from {module} import {name} as command; from brine.common.cli import Parser; "
    loaded = loaded_by(script + "command.configure(Parser())")
    # Python 3.14 itself loads more than older ones.
    of_python = loaded_by("import argparse; argparse.ArgumentParser()")
    assert module in loaded
    assert not (loaded - of_python) & unwanted


@pytest.mark.parametrize("program", ["run", "ready", "clear"])
def test_the_units_programs_seldom_look_for_garbage(program: str) -> None:
    script = f"import gc, brine.instance.service.{program}; assert gc.get_threshold()[0] > 10_000"
    assert f"brine.instance.service.{program}" in loaded_by(script)
