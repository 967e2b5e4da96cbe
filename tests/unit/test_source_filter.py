"""Filters of routed taps: what is said if nft is missing, refuses or hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from brine.hotplug.net import source_filter
from brine.hotplug.net.source_filter import (
    SourceFilterError,
    allow_sources,
    filtered_taps,
    forget_sources,
)
from brine.vm.connection import parse_address

ADDRESSES = [parse_address("192.0.2.10"), parse_address("2001:db8::10")]


@pytest.fixture
def nft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Replaces nft; until it is called, there is none."""
    monkeypatch.setattr(source_filter, "SEARCH_PATH", str(tmp_path))

    def replaced(script: str) -> None:
        (tmp_path / "nft").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nft").chmod(0o755)

    return replaced


@pytest.mark.usefixtures("nft")
@pytest.mark.parametrize(
    "call",
    [lambda: allow_sources("t0", ADDRESSES), lambda: forget_sources("t0"), filtered_taps],
)
def test_a_missing_nft_is_told_as_such(call: Callable[[], object]) -> None:
    with pytest.raises(SourceFilterError, match="nft") as caught:
        call()
    assert "install nftables" in (caught.value.hint or "")


def test_nfts_reason_is_told(nft: Callable[[str], None]) -> None:
    nft('echo "internal:0:0-0: Error: Could not process rule: Not supported" >&2; exit 1')
    with pytest.raises(SourceFilterError, match="t0: .*: Could not process rule: Not supported$"):
        allow_sources("t0", ADDRESSES)


def test_an_nft_that_hangs_is_ended(
    nft: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_filter, "TIMEOUT_S", 0.2)
    nft("exec /bin/sleep 60")
    with pytest.raises(SourceFilterError, match="does not end"):
        forget_sources("t0")


@pytest.mark.parametrize("said", ["", "[]", '{"nftables": [{"chain": {}}]}', "{"])
def test_an_answer_that_makes_no_sense_is_an_error(nft: Callable[[str], None], said: str) -> None:
    nft(f"echo '{said}'")
    with pytest.raises(SourceFilterError):
        filtered_taps()


def test_tables_of_others_are_no_filters(nft: Callable[[str], None]) -> None:
    chains = [("brine-t0", "sources"), ("brine-t1", "others"), ("sources", "sources")]
    told = [f'{{"chain": {{"table": "{table}", "name": "{name}"}}}}' for table, name in chains]
    nft(f'echo \'{{"nftables": [{{"metainfo": {{}}}}, {", ".join(told)}]}}\'')
    assert filtered_taps() == {"t0"}
