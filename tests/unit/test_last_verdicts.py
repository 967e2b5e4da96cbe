"""kvmd's verdicts, as its command tells them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from brine.watcher.verdicts import VerdictsError, last_verdicts

SINCE = 1_767_225_600.0  # 2026-01-01


def line(instance: str, verdict: str, time: str) -> dict[str, str]:
    return {"instance": instance, "verdict": verdict, "time": time, "cause": "eof"}


def answering(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stdout: str, *, status: int = 0, stderr: str = ""
) -> Path:
    """Have `brine` be a command that says this; returns the file with what it was asked."""
    asked = folder / "asked"
    program = folder / "bin/brine"
    program.parent.mkdir()
    lines = [
        "#!/bin/sh",
        f"printf '%s ' \"$@\" >>{shlex.quote(str(asked))}",
        f"printf %s {shlex.quote(stdout)}",
        f"printf %s {shlex.quote(stderr)} >&2",
        f"exit {status}",
    ]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return asked


def test_the_last_one_of_each_that_is_of_its_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        line("web1", "crash", "2025-12-31T23:59:59.999999+00:00"),
        line("web2", "crash", "2026-01-01T00:00:01.000000+00:00"),
        line("web2", "user", "2026-01-01T00:00:02.000000+00:00"),
        line("web3", "admin", "2026-01-01T00:00:03.000000+00:00"),
        line("other", "admin", "2026-01-01T00:00:03.000000+00:00"),
    ]
    asked = answering(tmp_path, monkeypatch, json.dumps(lines))
    since = {"web1": SINCE, "web2": SINCE, "web3": SINCE + 3600}
    assert last_verdicts(since) == {"web2": "user"}
    words = asked.read_text().split()
    assert words[:4] == ["kvmd", "verdicts", "--json", "--since"]
    assert words[-4:] == ["--", "web1", "web2", "web3"]


def test_nobody_is_asked_about_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(tmp_path, monkeypatch, "[]")
    assert last_verdicts({}) == {}
    assert not asked.exists()


@pytest.mark.parametrize("stdout", ["", "{}", "[1]", '[{"instance": "web1"}]', "nonsense"])
def test_what_can_not_be_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: str
) -> None:
    answering(tmp_path, monkeypatch, stdout)
    if stdout == "{}":
        assert last_verdicts({"web1": SINCE}) == {}
        return
    with pytest.raises(VerdictsError, match="not understood"):
        last_verdicts({"web1": SINCE})


def test_what_it_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(tmp_path, monkeypatch, "", status=1, stderr="brine: error: no journal\nmore\n")
    with pytest.raises(VerdictsError, match="verdicts: brine: error: no journal$"):
        last_verdicts({"web1": SINCE})
