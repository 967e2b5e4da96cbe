"""What a benchmark says where a number of Brine's is missing."""

from __future__ import annotations

import pytest

from bench.harness import Report, Round, Table, TableRow


def report(*rows: TableRow, title: str = "times") -> Report:
    return Report(["a machine"], [Table(title, rows, ("ours", "theirs"))], results=[])


def row(ours: float | None, theirs: float | None) -> TableRow:
    return TableRow.of_values("an answer", "ms", {"ours": ours, "theirs": theirs})


def test_each_missing_number_of_brines_is_named() -> None:
    assert report(row(None, 0.1)).missing() == ["times: an answer"]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_missing(number: float) -> None:
    assert report(row(number, 0.1)).missing() == ["times: an answer"]


def test_an_empty_table_is_missing() -> None:
    assert report(title="nothing").missing() == ["nothing"]


def test_only_a_peers_number_may_be_missing() -> None:
    assert report(row(0.1, None), row(0.0, 0.1)).missing() == []


def test_the_medians_of_rounds_without_a_number_are_missing() -> None:
    rounds = [Round("ours", 10), Round("theirs", 10, {"p50": 0.1})]
    found = TableRow.of_rounds("p50", "ms", rounds, ("ours", "theirs"), "p50")
    assert report(found).missing() == ["times: p50"]
