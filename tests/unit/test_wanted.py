"""What NICs want: names with odd bytes, and addresses that are written in several ways."""

from __future__ import annotations

import argparse
import os

import pytest

from brine.common.errors import UsageError
from brine.hotplug.choices import Mode
from brine.hotplug.wanted import Wiring, owner_of
from brine.hotplug.wiring_options import add_told, add_wiring, changed_wiring, wiring_of

NIC = "9fb0b0f9-0000-4000-8000-00000000000a"


def parsed(*options: str, changes: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_wiring(parser, changes=changes)
    add_told(parser, changes=changes)
    return parser.parse_args(options)


@pytest.mark.parametrize("name", ["web1.example.com", "w\u00fcb", "a b%c", os.fsdecode(b"odd\xff")])
def test_an_alias_says_whose_a_tap_is_whatever_the_name(name: str) -> None:
    wiring = Wiring(name, NIC, Mode.BRIDGED, "br0")
    wiring.check()
    assert wiring.alias().isascii()
    assert owner_of(wiring.alias()) == (name, NIC)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_nothing_can_have_is_refused(name: str) -> None:
    for wiring in (Wiring(name, NIC, Mode.BRIDGED, "br0"), Wiring("web1", NIC, Mode.BRIDGED, name)):
        with pytest.raises(UsageError, match="not a name that can be used"):
            wiring.check()


def test_an_address_is_the_same_however_it_is_written() -> None:
    one = wiring_of(parsed("--mode=routed", "--ip=2001:DB8:0::A"), "web1", NIC)
    other = wiring_of(parsed("--mode=routed", "--ip=2001:db8::a"), "web1", NIC)
    assert one == other
    assert changed_wiring(parsed("--ip=2001:db8:0:0::a", changes=True), one) == one


def test_what_is_no_address_is_told() -> None:
    for options in (["--ip=2001:db8::g"], ["--ip=192.0.2.1/24"], ["--ip="]):
        with pytest.raises(UsageError, match="not an address"):
            wiring_of(parsed("--mode=routed", *options), "web1", NIC)
