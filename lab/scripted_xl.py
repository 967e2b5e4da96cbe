"""A stand-in for xl, for what real Xen does not do on demand: it says what it is told to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

HEADING = "Name  ID   Mem VCPUs\tState\tTime(s) UUID       Reason-Code\tSecurity Label"

_SCRIPT = """#!/bin/sh
folder=$(dirname "$0")/xl-says
echo "$*" >>"$folder/asked"
if [ -e "$folder/fault-$1" ]; then
    cat "$folder/fault-$1" >&2
    exit 1
fi
if [ "$1" = list ] || [ "$1" = info ]; then
    cat "$folder/$1"
elif [ "$1" = shutdown ] && [ ! -e "$folder/deaf" ]; then
    awk -v ended="$2" '$2 == ended { $5 = "---s--"; $8 = "0" } { print }' "$folder/list" \\
        >"$folder/left"
    mv "$folder/left" "$folder/list"
elif [ "$1" = destroy ]; then
    awk -v gone="$2" '$2 != gone' "$folder/list" >"$folder/left"
    mv "$folder/left" "$folder/list"
fi
"""


class ScriptedXl:
    """The stand-in, first in the path for the rest of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "xl-says"
        self._folder.mkdir(parents=True)
        program = folder / "xl"
        program.write_text(_SCRIPT)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        self.rows([])

    def rows(self, rows: Sequence[str]) -> None:
        """Have `xl list -v` say these rows."""
        (self._folder / "list").write_text("\n".join([HEADING, *rows]) + "\n")

    def domain(
        self,
        name: str,
        number: int,
        state: str,
        uuid: str,
        reason: int | None = None,
        *,
        cpu_s: float = 0.4,
    ) -> None:
        """Have one more row of a domain."""
        code = "-" if reason is None else f"{reason:x}"
        with (self._folder / "list").open("a") as file:
            file.write(f"{name}  {number}  64  1  {state}  {cpu_s} {uuid}  {code}  -\n")

    def memory(self, total_mib: int, free_mib: int) -> None:
        """Have Xen have this memory."""
        rows = f"total_memory           : {total_mib}\nfree_memory            : {free_mib}\n"
        (self._folder / "info").write_text(f"host                   : n1\n{rows}")

    def be_deaf(self) -> None:
        """Have no guest do what it is told."""
        (self._folder / "deaf").touch()

    def refuse(self, verb: str, said: str) -> None:
        """Have it refuse a verb, and say that on stderr."""
        (self._folder / f"fault-{verb}").write_text(said)

    def asked(self) -> list[str]:
        """The calls so far, without lists."""
        return [line for line in self._asked() if not line.startswith("list")]

    def lists(self) -> int:
        """How often it was asked for a list."""
        return sum(line.startswith("list") for line in self._asked())

    def _asked(self) -> list[str]:
        file = self._folder / "asked"
        return file.read_text().splitlines() if file.exists() else []
