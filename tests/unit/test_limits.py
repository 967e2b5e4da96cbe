"""What systemd is told of an instance's limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from brine.instance import confinement
from brine.instance.confinement import properties_of, set_limits
from brine.instance.spec import Spec, parse
from brine.instance.store import InstanceError
from lab.scripted_systemctl import ScriptedSystemctl

UNIT = "brine-instance@web1.service"
NOTHING = {"MemoryMax": "infinity", "CPUQuota": "", "CPUWeight": "", "IOWeight": ""}
NOTHING["IPAddressAllow"] = ""


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """A node where nobody has set limits."""
    monkeypatch.setattr(confinement, "_SET_BEFORE", tmp_path / "system.control")
    return ScriptedSystemctl(tmp_path / "systemctl", monkeypatch)


def instance(**keys: Any) -> Spec:
    return parse(Spec, {"name": "web1", **keys})


def told(systemctl: ScriptedSystemctl) -> dict[str, str]:
    """The properties that were set, the only time."""
    (args,) = systemctl.asked("set-property")
    settings = args[args.index(UNIT) + 1 :]
    options, (memory, quota, cpu, io, no_addresses, *addresses) = args[:2], settings
    assert "--runtime" in options
    # The list of the last run goes first.
    assert no_addresses == "IPAddressAllow="
    found = (memory, quota, cpu, io, *(addresses or [no_addresses]))
    return dict(pair.split("=", 1) for pair in found)


@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        ({"memory_max_mib": 600}, {"MemoryMax": "600M"}),
        ({"cpu_limit_percent": 150}, {"CPUQuota": "150%"}),
        ({"cpu_weight": 50}, {"CPUWeight": "50"}),
        ({"io_weight": 10_000}, {"IOWeight": "10000"}),
        ({"vnc_bind": "127.0.0.1"}, {"IPAddressAllow": "localhost"}),
        ({"vnc_bind": "::1"}, {"IPAddressAllow": "localhost"}),
        ({"vnc_bind": "0.0.0.0"}, {"IPAddressAllow": "any"}),
        ({"extra_arguments": ["-spice", "port=5930"]}, {"IPAddressAllow": "any"}),
        (
            {"memory_max_mib": 1, "cpu_limit_percent": 2, "cpu_weight": 3, "io_weight": 4},
            {"MemoryMax": "1M", "CPUQuota": "2%", "CPUWeight": "3", "IOWeight": "4"},
        ),
    ],
)
def test_each_limit_is_a_property_and_the_others_are_none(
    systemctl: ScriptedSystemctl, keys: dict[str, Any], changed: dict[str, str]
) -> None:
    set_limits(instance(**keys))
    assert told(systemctl) == {**NOTHING, **changed}


def test_without_limits_systemd_is_not_asked(systemctl: ScriptedSystemctl) -> None:
    set_limits(instance(memory_mib=64, vcpus=4))
    set_limits(instance(vnc_bind="/run/web1.vnc"))
    assert systemctl.asked("set-property") == []


def test_limits_that_are_no_more_are_taken_back(
    systemctl: ScriptedSystemctl, tmp_path: Path
) -> None:
    (tmp_path / "system.control/brine-instance@web1.service.d").mkdir(parents=True)
    set_limits(instance())
    assert told(systemctl) == NOTHING


def test_those_of_another_instance_are_none_of_its_business(
    systemctl: ScriptedSystemctl, tmp_path: Path
) -> None:
    (tmp_path / "system.control/brine-instance@web2.service.d").mkdir(parents=True)
    set_limits(instance())
    assert systemctl.asked("set-property") == []


def test_a_refusal_is_told_in_one_line(systemctl: ScriptedSystemctl) -> None:
    systemctl.refuse("set-property", "Failed to set unit properties: No.\nSee the journal.\n")
    with pytest.raises(InstanceError) as refused:
        set_limits(instance(cpu_weight=1))
    text = str(refused.value)
    assert text.startswith("web1: its limits can't be set: ")
    assert text.endswith("Failed to set unit properties: No.")


def test_what_is_set_takes_back_what_was(systemctl: ScriptedSystemctl) -> None:
    names = [each.partition("=")[0] for each in properties_of(instance(cpu_weight=1))]
    assert names == [each.partition("=")[0] for each in properties_of(instance(io_weight=1))]
