"""What NICs want: names with odd bytes, and addresses that are written in several ways."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from brine.common import paths
from brine.common.errors import UsageError
from brine.hotplug.choices import Mode
from brine.hotplug.cli import add_told, add_wiring
from brine.hotplug.nic import Nic, changed_connection, connected_nic, owner_of, usual_wiring

NIC = "9fb0b0f9-0000-4000-8000-00000000000a"


def parsed(*options: str, changes: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_wiring(parser, changes=changes)
    add_told(parser, changes=changes)
    return parser.parse_args(options)


@pytest.mark.parametrize("name", ["web1.example.com", "w\u00fcb", "a b%c", os.fsdecode(b"odd\xff")])
def test_an_alias_says_whose_a_tap_is_whatever_the_name(name: str) -> None:
    wiring = Nic(name, NIC, Mode.BRIDGED, "br0")
    wiring.check()
    assert wiring.alias().isascii()
    assert owner_of(wiring.alias()) == (name, NIC)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_nothing_can_have_is_refused(name: str) -> None:
    for wiring in (Nic(name, NIC, Mode.BRIDGED, "br0"), Nic("web1", NIC, Mode.BRIDGED, name)):
        with pytest.raises(UsageError, match="not a name that can be used"):
            wiring.check()


def test_an_address_is_the_same_however_it_is_written() -> None:
    one = connected_nic(parsed("--mode=routed", "--ip=2001:DB8:0::A"), "web1", NIC)
    other = connected_nic(parsed("--mode=routed", "--ip=2001:db8::a"), "web1", NIC)
    assert one == other
    assert changed_connection(parsed("--ip=2001:db8:0:0::a", changes=True), one) == one


def test_what_is_no_address_is_told() -> None:
    for options in (["--ip=2001:db8::g"], ["--ip=192.0.2.1/24"], ["--ip="]):
        with pytest.raises(UsageError, match="not an address"):
            connected_nic(parsed("--mode=routed", *options), "web1", NIC)


# The cluster's mode and link.


@pytest.mark.parametrize(
    ("nicparams", "given", "found"),
    [
        (None, ("", ""), ("bridged", "")),
        (None, (None, "br7"), ("bridged", "br7")),
        ("", ("routed", ""), ("routed", "")),
        ("mode=bridged\nlink=br0\n", ("", ""), ("bridged", "br0")),
        ("mode=bridged\nlink=br0\n", ("bridged", None), ("bridged", "br0")),
        ("mode=bridged\nlink=br0\n", ("", "br7"), ("bridged", "br7")),
        ("mode=bridged\nlink=br0\n", ("routed", ""), ("routed", "")),
        ("link=br0\nvlan=7\n", ("", ""), ("bridged", "br0")),
        ("mode=openvswitch\nlink=ovs0\n", ("", ""), ("openvswitch", "ovs0")),
        ("mode=openvswitch\nlink=ovs0\n", ("bridged", ""), ("bridged", "")),
        ("mode=routed\nlink=main\n", ("", ""), ("routed", "")),
    ],
)
def test_a_nic_has_the_clusters_mode_and_link_unless_it_has_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nicparams: str | None,
    given: tuple[str, str],
    found: tuple[str, str],
) -> None:
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    if nicparams is not None:
        (tmp_path / "ssconf_nicparams").write_text(nicparams)
    assert usual_wiring(*given) == found


def test_a_mode_of_the_clusters_that_there_is_not_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SSCONF_DIR", tmp_path)
    (tmp_path / "ssconf_nicparams").write_text("mode=bridge\n")
    with pytest.raises(UsageError, match="the cluster's NICs are bridge, which is no mode"):
        usual_wiring("", "")
    assert usual_wiring("bridged", "br0") == ("bridged", "br0")
