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
from brine.common.uids import request_unused_uid

first, folder = int(sys.argv[1]), Path(sys.argv[2])
gate, opener = os.pipe()
for _ in range(64):
    if os.fork() == 0:
        os.close(opener)
        os.read(gate, 1)
        try:
            uid = request_unused_uid([[first, first + 63]], lock_dir=folder)
            told = f"{uid.uid}\\n"
        except BaseException as error:
            told = f"{error}\\n"
        os.write(1, told.encode())
        sys.stdin.read()
        os._exit(0)
"""

# Requests, uses and releases one of two user ids, again and again; fails if it is not alone.

# Gets the user id, and leaves a program behind that has it; says both process ids.

# Gets the user id, and becomes a program that has it.
BECOMER = """
import os, sys
from pathlib import Path
from brine.common.uids import request_unused_uid

uid = request_unused_uid([[int(sys.argv[1])] * 2], lock_dir=Path(sys.argv[2]))
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


def lock_file(folder: Path, uid: int = FIRST) -> Path:
    return folder / f"uid-{uid}.lock"


def is_free(folder: Path, uid: int = FIRST) -> bool:
    """Whether it can be had; it is not kept."""
    try:
        request_unused_uid([[uid, uid]], lock_dir=folder).unlock()
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


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel shows us no more than it shows everybody."""

    def nothing(capability: Capability) -> bool:
        assert capability is Capability.SYS_PTRACE
        return False

    monkeypatch.setattr(running_uids_module, "may", nothing)


# Requesting.


def test_a_user_id_is_ours_alone_until_we_let_go(tmp_path: Path) -> None:
    folder = tmp_path / "brine"
    assert release_uid(FIRST, lock_dir=folder) is True
    with request_unused_uid(ONE, lock_dir=folder) as uid:
        assert uid.uid == FIRST
        assert os.readlink(f"/proc/self/fd/{uid.descriptor}") == str(folder / f"uid-{FIRST}.lock")
        assert lock_file(folder).stat().st_mode & 0o777 == 0o600
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(uid.descriptor, b"x")  # a VM that inherits it fills no disk
        with pytest.raises(UidPoolError, match="is in use on this node: 1 locked, 0 without"):
            request_unused_uid(ONE, lock_dir=folder)
        assert release_uid(FIRST, lock_dir=folder) is False
    assert is_free(folder)
    assert release_uid(FIRST, lock_dir=folder) is True
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
def test_of_no_pool_none_is_given_out(tmp_path: Path, pool: list[list[int]], fault: str) -> None:
    with pytest.raises(UidPoolError, match=fault):
        request_unused_uid(pool, lock_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_all_of_a_pool_are_given_out_in_no_order(tmp_path: Path) -> None:
    pool = [[FIRST, FIRST + 39], [FIRST + 100, FIRST + 109]]
    held = [request_unused_uid(pool, lock_dir=tmp_path) for _ in range(50)]
    given = [uid.uid for uid in held]
    assert sorted(given) == [*range(FIRST, FIRST + 40), *range(FIRST + 100, FIRST + 110)]
    elsewhere = [request_unused_uid(pool, lock_dir=tmp_path / "other") for _ in range(50)]
    assert given != [uid.uid for uid in elsewhere]
    for uid in elsewhere:
        uid.unlock()
    with pytest.raises(UidPoolError) as caught:
        request_unused_uid(pool, lock_dir=tmp_path)
    assert "50 user ids of the pool are all in use on this node: 50 locked" in str(caught.value)
    assert "brine uidpool add" in str(caught.value.hint)
    held[7].unlock()
    held[7] = request_unused_uid(pool, lock_dir=tmp_path)
    assert held[7].uid == given[7]
    for uid in held:
        uid.unlock()


def test_sixty_four_requesters_at_once_share_none(tmp_path: Path) -> None:
    with start(CROWD, FIRST, tmp_path) as crowd:
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    users: set[int],
) -> None:
    owned_by(monkeypatch, users, {FIRST + 1})
    if FIRST + 2 in users:
        with pytest.raises(UidPoolError, match="0 locked, 0 without a lock, 4 of accounts"):
            request_unused_uid(POOL, lock_dir=tmp_path)
        assert list(tmp_path.iterdir()) == []
    else:
        for _ in range(50):  # as often as it takes for luck to try the others first
            with request_unused_uid(POOL, lock_dir=tmp_path) as uid:
                assert uid.uid == FIRST + 2
                assert list(tmp_path.iterdir()) == [lock_file(tmp_path, FIRST + 2)]
    assert f"{FIRST} (alice)" in caplog.text
    assert f"{FIRST + 1} (group staff)" in caplog.text


def test_the_accounts_of_this_machine_are_known() -> None:
    assert accounts_among([[0, 0], POOL[0]]) == {0: "root"}


# Processes.


def test_a_process_that_starts_between_request_and_lock_is_noticed(
    tmp_path: Path, proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def slow(descriptor: int, operation: int) -> None:
        # Somebody had the lock, started a process, and let go: all just now.
        with contextlib.suppress(FileExistsError):
            proc.add(300, f"{FIRST} {FIRST} {FIRST} {FIRST}")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with pytest.raises(UidPoolError, match="without a lock"):
        request_unused_uid(ONE, lock_dir=tmp_path, proc=proc.path)


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
    assert running_uids(proc.path) == {0}


# A /proc that does not tell all.

HIDING = [
    "rw,hidepid=1",
    "rw,hidepid=2",
    "rw,hidepid=4",
    "rw,hidepid=noaccess",
    "rw,hidepid=invisible",
    "rw,hidepid=invisible,gid=4294967294",
    "rw,gid={gid},hidepid=ptraceable",
]


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize("options", HIDING)
def test_a_proc_that_hides_processes_is_not_taken_for_empty(
    tmp_path: Path, proc: FakeProc, options: str
) -> None:
    proc.mounted(options.format(gid=os.getegid()))
    before = descriptors()
    with pytest.raises(UidPoolError, match="hides those of others .it is mounted with hidepid="):
        request_unused_uid(ONE, lock_dir=tmp_path, proc=proc.path)
    assert descriptors() == before


@pytest.mark.usefixtures("unprivileged")
def test_whom_it_hides_nothing_from_may_ask(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.mounted("rw,gid=77,hidepid=invisible")
    monkeypatch.setattr(os, "getgroups", lambda: [5, 77])
    assert running_uids(proc.path) == {0}
    proc.mounted("rw,hidepid=invisible")
    monkeypatch.setattr(running_uids_module, "may", lambda _capability: True)
    assert running_uids(proc.path) == {0}


def nothing_said(proc: FakeProc) -> None:
    proc.add(300, "1 1 1")


def nonsense_said(proc: FakeProc) -> None:
    proc.add(300, "1 2 3 ?")


def unreadable(proc: FakeProc) -> None:
    (proc.path / "300/status").mkdir(parents=True)  # fails for root, too


def of_others(proc: FakeProc) -> None:
    (proc.path / "self").unlink()
    (proc.path / "self").symlink_to("100/../100")


def mounted_nowhere(proc: FakeProc) -> None:
    (proc.path / "100/mountinfo").write_text("21 1 8:1 / / rw - ext4 /dev/sda1 rw\n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (nothing_said, "300/status does not say whose it is"),
        (nonsense_said, "300/status does not say whose it is"),
        (unreadable, "300/status: Is a directory"),
        (of_others, "does not show this process"),
        (mounted_nowhere, "is not among the mounts"),
    ],
)
def test_a_proc_that_says_less_is_not_trusted(
    proc: FakeProc, damage: Callable[[FakeProc], None], said: str
) -> None:
    damage(proc)
    with pytest.raises(UidPoolError, match=said) as caught:
        running_uids(proc.path)
    assert caught.value.hint == "be root, with a /proc that shows all processes"


# Handing over.


@pytest.mark.parametrize("hands_over", [True, False])
def test_a_program_that_we_become_has_what_we_hand_over(tmp_path: Path, hands_over: bool) -> None:
    with start(BECOMER, FIRST, tmp_path, "hand over" if hands_over else "keep") as becomer:
        assert becomer.stdin
        assert becomer.stdout
        becomer.stdin.write("here\n")
        becomer.stdin.flush()
        assert becomer.stdout.readline() == "here\n"  # it is cat by now
        was_free = is_free(tmp_path)
        becomer.stdin.close()
    assert was_free is not hands_over
    assert is_free(tmp_path)


def test_our_unlocking_does_not_end_the_lock_of_an_heir(tmp_path: Path) -> None:
    uid = request_unused_uid(ONE, lock_dir=tmp_path)
    assert not os.get_inheritable(uid.descriptor)
    with heir_of(uid):
        uid.unlock()
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        uid.hand_over()


# Giving back.


def test_a_block_that_fails_gives_it_back_unless_something_was_started(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no VM"):
        with request_unused_uid(ONE, lock_dir=tmp_path):
            raise RuntimeError("no VM")
    assert not lock_file(tmp_path).exists()
    with contextlib.ExitStack() as started:
        with pytest.raises(RuntimeError):
            with request_unused_uid(ONE, lock_dir=tmp_path) as uid:
                started.enter_context(heir_of(uid))
                raise RuntimeError("too late")
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_unlocking_leaves_the_file_and_releasing_removes_it(tmp_path: Path) -> None:
    before = descriptors()
    uid = request_unused_uid(ONE, lock_dir=tmp_path)
    uid.unlock()
    assert lock_file(tmp_path).exists()
    uid = request_unused_uid(ONE, lock_dir=tmp_path)
    uid.release()
    assert not lock_file(tmp_path).exists()
    uid.release()
    assert descriptors() == before


# The race: somebody has opened the file that another is about to remove.


@pytest.fixture
def between_open_and_lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What is put into this list is called once, after the next lock file has been opened."""
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


