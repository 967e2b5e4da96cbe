"""Work that goes on while something else is done."""

from __future__ import annotations

from threading import Event

import pytest

from brine.common.background import begun


def test_it_goes_on_meanwhile() -> None:
    done = Event()
    result = begun(lambda: done.wait(60))
    done.set()
    assert result() is True


def test_what_it_raises_is_raised() -> None:
    result = begun(lambda: int("nothing"))
    with pytest.raises(ValueError, match="nothing"):
        result()
