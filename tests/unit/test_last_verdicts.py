"""kvmd's verdicts, as the watcher asks for them."""

from __future__ import annotations

import errno
from collections.abc import Mapping

import pytest

from brine.instance import journal
from brine.instance.journal import Verdict
from brine.watcher.verdicts import VerdictsError, last_verdicts


def test_who_it_was_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(since: Mapping[str, float]) -> dict[str, Verdict]:
        assert since == {"web1": 1.0, "web2": 2.0}
        return {"web1": Verdict("crash", "guest-panic")}

    monkeypatch.setattr(journal, "last_verdicts", told)
    assert last_verdicts({"web1": 1.0, "web2": 2.0}) == {"web1": "crash"}


def test_nobody_is_asked_about_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "last_verdicts", lambda _: pytest.fail("asked"))
    assert last_verdicts({}) == {}


def test_a_journal_that_can_not_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Mapping[str, float]) -> dict[str, Verdict]:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(journal, "last_verdicts", fail)
    with pytest.raises(VerdictsError, match="the journal can't be read: Permission denied"):
        last_verdicts({"web1": 1.0})
