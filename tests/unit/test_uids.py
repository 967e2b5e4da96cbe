"""User ids to oneself: real locks, real processes, and a /proc of our own where one must lie."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from brine.common import paths
from brine.common import uids as running_uids_module
from brine.common.privileges import Capability
from brine.common.uids import (
    Uid,
    UidPoolError,
    accounts_among,
    release_forgotten,
    release_uid,
    request_unused_uid,
    running_uids,
)

FIRST = 3_100_000_000  # far from what any machine gives out
POOL = [[FIRST, FIRST + 3]]
ONE = [[FIRST, FIRST]]

# Forks 64 requesters that begin at the same moment and end when their input does.
CROWD = """
import os, sys
from pathlib import Path
from brine.common import paths
from brine.common.uids import request_unused_uid

first, paths.LOCK_DIR = int(sys.argv[1]), Path(sys.argv[2])
gate, opener = os.pipe()
for _ in range(64):
    if os.fork() == 0:
        os.close(opener)
        os.read(gate, 1)
        try:
            uid = request_unused_uid([[first, first + 63]])
            told = f"{uid.uid}\\n"
        except BaseException as error:
            told = f"{error}\\n"
        os.write(1, told.encode())
        sys.stdin.read()
        os._exit(0)
"""

# Gets the user id, and becomes a program that has it.
BECOMER = """
import os, sys
from pathlib import Path
from brine.common import paths
from brine.common.uids import request_unused_uid

paths.LOCK_DIR = Path(sys.argv[2])
uid = request_unused_uid([[int(sys.argv[1])] * 2])
if sys.argv[3] == "hand over":
    uid.hand_over()
os.execvp("cat", ["cat"])
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs *script*."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def heir_of(uid: Uid) -> Iterator[None]:
    """For the time of the block, a program that has the lock of *uid*."""
    with subprocess.Popen(["sleep", "1000"], pass_fds=[uid.descriptor]) as heir:
        try:
            yield
        finally:
            heir.kill()


def descriptors() -> set[str]:
    """The descriptors that this process has open."""
    return set(os.listdir("/proc/self/fd"))


def lock_file(uid: int = FIRST) -> Path:
    return paths.LOCK_DIR / f"uid-{uid}.lock"


def is_free(uid: int = FIRST) -> bool:
    """Whether it can be had; it is not kept."""
    try:
        request_unused_uid([[uid, uid]]).unlock()
    except UidPoolError:
        return False
    return True


