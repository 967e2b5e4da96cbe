"""What component tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from component.kvmd_process import Kvmd, kvmd_process


@pytest.fixture
def kvmd() -> Iterator[Kvmd]:
    """A running kvmd."""
    with kvmd_process() as process:
        process.start()
        yield process
