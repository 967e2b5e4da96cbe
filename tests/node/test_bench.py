"""One short round of every benchmark: a number of Brine's is in each row of its tables."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.tree import TREE, clone, copy_sources


def run_bench(tree: Path, name: str, found: Path) -> subprocess.CompletedProcess[str]:
    command = [str(tree / "dev"), "bench", name, "--trial", "--json", str(found)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def names() -> list[str]:
    listed = subprocess.run([TREE / "dev", "bench"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines()][:-1]  # the last one is all


@pytest.mark.parametrize("name", names())
def test_a_benchmark_has_a_number_of_brines_in_each_row(name: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = run_bench(TREE, name, file)
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(file.read_bytes())
    assert found["is_right"]
    assert found["tables"]
    for table in found["tables"]:
        assert table["rows"], table["title"]
        for row in table["rows"]:
            assert isinstance(row["values"][0], int | float), row["title"]
            assert row["title"] in done.stdout


def test_a_benchmark_fails_whose_daemon_does_not_start(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copy_sources(clone(), tree)
    program = tree / "pkgs/kvmd/brine/kvmd/main.py"
    program.write_text("raise SystemExit('out of order')\n")
    done = run_bench(tree, "kvmd", tmp_path / "found.json")
    assert done.returncode == 1
    assert "it ended with 1: out of order" in done.stdout
    assert "bench: error: no number of Brine's: 103 VMs" in done.stderr
