"""Types of the command line's arguments that name an instance."""

from __future__ import annotations

import re

from brine.vm.instances import instance_names, name_by_uuid

_UUID = re.compile(r"(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def instance_name(text: str) -> str:
    """A type for an instance, given by its name or its UUID: its name.

    A name comes first. What is neither stays as it is, and the command refuses it.
    """
    if not _UUID.fullmatch(text):
        return text
    return text if text in instance_names() else name_by_uuid(text) or text
