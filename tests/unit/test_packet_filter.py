"""Filters of taps: what is said if nft is missing, refuses or hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from brine.hotplug.net import packet_filter
from brine.hotplug.net.packet_filter import (
    PacketFilterError,
    dropped_packets,
    filtered_taps,
    remove_filter,
    set_filter,
)
from brine.vm.values import Mode
from brine.vm.vif import Vif

WEB = Vif(instance="web1", uuid="0", mode=Mode.ROUTED, ips=("192.0.2.10", "2001:db8::10"))


@pytest.fixture
def nft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Replaces nft; until it is called, there is none."""
    monkeypatch.setattr(packet_filter, "SEARCH_PATH", str(tmp_path))

    def replaced(script: str) -> None:
        (tmp_path / "nft").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nft").chmod(0o755)

    return replaced


@pytest.mark.usefixtures("nft")
@pytest.mark.parametrize(
    "call",
    [lambda: set_filter("t0", WEB), lambda: remove_filter("t0"), filtered_taps, dropped_packets],
)
def test_a_missing_nft_is_told_as_such(call: Callable[[], object]) -> None:
    with pytest.raises(PacketFilterError, match="nft") as caught:
        call()
    assert "install nftables" in (caught.value.hint or "")


def test_nfts_reason_is_told(nft: Callable[[str], None]) -> None:
    nft('echo "internal:0:0-0: Error: Could not process rule: Not supported" >&2; exit 1')
    with pytest.raises(PacketFilterError, match="t0: .*: Could not process rule: Not supported$"):
        set_filter("t0", WEB)


def test_an_nft_that_hangs_is_ended(
    nft: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packet_filter, "TIMEOUT_S", 0.2)
    nft("exec /bin/sleep 60")
    with pytest.raises(PacketFilterError, match="does not end"):
        remove_filter("t0")


@pytest.mark.parametrize("said", ["", "[]", '{"nftables": [{"chain": {}}]}', "{"])
def test_an_answer_that_makes_no_sense_is_an_error(nft: Callable[[str], None], said: str) -> None:
    nft(f"echo '{said}'")
    with pytest.raises(PacketFilterError):
        filtered_taps()


def test_tables_of_others_are_no_filters(nft: Callable[[str], None]) -> None:
    chains = [("brine-t0", "sources"), ("brine-t1", "others"), ("sources", "sources")]
    told = [f'{{"chain": {{"table": "{table}", "name": "{name}"}}}}' for table, name in chains]
    nft(f'echo \'{{"nftables": [{{"metainfo": {{}}}}, {", ".join(told)}]}}\'')
    assert filtered_taps() == {"t0"}
