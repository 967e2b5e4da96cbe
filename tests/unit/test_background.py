"""Work that goes on while something else is done."""

from __future__ import annotations

import io
import sys
from threading import Event

import pytest

from brine.common import process
from brine.common.process import begun, spoken_wait


def test_it_goes_on_meanwhile() -> None:
    done = Event()
    result = begun(lambda: done.wait(60))
    done.set()
    assert result() is True


def test_what_it_raises_is_raised() -> None:
    result = begun(lambda: int("nothing"))
    with pytest.raises(ValueError, match="nothing"):
        result()


class _Heard(io.StringIO):
    """Stderr, and that something was said there."""

    def __init__(self) -> None:
        super().__init__()
        self.said = Event()

    def flush(self) -> None:
        self.said.set()


def test_only_what_takes_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = _Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    with spoken_wait("web1: waiting for nothing, at most 1 s"):
        pass
    monkeypatch.setattr(process, "_SILENT_S", 0.01)
    with spoken_wait("web1: waiting for its end, at most 60 s"):
        assert heard.said.wait(60)
    assert heard.getvalue() == "brine: web1: waiting for its end, at most 60 s\n"
