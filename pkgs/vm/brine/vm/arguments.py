"""Types of the command line's arguments that name an instance."""

from __future__ import annotations

import re

from brine.vm.instances import instance_names, name_by_uuid
from brine.vm.values import UUID


def instance_name(text: str) -> str:
    """A type for an instance, given by its name or its UUID: its name.

    A name comes first. A word that is neither stays as it is, and the command refuses it.
    """
    if not re.fullmatch(UUID, text):
        return text
    return text if text in instance_names() else name_by_uuid(text) or text
