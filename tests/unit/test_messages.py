"""The message catalog explains exactly the messages that the code sends."""

from __future__ import annotations

import re
from pathlib import Path

from brine.common.journal import Message
from brine.kvmd import messages

CATALOG = Path(__file__).parents[2] / "pkgs/kvmd/system/brine-kvmd.catalog"


def sent() -> list[Message]:
    single = [value for value in vars(messages).values() if isinstance(value, Message)]
    return [*single, *messages.VERDICTS.values()]


def test_every_message_has_a_catalog_entry_and_the_reverse() -> None:
    listed = re.findall(r"^-- ([0-9a-f]{32})$", CATALOG.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(message.id for message in sent())


def test_ids_are_unique() -> None:
    ids = [message.id for message in sent()]
    assert len(ids) == len(set(ids))