class FakeProc:
    """A /proc of one process, ours, to which others are added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.add(100, "0 0 0 0")
        (path / "self").symlink_to("100")
        self.mounted("rw")

    def add(self, process: int, uids: str) -> None:
        folder = self.path / str(process)
        folder.mkdir(parents=True)
        numbers = "\t".join(uids.split())
        (folder / "status").write_text(f"Name:\tx\nUid:\t{numbers}\nGid:\t7\t7\t7\t7\n")

    def mounted(self, options: str) -> None:
        device = self.path.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        lines = [
            "21 1 8:1 / / rw - ext4 /dev/sda1 rw,hidepid=2",
            f"22 21 {number} / {self.path} rw,noexec shared:5 - proc proc {options}",
        ]
        (self.path / "100/mountinfo").write_text("\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's own folder of locks."""
    (tmp_path / "locks").mkdir()
    monkeypatch.setattr(paths, "LOCK_DIR", tmp_path / "locks")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    monkeypatch.setattr(running_uids_module, "PROC", tmp_path / "proc")
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows us no more than it shows everybody."""

    def nothing(capability: Capability) -> bool:
        assert capability is Capability.SYS_PTRACE
        return False

    monkeypatch.setattr(running_uids_module, "may", nothing)


# Requesting.


def test_a_user_id_is_ours_alone_until_we_let_go() -> None:
    folder = paths.LOCK_DIR
    folder.rmdir()
    assert release_uid(FIRST) is True
    with request_unused_uid(ONE) as uid:
        assert uid.uid == FIRST
        assert os.readlink(f"/proc/self/fd/{uid.descriptor}") == str(folder / f"uid-{FIRST}.lock")
        assert lock_file().stat().st_mode & 0o777 == 0o600
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(uid.descriptor, b"x")  # a VM that inherits it fills no disk
        with pytest.raises(UidPoolError, match="is in use on this node: 1 locked, 0 without"):
            request_unused_uid(ONE)
        assert release_uid(FIRST) is False
    assert is_free()
    assert release_uid(FIRST) is True
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("pool", "fault"),
    [
        ([], "the pool of user ids is empty"),
        ([[0, 5]], "root's"),
        ([[0, 0]], "root's"),
        ([[5, 1]], "is no range"),
        ([[7]], "is no range"),
    ],
)
def test_of_no_pool_none_is_given_out(pool: list[list[int]], fault: str) -> None:
    with pytest.raises(UidPoolError, match=fault):
        request_unused_uid(pool)
    assert list(paths.LOCK_DIR.iterdir()) == []


def test_all_of_a_pool_are_given_out_in_no_order() -> None:
    pool = [[FIRST, FIRST + 39], [FIRST + 100, FIRST + 109]]
    held = [request_unused_uid(pool) for _ in range(50)]
    given = [uid.uid for uid in held]
    assert sorted(given) == [*range(FIRST, FIRST + 40), *range(FIRST + 100, FIRST + 110)]
    assert given != sorted(given)
    with pytest.raises(UidPoolError) as caught:
        request_unused_uid(pool)
    assert "50 user ids of the pool are all in use on this node: 50 locked" in str(caught.value)
    assert "brine uidpool add" in str(caught.value.hint)
    held[7].unlock()
    held[7] = request_unused_uid(pool)
    assert held[7].uid == given[7]
    for uid in held:
        uid.unlock()


def test_sixty_four_requesters_at_once_share_none() -> None:
    with start(CROWD, FIRST, paths.LOCK_DIR) as crowd:
        assert crowd.stdout
        assert crowd.stdin
        # Each of them keeps what it has until the last has one, and there is one for each.
        given = [crowd.stdout.readline().strip() for _ in range(64)]
        crowd.stdin.close()
    assert sorted(given) == [str(FIRST + number) for number in range(64)]


# Accounts.


def owned_by(monkeypatch: pytest.MonkeyPatch, users: set[int], groups: set[int]) -> None:
    """Have numbers belong to accounts, beside those that do."""
    getpwuid, getgrgid = pwd.getpwuid, grp.getgrgid

    def user(number: int) -> object:
        return SimpleNamespace(pw_name="alice") if number in users else getpwuid(number)

    def group(number: int) -> object:
        return SimpleNamespace(gr_name="staff") if number in groups else getgrgid(number)

    monkeypatch.setattr(pwd, "getpwuid", user)
    monkeypatch.setattr(grp, "getgrgid", group)


@pytest.mark.parametrize("users", [{FIRST, FIRST + 3}, {FIRST, FIRST + 2, FIRST + 3}])
def test_what_belongs_to_an_account_is_passed_over_and_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    users: set[int],
) -> None:
    owned_by(monkeypatch, users, {FIRST + 1})
    if FIRST + 2 in users:
        with pytest.raises(UidPoolError, match="0 locked, 0 without a lock, 4 of accounts"):
            request_unused_uid(POOL)
        assert list(paths.LOCK_DIR.iterdir()) == []
    else:
        for _ in range(50):  # as often as it takes for luck to try the others first
            with request_unused_uid(POOL) as uid:
                assert uid.uid == FIRST + 2
                assert list(paths.LOCK_DIR.iterdir()) == [lock_file(FIRST + 2)]
    assert f"{FIRST} (alice)" in caplog.text
    assert f"{FIRST + 1} (group staff)" in caplog.text


def test_the_accounts_of_this_machine_are_known() -> None:
    assert accounts_among([[0, 0], POOL[0]]) == {0: "root"}


# Processes.


def test_a_process_that_starts_between_request_and_lock_is_noticed(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def slow(descriptor: int, operation: int) -> None:
        # Somebody had the lock, started a process, and let go: all just now.
        with contextlib.suppress(FileExistsError):
            proc.add(300, f"{FIRST} {FIRST} {FIRST} {FIRST}")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with pytest.raises(UidPoolError, match="without a lock"):
        request_unused_uid(ONE)


def test_processes_that_end_meanwhile_do_not_matter(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    (proc.path / "200").mkdir()  # ended before its status was opened
    proc.add(300, "5 5 5 5")  # after that
    read = Path.read_bytes

    def ended(path: Path) -> bytes:
        if path.parent.name == "300":
            raise ProcessLookupError
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", ended)
    assert running_uids() == {0}


# A /proc that does not tell all.

HIDING = [
    "rw,hidepid=1",
    "rw,hidepid=2",
    "rw,hidepid=4",
    "rw,hidepid=invisible",
    "rw,hidepid=invisible,gid={gid}",
]


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize("options", HIDING)
def test_a_proc_that_hides_processes_is_not_taken_for_empty(proc: FakeProc, options: str) -> None:
    proc.mounted(options.format(gid=os.getegid()))
    before = descriptors()
    with pytest.raises(UidPoolError, match="hides those of others .it is mounted with hidepid="):
        request_unused_uid(ONE)
    assert descriptors() == before


@pytest.mark.usefixtures("unprivileged")
def test_whom_it_hides_nothing_from_may_ask(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.mounted("rw,hidepid=invisible")
    monkeypatch.setattr(running_uids_module, "may", lambda _capability: True)
    assert running_uids() == {0}


def of_others(proc: FakeProc) -> None:
    (proc.path / "self").unlink()
    (proc.path / "self").symlink_to("100/../100")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda proc: proc.add(300, "1 1 1"), "300/status does not say whose it is"),
        (lambda proc: proc.add(300, "1 2 3 ?"), "300/status does not say whose it is"),
        # Which fails for root, too.
        (lambda proc: (proc.path / "300/status").mkdir(parents=True), "300/status: Is a directory"),
        (of_others, "does not show this process"),
        (
            lambda proc: (proc.path / "100/mountinfo").write_text("21 1 8:1 / / rw - ext4 /x rw\n"),
            "is not among the mounts",
        ),
    ],
)
def test_a_proc_that_says_less_is_not_trusted(
    proc: FakeProc, damage: Callable[[FakeProc], object], said: str
) -> None:
    damage(proc)
    with pytest.raises(UidPoolError, match=said) as caught:
        running_uids()
    assert caught.value.hint == "be root, with a /proc that shows all processes"


# Handing over.


@pytest.mark.parametrize("hands_over", [True, False])
def test_a_program_that_we_become_has_what_we_hand_over(hands_over: bool) -> None:
    with start(BECOMER, FIRST, paths.LOCK_DIR, "hand over" if hands_over else "keep") as becomer:
        assert becomer.stdin
        assert becomer.stdout
        becomer.stdin.write("here\n")
        becomer.stdin.flush()
        assert becomer.stdout.readline() == "here\n"  # it is cat by now
        was_free = is_free()
        becomer.stdin.close()
    assert was_free is not hands_over
    assert is_free()


def test_our_unlocking_does_not_end_the_lock_of_an_heir() -> None:
    uid = request_unused_uid(ONE)
    assert not os.get_inheritable(uid.descriptor)
    with heir_of(uid):
        uid.unlock()
        assert not is_free()
    assert is_free()
    with pytest.raises(OSError, match="Bad file descriptor"):
        uid.hand_over()


# Giving back.


def test_a_block_that_fails_gives_it_back_unless_something_was_started() -> None:
    with pytest.raises(RuntimeError, match="no VM"):
        with request_unused_uid(ONE):
            raise RuntimeError("no VM")
    assert not lock_file().exists()
    with contextlib.ExitStack() as started:
        with pytest.raises(RuntimeError):
            with request_unused_uid(ONE) as uid:
                started.enter_context(heir_of(uid))
                raise RuntimeError("too late")
        assert not is_free()
    assert is_free()


def test_unlocking_leaves_the_file_and_releasing_removes_it() -> None:
    before = descriptors()
    uid = request_unused_uid(ONE)
    uid.unlock()
    assert lock_file().exists()
    uid = request_unused_uid(ONE)
    uid.release()
    assert not lock_file().exists()
    uid.release()
    assert descriptors() == before


# The race: one process has opened the file that another is about to remove.


@pytest.fixture
def between_open_and_lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Functions to call once, after the next lock file has been opened."""
    calls: list[object] = []
    flock = fcntl.flock

    def interrupted(descriptor: int, operation: int) -> None:
        if calls:
            call = calls.pop()
            assert callable(call)
            call()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    yield calls
    assert calls == []