def test_the_lock_of_a_removed_file_is_none(
    tmp_path: Path, between_open_and_lock: list[object]
) -> None:
    first = request_unused_uid(ONE, lock_dir=tmp_path)
    successors: list[Uid] = []

    def overtake() -> None:
        first.release()
        successors.append(request_unused_uid(ONE, lock_dir=tmp_path))

    before = descriptors()
    between_open_and_lock.append(overtake)
    # Its file is that of the first, which nobody has locked any more, but which is gone.
    with pytest.raises(UidPoolError, match="1 locked"):
        request_unused_uid(ONE, lock_dir=tmp_path)
    assert len(descriptors()) == len(before)
    successors[0].unlock()


def test_who_comes_too_late_for_a_removed_file_makes_another(
    tmp_path: Path, between_open_and_lock: list[object]
) -> None:
    first = request_unused_uid(ONE, lock_dir=tmp_path)
    between_open_and_lock.append(first.release)
    with request_unused_uid(ONE, lock_dir=tmp_path) as second:
        assert os.path.samestat(os.fstat(second.descriptor), lock_file(tmp_path).stat())


def test_a_release_does_not_remove_the_file_of_a_successor(
    tmp_path: Path, between_open_and_lock: list[object]
) -> None:
    request_unused_uid(ONE, lock_dir=tmp_path).unlock()
    successors: list[Uid] = []

    def overtake() -> None:
        assert release_uid(FIRST, lock_dir=tmp_path)
        successors.append(request_unused_uid(ONE, lock_dir=tmp_path))

    between_open_and_lock.append(overtake)
    assert release_uid(FIRST, lock_dir=tmp_path) is False
    assert not is_free(tmp_path)
    successors[0].unlock()


def test_what_killed_ones_left_is_given_back_and_no_other(tmp_path: Path) -> None:
    lock_file(tmp_path, 4007).touch()
    (tmp_path / "uid-pool.lock").touch()
    with request_unused_uid(ONE, lock_dir=tmp_path) as uid:
        release_forgotten(lock_dir=tmp_path)
        left = {lock_file(tmp_path, uid.uid), tmp_path / "uid-pool.lock"}
        assert set(tmp_path.iterdir()) == left


# Faults.


def test_a_lock_that_can_not_be_had_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "victim").touch()
    lock_file(tmp_path).symlink_to(tmp_path / "victim")
    with pytest.raises(UidPoolError, match=r"uid-\d+.lock: can't be locked: Too many levels"):
        request_unused_uid(ONE, lock_dir=tmp_path)
    with pytest.raises(UidPoolError, match="can't be locked: No such file or directory"):
        request_unused_uid(ONE, lock_dir=tmp_path / "no" / "locks")

    def refuse(*_arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UidPoolError, match="Permission denied") as caught:
        request_unused_uid(ONE, lock_dir=tmp_path)
    assert caught.value.hint == "be root"
