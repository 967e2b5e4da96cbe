"""The message catalogs explain exactly the messages that the code sends."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import brine.confd.messages
import brine.kvmd.messages
from brine.common.journal import Message

PKGS = Path(__file__).parents[2] / "pkgs"

PARTS = [
    pytest.param(brine.confd.messages, "confd", id="confd"),
    pytest.param(brine.kvmd.messages, "kvmd", id="kvmd"),
]


def sent(messages: ModuleType) -> list[Message]:
    """The messages of one part, those in its tables included."""
    values = list(vars(messages).values())
    for table in [value for value in values if isinstance(value, dict)]:
        values.extend(table.values())
    return [value for value in values if isinstance(value, Message)]


def listed(part: str) -> list[str]:
    """The ids that a part's catalog has entries for."""
    catalog = PKGS / part / "system" / f"brine-{part}.catalog"
    return re.findall(r"^-- ([0-9a-f]{32})$", catalog.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("messages", "part"), PARTS)
def test_every_message_has_a_catalog_entry_and_the_reverse(messages: ModuleType, part: str) -> None:
    assert sent(messages)
    assert sorted(listed(part)) == sorted(message.id for message in sent(messages))


def test_no_part_is_left_out() -> None:
    with_messages = {file.parent.name for file in PKGS.glob("*/brine/*/messages.py")}
    assert with_messages == {part.id for part in PARTS}


def test_ids_are_unique() -> None:
    ids = [message.id for part in PARTS for message in sent(part.values[0])]  # type: ignore[arg-type]
    assert len(ids) == len(set(ids))