def test_the_lock_of_a_removed_file_is_none(between_open_and_lock: list[object]) -> None:
    first = request_unused_uid(ONE)
    successors: list[Uid] = []

    def overtake() -> None:
        first.release()
        successors.append(request_unused_uid(ONE))

    before = descriptors()
    between_open_and_lock.append(overtake)
    # Its file is that of the first, which nobody has locked any more, but which is gone.
    with pytest.raises(UidPoolError, match="1 locked"):
        request_unused_uid(ONE)
    assert len(descriptors()) == len(before)
    successors[0].unlock()


def test_who_comes_too_late_for_a_removed_file_makes_another(
    between_open_and_lock: list[object],
) -> None:
    first = request_unused_uid(ONE)
    between_open_and_lock.append(first.release)
    with request_unused_uid(ONE) as second:
        assert os.path.samestat(os.fstat(second.descriptor), lock_file().stat())


def test_a_release_does_not_remove_the_file_of_a_successor(
    between_open_and_lock: list[object],
) -> None:
    request_unused_uid(ONE).unlock()
    successors: list[Uid] = []

    def overtake() -> None:
        assert release_uid(FIRST)
        successors.append(request_unused_uid(ONE))

    between_open_and_lock.append(overtake)
    assert release_uid(FIRST) is False
    assert not is_free()
    successors[0].unlock()


def test_what_killed_ones_left_is_given_back_and_no_other() -> None:
    lock_file(4007).touch()
    (paths.LOCK_DIR / "uid-pool.lock").touch()
    with request_unused_uid(ONE) as uid:
        release_forgotten()
        left = {lock_file(uid.uid), paths.LOCK_DIR / "uid-pool.lock"}
        assert set(paths.LOCK_DIR.iterdir()) == left


# Faults.


def test_a_lock_that_can_not_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (paths.LOCK_DIR / "victim").touch()
    lock_file().symlink_to(paths.LOCK_DIR / "victim")
    with pytest.raises(UidPoolError, match=r"uid-\d+.lock: can't be locked: Too many levels"):
        request_unused_uid(ONE)
    with monkeypatch.context() as patched:
        patched.setattr(paths, "LOCK_DIR", paths.LOCK_DIR / "no" / "locks")
        with pytest.raises(UidPoolError, match="can't be locked: No such file or directory"):
            request_unused_uid(ONE)

    def refuse(*_arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UidPoolError, match="Permission denied") as caught:
        request_unused_uid(ONE)
    assert caught.value.hint == "be root"
