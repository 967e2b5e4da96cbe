"""Entry points of installed distributions, read without :mod:`importlib.metadata`.

That module takes longer to load than most of our commands take to run: it brings mail, archives and
CSV along. Source: "Entry points specification" of the Python Packaging User Guide.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

_METADATA_FOLDERS = (".dist-info", ".egg-info")
_FILE = "entry_points.txt"


class EntryPoint(NamedTuple):
    """Something that a distribution brings under a name.

    :param value: ``module:attribute``.
    """

    name: str
    value: str

    def load(self) -> Any:
        """Import it.

        :raises ImportError: if its module is not there.
        :raises AttributeError: if it is not in that module.
        """
        module, _, attribute = self.value.partition(":")
        return getattr(import_module(module), attribute)


def entry_points(group: str, path: Iterable[str] | None = None) -> list[EntryPoint]:
    """What distributions bring for a group; of two of one name, the one that is found first.

    :param path: folders that modules are imported from; None is :data:`sys.path`.
    """
    found: dict[str, EntryPoint] = {}
    for folder in dict.fromkeys(sys.path if path is None else path):
        for text in _files(folder or "."):
            for entry in _entries(text, group):
                found.setdefault(entry.name, entry)
    return list(found.values())


def _files(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError):  # not there, or an archive
        for name in sorted(os.listdir(folder)):
            if name.endswith(_METADATA_FOLDERS):
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    with open(f"{folder}/{name}/{_FILE}", encoding="utf-8") as file:
                        yield file.read()


def _entries(text: str, group: str) -> Iterator[EntryPoint]:
    here = False
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("["):
            here = line == f"[{group}]"
        elif here and "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield EntryPoint(name.strip(), value.partition("[")[0].strip())
