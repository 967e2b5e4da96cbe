"""The memory that daemons lock into RAM, as another process sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="RLIMIT_MEMLOCK is for others")

LOOKS = """
import mmap, os, re, sys, tempfile
from brine.common.daemon import apply_memory_lock, lock_memory

def mappings():
    found, name = {}, ""
    for line in open("/proc/self/smaps"):
        if head := re.match(r"([0-9a-f]+-[0-9a-f]+) (\\S+) \\S+ \\S+ \\S+\\s*(.*)", line):
            name = tuple(head.groups())
            found[name] = {}
        elif field := re.match(r"(\\w+): +(\\d+) kB", line):
            found[name][field[1]] = int(field[2])
        elif line.startswith("VmFlags:"):
            found[name]["locked"] = "lo" in line.split()
    return found

def code():
    return [it for (_, mode, file), it in mappings().items() if "x" in mode and file[:1] == "/"]
"""


def run(text: str) -> str:
    """The output of a program in a process of its own, whose memory nothing else locks."""
    program = LOOKS + textwrap.dedent(text)
    tree = Path(__file__).parents[2] / "pkgs/common"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_code_that_has_not_run_yet_is_in_ram_too() -> None:
    run("""
        assert any(one["Rss"] < one["Size"] for one in code())
        lock_memory()
        assert all(one["Rss"] == one["Size"] and one["locked"] for one in code()), code()
        import sqlite3, _decimal  # what is loaded later
        assert all(one["Rss"] == one["Size"] and one["locked"] for one in code()), code()
        apply_memory_lock(False)
        assert not any(one["locked"] for one in code())
    """)


def test_a_forked_process_does_not_copy_what_it_shares() -> None:
    """As a worker of confd locks itself, which has the configuration of the one who loaded it."""
    run("""
        much = bytearray(os.urandom(1 << 20) * 64)
        lock_memory()
        if (child := os.fork()) == 0:
            lock_memory()
            sizes = [it for it in mappings().values() if it["Size"] >= 64 << 10]
            os._exit(any(it["Private_Dirty"] > 32 << 10 for it in sizes))
        assert os.waitpid(child, 0)[1] == 0
    """)


def test_a_limit_is_told() -> None:
    said = run("""
        import resource
        from brine.common.daemon import MemoryLockError
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        os.setresuid(65534, 65534, 65534)
        try:
            lock_memory()
        except MemoryLockError as error:
            print(error.hint)
    """)
    assert "LimitMEMLOCK=infinity" in said
