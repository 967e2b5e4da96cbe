"""A systemctl that says what a test has it say, for code that is not to reach the real one.

systemctl = ScriptedSystemctl(tmp_path / "systemctl", monkeypatch)
systemctl.unit("brine-instance@web1.service", ActiveState="active", MainPID="17")
"""

from __future__ import annotations

import os
import shlex
from itertools import dropwhile
from pathlib import Path

import pytest

_SCRIPT = """#!/bin/sh
folder={folder}
# In one piece, as others may be asking at the same time.
asked=$(printf '%s\\n' "$@")
printf '%s\\n\\n' "$asked" >>"$folder/asked"
shows=
while case $1 in --*) true ;; *) false ;; esac; do
    [ "$1" != --show-transaction ] || shows=1
    shift
done
verb=$1
if [ -e "$folder/refused/$verb" ]; then
    cat "$folder/refused/$verb" >&2
    exit 1
fi
for name; do :; done
if [ -e "$folder/$verb/$name" ]; then
    mv "$folder/$verb/$name" "$folder/units/$name"
fi
[ -z "$shows" ] || echo "Enqueued anchor job 7 $name/$verb." >&2
if [ "$verb" = list-jobs ] && [ -e "$folder/jobs" ]; then
    cat "$folder/jobs"
fi
[ "$verb" = show ] || exit 0
while [ "$1" != -- ]; do shift; done
shift
for name; do
    case $name in
        *\\**)
            for file in "$folder"/units/*; do
                [ ! -e "$file" ] || {{ cat "$file"; echo; }}
            done
            ;;
        *)
            if [ -e "$folder/units/$name" ]; then
                cat "$folder/units/$name"
            else
                printf 'Id=%s\\nActiveState=inactive\\nResult=success\\n' "$name"
            fi
            echo
            ;;
    esac
done
"""


class ScriptedSystemctl:
    """Its units and the calls of it; it is first in the path for the rest of the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        (folder / "bin").mkdir(parents=True)
        for name in ("units", "refused", "start", "stop"):
            (folder / name).mkdir()
        program = folder / "bin/systemctl"
        program.write_text(_SCRIPT.format(folder=shlex.quote(str(folder))))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")

    def unit(self, name: str, /, **properties: str) -> None:
        """Have it know a unit with these properties."""
        self._write("units", name, properties)

    def becomes(self, verb: str, name: str, /, **properties: str) -> None:
        """Have a unit be that when it is told `start` or `stop` of it."""
        self._write(verb, name, properties)

    def queues(self, name: str, kind: str = "start") -> None:
        """Have it have something to do for a unit, which it has not begun yet."""
        self.unit(name, ActiveState="inactive", Result="success", Job="7")
        (self._folder / "jobs").write_text(f"7 {name} {kind} waiting\n")

    def refuse(self, verb: str, said: str) -> None:
        """Have it refuse a verb, and say that on stderr."""
        (self._folder / "refused" / verb).write_text(said)

    def asked(self, verb: str) -> list[list[str]]:
        """The arguments after a verb, each time that it was given."""
        file = self._folder / "asked"
        every = file.read_text().split("\n\n") if file.exists() else []
        lists = [text.strip("\n").split("\n") for text in every if text]
        words = [list(dropwhile(lambda word: word.startswith("--"), one)) for one in lists]
        return [one[1:] for one in words if one[0] == verb]

    def _write(self, folder: str, name: str, properties: dict[str, str]) -> None:
        lines = [f"{key}={value}\n" for key, value in {"Id": name, **properties}.items()]
        (self._folder / folder / name).write_text("".join(lines))
