"""User ids of a pool under real processes that run with them, and a /proc that hides these."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from brine.common import paths
from brine.common.privileges import Capability
from brine.common.uids import (
    UidPoolError,
    release_uid,
    request_unused_uid,
    running_uids,
)
from lab.waiting import wait_for

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="other users' processes take root")

FIRST = 3_200_000_000  # not the unit tests', which run at the same time
ONE = [[FIRST, FIRST]]
FOUR = [[FIRST, FIRST + 3]]

# Has just one of its user ids of the pool, and says when.
PARTLY = """
import ctypes, os, sys
uid, which = int(sys.argv[1]), sys.argv[2]
if which == "file-system":
    ctypes.CDLL(None).setfsuid(ctypes.c_uint(uid))
else:
    os.setresuid(*[uid if which == each else 0 for each in ("real", "effective", "saved")])
print("is", flush=True)
sys.stdin.read()
"""

# A VM: is handed a lock as root, and gives up root only when it is told to.
VM = """
import os, sys
print("root", flush=True)
sys.stdin.readline()
os.setresuid(*[int(sys.argv[1])] * 3)
print("user", flush=True)
sys.stdin.read()
"""

# Requests a user id with no more than the capabilities that are given by number.
CONFINED = """
import sys
from pathlib import Path
from brine.common import paths
from brine.common.privileges import Capability, keep_only
from brine.common.uids import request_unused_uid
from brine.common.uids import UidPoolError

paths.LOCK_DIR = Path(sys.argv[2])
keep_only(*[Capability(int(number)) for number in sys.argv[3:]])
try:
    print(request_unused_uid([[int(sys.argv[1])] * 2]).uid)
except UidPoolError as error:
    print(error, "/", error.hint)
"""


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's own folder of locks."""
    (tmp_path / "locks").mkdir()
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "locks")


@contextlib.contextmanager
def running(
    script: str, *arguments: object, pass_fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A process of that script, for the time of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def is_free() -> bool:
    try:
        request_unused_uid(ONE).unlock()
    except UidPoolError:
        return False
    return True


@pytest.mark.parametrize("which", ["real", "effective", "saved", "file-system"])
def test_a_process_that_took_no_lock_is_noticed_by_each_of_its_ids(which: str) -> None:
    with running(PARTLY, FIRST, which) as process:
        assert says(process) == "is"
        with pytest.raises(UidPoolError, match="0 locked, 1 without a lock"):
            request_unused_uid(ONE)
    assert is_free()


def test_processes_of_all_but_one_leave_that_one() -> None:
    with contextlib.ExitStack() as stack:
        for number in (0, 1, 3):
            process = stack.enter_context(running(PARTLY, FIRST + number, "effective"))
            assert says(process) == "is"
        for _ in range(5):
            with request_unused_uid(FOUR) as uid:
                assert uid.uid == FIRST + 2


def test_a_vm_has_its_user_id_from_before_it_gives_up_root_until_it_ends() -> None:
    with contextlib.ExitStack() as stack:
        with request_unused_uid(ONE) as uid:
            vm = stack.enter_context(running(VM, uid.uid, pass_fds=[uid.descriptor]))
        assert says(vm) == "root"
        assert FIRST not in running_uids()
        assert not is_free()  # by its lock alone

        assert vm.stdin
        vm.stdin.write("\n")
        vm.stdin.flush()
        assert says(vm) == "user"
        assert not is_free()
        # Somebody tidies up where he should not: then it is by its process alone.
        (paths.LOCK_DIR / f"uid-{FIRST}.lock").unlink()
        with pytest.raises(UidPoolError, match="0 locked, 1 without a lock"):
            request_unused_uid(ONE)
    assert is_free()
    assert release_uid(FIRST)
    assert list(paths.LOCK_DIR.iterdir()) == []


def test_a_process_that_runs_with_the_user_id_needs_no_lock() -> None:
    with request_unused_uid(ONE) as uid:
        process = subprocess.Popen(["sleep", "1000"], user=uid.uid)
    try:
        assert not is_free()
    finally:
        process.kill()
        # Dead, but not yet waited for: it may still have files open.
        wait_for("it to end", lambda: _state(process.pid) == "Z")
        assert not is_free()
        process.wait()
    assert is_free()


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("hiding", ["1", "2"])
def test_a_proc_that_hides_processes_is_no_proof_that_there_are_none(hiding: str) -> None:
    # Confined to nothing, and then to what it takes.
    script = f"""
        mount -t proc -o hidepid={hiding} proc /proc
        "$@"
        "$@" {Capability.SYS_PTRACE.value}
    """
    request = [sys.executable, "-c", CONFINED, str(FIRST), str(paths.LOCK_DIR)]
    # A mount namespace, so that only these commands have such a /proc.
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", script, "sh", *request],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    hidden, seen = done.stdout.splitlines()
    assert "/proc hides those of others (it is mounted with hidepid=" in hidden
    assert "/ be root, with a /proc that shows all processes" in hidden
    assert seen == str(FIRST)
