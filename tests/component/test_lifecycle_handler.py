"""The handler, with real files, owners and signals; the test answers in the executor's place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from component.daemon_process import ROOT
from component.lifecycle_host import LifecycleHost, lifecycle_host
from lab.waiting import wait_for

OWNER_SCRIPT = ROOT / "pkgs/lifecycle/system/examples/owner.sh"
MANY = 200_000
NOW, BEFORE = "0a" * 16, "0b" * 16


@pytest.fixture
def host() -> Iterator[LifecycleHost]:
    with lifecycle_host() as host:
        yield host


def owned(host: LifecycleHost, **owner: Any) -> Path:
    """The folder of ci1, whose owner is there, as is the handler."""
    folder = host.define("ci1", **owner)
    host.start_handler()
    (folder / "watchdog").touch()
    return folder


def confirmed(folder: Path) -> None:
    """Wait until the handler has confirmed a request."""
    wait_for("the request to be confirmed", lambda: not (folder / "terminate").exists())


def touch_for(folder: Path, seconds: float) -> None:
    """Be an owner for a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        (folder / "watchdog").touch()
        time.sleep(0.3)


def test_an_expired_watchdog_ends_its_instance_and_no_other(host: LifecycleHost) -> None:
    gone, alive = host.define("gone1"), host.define("alive1", watchdog_timeout=600)
    host.start_handler()
    (gone / "watchdog").touch()
    (alive / "watchdog").touch()
    assert host.request() == "gone1 end owner-gone"
    host.answer("gone1 end done ")
    assert host.requests_within(3) == []


def test_a_request_is_confirmed_when_the_instance_has_ended(host: LifecycleHost) -> None:
    folder = owned(host, watchdog_timeout=600)
    (folder / "terminate").touch()
    assert host.request() == "ci1 end owner-request"
    assert (folder / "terminate").exists()
    host.answer("ci1 end failed its guest is deaf")
    host.logged("its guest is deaf")
    assert (folder / "terminate").exists()
    assert host.request() == "ci1 end owner-request"
    host.answer("ci1 end done ")
    confirmed(folder)
    assert (folder / "watchdog").exists()


def test_a_request_about_a_run_that_begins_is_not_of_another_run(host: LifecycleHost) -> None:
    folder = host.define("ci1", watchdog_timeout=600)
    # The process is noted before the run is.
    (host.root / "run/brine/marks/ci1.start").write_text(f'{{"run": "{BEFORE}", "pid": 1}}')
    (folder / "pid").write_text(f"1 2 {NOW}\n")
    host.start_handler()
    (folder / ".terminate").write_text(f"{NOW}\n")
    (folder / ".terminate").rename(folder / "terminate")
    assert host.request() == "ci1 end owner-request"


@pytest.mark.parametrize("text", ["Thu Nov 26 17:23:24 UTC 2026\n", "please\n", BEFORE + " -\n"])
def test_a_request_with_any_text_is_one(host: LifecycleHost, text: str) -> None:
    folder = host.define("ci1", watchdog_timeout=600)
    (host.root / "run/brine/marks/ci1.start").write_text(f'{{"run": "{NOW}", "pid": 1}}')
    host.start_handler()
    (folder / "terminate").write_text(text)
    assert host.request() == "ci1 end owner-request"
    assert (folder / "terminate").exists()


def test_a_request_of_another_run_ends_nothing_and_the_owner_still_counts(
    host: LifecycleHost,
) -> None:
    folder = host.define("ci1")
    (host.root / "run/brine/marks/ci1.start").write_text(f'{{"run": "{NOW}", "pid": 1}}')
    host.start_handler()
    (folder / "watchdog").touch()
    (folder / ".terminate").write_text(f"{BEFORE}\n")
    (folder / ".terminate").rename(folder / "terminate")
    confirmed(folder)
    host.logged("another run, which is over")
    touch_for(folder, 12)
    assert host.requests_within(0.1) == []
    assert host.request() == "ci1 end owner-gone"


def test_a_request_of_another_run_that_cant_be_confirmed_ends_nothing(host: LifecycleHost) -> None:
    folder = host.define("ci1", watchdog_timeout=600)
    (host.root / "run/brine/marks/ci1.start").write_text(f'{{"run": "{NOW}", "pid": 1}}')
    (folder / "terminate").write_text(f"{BEFORE}\n")
    with read_only(host, folder):
        host.start_handler()
        host.logged("can't confirm its end yet")
        assert host.requests_within(7) == []
    confirmed(folder)


def asked_when_gone(host: LifecycleHost) -> Path:
    """Have an owner ask for the end of ci1 while it is ended as its watchdog has expired; returns
    its folder."""
    folder = owned(host)
    assert host.request() == "ci1 end owner-gone"
    (folder / "terminate").touch()
    host.logged("has asked for its end")
    return folder


def test_a_request_outlasts_an_end_that_is_called_off(host: LifecycleHost) -> None:
    folder = asked_when_gone(host)
    host.answer("ci1 end failed its guest is deaf")
    host.logged("its guest is deaf")
    (folder / "watchdog").touch()  # the owner that asks is there, and waits
    assert host.request() == "ci1 end owner-request"
    host.answer("ci1 end done ")
    confirmed(folder)


def test_an_owner_that_asks_as_its_watchdog_expires_is_told_once(host: LifecycleHost) -> None:
    folder = asked_when_gone(host)
    host.answer("ci1 end done ")
    confirmed(folder)
    assert host.requests_within(2) == []


def test_a_spec_that_is_away_for_a_moment_ends_nobody(host: LifecycleHost) -> None:
    owned(host, watchdog_timeout=600)
    host.undefine("ci1")
    host.define("ci1", watchdog_timeout=600)
    assert host.requests_within(5) == []


def test_names_that_are_no_instances_do_not_harm_the_handler(host: LifecycleHost) -> None:
    for name in (b"\xff", b"a b", b".x", b"-"):
        os.mkdir(os.fsencode(host.folders) + b"/" + name)
    folder = host.define("ci1", watchdog_timeout=600)
    host.start_handler()
    os.mkdir(os.fsencode(host.folders) + b"/\xfe")
    (folder / "terminate").touch()
    assert host.request() == "ci1 end owner-request"


def test_what_came_while_the_handler_was_away_is_acted_on(host: LifecycleHost) -> None:
    asks, gone = host.define("asks1", watchdog_timeout=600), host.define("gone1")
    returns = host.define("back1", watchdog_timeout=600)
    host.start_handler()
    for folder in (asks, gone, returns):
        (folder / "watchdog").touch()
    time.sleep(1.5)  # the handler has read that
    host.kill_handler()
    (asks / "terminate").touch()
    time.sleep(2)
    (returns / "watchdog").touch()
    host.start_handler()
    found = {host.request()}
    host.answer("asks1 end done ")
    found.add(host.request())
    assert found == {"asks1 end owner-request", "gone1 end owner-gone"}
    confirmed(asks)


@pytest.mark.parametrize(
    "step", ["as it waits", "before it reads the answer", "as it can't confirm"]
)
def test_a_handler_that_is_killed_asks_again_and_confirms(host: LifecycleHost, step: str) -> None:
    folder = host.define("ci1", watchdog_timeout=600)
    host.start_handler()
    (folder / "terminate").touch()
    assert host.request() == "ci1 end owner-request"
    if step == "before it reads the answer":
        host.signal_handler(signal.SIGSTOP)
        host.answer("ci1 end done ")
    elif step == "as it can't confirm":
        with read_only(host, folder):
            host.answer("ci1 end done ")
            host.logged("can't confirm its end yet")
    host.kill_handler()
    assert (folder / "terminate").exists()
    host.start_handler()
    assert host.request() == "ci1 end owner-request"
    host.answer("ci1 end idle ")
    confirmed(folder)
    assert host.requests_within(1) == []


def test_a_handler_that_is_killed_as_an_instance_starts_asks_again(host: LifecycleHost) -> None:
    owned(host, watchdog_timeout=600, restart_with_owner=True)
    assert host.request() == "ci1 start"
    host.kill_handler()
    host.start_handler()
    assert host.request() == "ci1 start"


def test_a_handler_that_is_killed_before_it_may_end_anybody_is_no_reprieve(
    host: LifecycleHost,
) -> None:
    gone = host.define("gone1")
    back = [host.define(f"back{number}") for number in range(8)]
    host.start_handler()
    for folder in (gone, *back):
        (folder / "watchdog").touch()
    time.sleep(1.5)  # the handler has read that
    host.kill_handler()
    time.sleep(8)
    # It gives its owners as long as it was away, at first. One that dies meanwhile takes none of
    # that away.
    host.start_handler()
    host.kill_handler()
    host.start_handler()
    watchdogs = " ".join(f"/run/brine/lifecycle/{folder.name}/watchdog" for folder in back)
    host.run("sh", "-c", f"while :; do touch {watchdogs}; sleep 0.5; done")
    assert host.request() == "gone1 end owner-gone"
    host.kill_handler()
    host.start_handler()
    assert host.request() == "gone1 end owner-gone"


@contextmanager
def read_only(host: LifecycleHost, folder: Path) -> Iterator[None]:
    """Have an owner's folder be read-only meanwhile."""
    path = f"/run/brine/lifecycle/{folder.name}"
    assert host.run("mount", "--bind", path, path).wait() == 0
    assert host.run("mount", "-o", "remount,bind,ro", path).wait() == 0
    try:
        yield
    finally:
        assert host.run("umount", path).wait() == 0


def test_a_handler_that_was_paused_gives_all_owners_their_time_again(host: LifecycleHost) -> None:
    folder = owned(host)
    time.sleep(1.5)
    host.signal_handler(signal.SIGSTOP)
    time.sleep(10)
    host.signal_handler(signal.SIGCONT)
    host.logged("did not run for a while")
    # The owner was paused, too, and goes on.
    touch_for(folder, 3)
    assert host.requests_within(0.1) == []


def test_a_spec_that_goes_takes_its_instance(host: LifecycleHost) -> None:
    folder = owned(host, watchdog_timeout=600)
    host.undefine("ci1")
    assert host.request() == "ci1 end spec-gone"
    host.answer("ci1 end done ")
    host.logged("no spec any more")
    # The folder is the executor's to remove, and its owner's requests are about nothing.
    (folder / "terminate").touch()
    assert host.requests_within(3) == []
    assert (folder / "watchdog").exists()


def test_an_owner_that_comes_back_starts_what_is_to_restart(host: LifecycleHost) -> None:
    folder = owned(host, restart_with_owner=True)
    assert host.request() == "ci1 start"
    host.answer("ci1 start done ")
    host.logged("has started, as its owner is back")
    assert host.request() == "ci1 end owner-gone"
    host.answer("ci1 end done ")
    (folder / "watchdog").touch()
    assert host.request() == "ci1 start"


def test_a_folder_that_is_removed_and_made_anew_is_watched(host: LifecycleHost) -> None:
    folder = owned(host, watchdog_timeout=600)
    (folder / "watchdog").unlink()
    folder.rmdir()
    folder.mkdir()
    (folder / "watchdog").touch()
    (folder / "terminate").touch()
    assert host.request() == "ci1 end owner-request"


def test_an_owner_goes_on_in_a_folder_that_is_made_anew(host: LifecycleHost) -> None:
    folder = host.define("ci1")
    host.start_handler()
    owner = host.run("brine", "lifecycle", "own", "ci1")
    wait_for("a watchdog", (folder / "watchdog").exists)
    shutil.rmtree(folder)
    folder.mkdir()
    wait_for("another watchdog", (folder / "watchdog").exists)
    assert host.requests_within(12) == []
    owner.kill()
    assert host.request() == "ci1 end owner-gone"


def test_a_folder_is_watched_whenever_it_is_mounted(host: LifecycleHost) -> None:
    path = "/run/brine/lifecycle/ci1"
    host.start_handler()
    # Before the mount, the folder is not the handler's.
    bare = host.root / "run/ci1"
    bare.mkdir()
    os.chown(bare, 1, 1)
    folder = bare.rename(host.folders / "ci1")
    host.define("ci1", watchdog_timeout=600)
    time.sleep(1.5)  # the handler has seen it
    for _ in range(2):
        assert host.run("mount", "-t", "tmpfs", "tmpfs", path).wait() == 0
        (folder / "watchdog").touch()
        (folder / "terminate").touch()
        assert host.request() == "ci1 end owner-request"
        host.answer("ci1 end done ")
        confirmed(folder)
        assert host.run("umount", path).wait() == 0
    assert "can't be watched" not in host.log.read_text()


def test_an_owner_may_be_there_before_its_instance_is_defined(host: LifecycleHost) -> None:
    folder = host.folders / "ci1"
    host.start_handler()
    folder.mkdir()
    (folder / "watchdog").touch()
    time.sleep(1.5)
    host.define("ci1", watchdog_timeout=600)
    (folder / "watchdog").touch()
    assert host.requests_within(3) == []
    (folder / "terminate").touch()
    assert host.request() == "ci1 end owner-request"


def make_in_future(path: Path) -> None:
    path.touch()
    os.utime(path, (4e9, 4e9))


@pytest.mark.parametrize(
    ("file", "make"),
    [
        ("watchdog", lambda path: path.symlink_to("/etc/passwd")),
        ("watchdog", os.mkfifo),
        ("watchdog", Path.mkdir),
        ("watchdog", make_in_future),
        ("terminate", lambda path: path.symlink_to("/etc/passwd")),
        ("terminate", os.mkfifo),
        ("terminate", Path.mkdir),
    ],
    ids=lambda one: one if isinstance(one, str) else "made",
)
def test_a_hostile_owner_costs_its_own_instance_at_most(
    host: LifecycleHost, file: str, make: object
) -> None:
    bad, good = host.define("bad1"), host.define("good1", watchdog_timeout=600)
    host.start_handler()
    (good / "watchdog").touch()
    if file == "terminate":
        (bad / "watchdog").touch()
    assert callable(make)
    make(bad / file)
    host.logged("does not count")
    if file == "terminate":
        assert host.request() == "bad1 end owner-gone"
        host.answer("bad1 end done ")
    (good / "terminate").touch()
    assert host.request() == "good1 end owner-request"
    host.answer("good1 end done ")
    confirmed(good)
    if file == "terminate":
        assert os.path.lexists(bad / "terminate")


def test_an_owner_with_a_million_files_hides_no_other_owner(host: LifecycleHost) -> None:
    bad, good = host.define("bad1", watchdog_timeout=600), host.define("good1")
    host.start_handler()
    (bad / "watchdog").touch()
    flood = f"i=0; while [ $i -lt {MANY} ]; do : >f$((i % 5000)); : >watchdog; i=$((i + 1)); done"
    with subprocess.Popen(["sh", "-c", flood], cwd=bad) as flooding:
        touch_for(good, 12)
        assert host.requests_within(0.1) == []
        (good / "terminate").touch()
        assert host.request() == "good1 end owner-request"
        flooding.kill()


def test_an_owner_that_asks_again_and_again_keeps_no_other_waiting(host: LifecycleHost) -> None:
    bad, good = host.define("bad1"), [host.define(f"good{number}") for number in range(3)]
    host.start_handler()
    ask = "while :; do : >terminate; while [ -e terminate ]; do :; done; done"
    with subprocess.Popen(["sh", "-c", ask], cwd=bad) as asking:
        requests = Counter[str]()
        deadline = time.monotonic() + 12
        while (left_s := deadline - time.monotonic()) > 0:
            for request in host.requests_within(left_s, most=1):
                requests[request] += 1
                host.answer(f"{' '.join(request.split()[:2])} done ")
                if folder := next(iter(good), None):
                    (folder / "terminate").touch()
                    good.pop(0)
        asking.kill()
    for number in range(3):
        assert requests[f"good{number} end owner-request"] == 1
    # One at the beginning, and one each 5 seconds.
    assert 2 <= requests["bad1 end owner-request"] <= 4


def test_an_owner_whose_files_have_the_same_fault_again_and_again_is_told_of_once(
    host: LifecycleHost,
) -> None:
    folder = host.define("ci1")
    host.start_handler()
    for _ in range(20):
        (folder / "terminate").symlink_to("/etc/passwd")
        time.sleep(0.05)
        (folder / "terminate").unlink()
    (folder / "terminate").touch()
    host.request()
    assert host.log.read_text().count("the request is no regular file") == 1


def test_a_folder_that_can_not_be_opened_is_told_of_once(host: LifecycleHost) -> None:
    folder = host.define("ci1")
    folder.chmod(0o700)
    os.chown(folder, 65534, 65534)
    host.start_handler(capabilities="-dac_override,-dac_read_search")
    host.logged("its folder can't be used: Permission denied")
    touch_for(folder, 3)
    assert host.log.read_text().count("its folder can't be used") == 1
    folder.chmod(0o755)
    (folder / "terminate").touch()
    assert host.request() == "ci1 end owner-request"


def test_an_owner_that_dies_without_a_spec_is_forgotten(host: LifecycleHost) -> None:
    folder = owned(host, watchdog_timeout=600)
    time.sleep(1.5)  # the handler has read that
    host.kill_handler()
    host.undefine("ci1")
    nearly_a_minute_ago = time.time() - 50  # the timeout where no spec says another
    os.utime(folder / "watchdog", (nearly_a_minute_ago, nearly_a_minute_ago))
    host.start_handler()
    assert host.request() == "ci1 end owner-gone"
    host.answer("ci1 end idle ")
    time.sleep(1)  # the handler has read that
    (folder / "terminate").touch()
    assert host.requests_within(3) == []


def test_a_read_only_file_system_ends_nobody_for_a_moment(host: LifecycleHost) -> None:
    folder = owned(host)
    assert host.run("mount", "-o", "remount,ro", "/run").wait() == 0
    time.sleep(10)
    assert host.run("mount", "-o", "remount,rw", "/run").wait() == 0
    touch_for(folder, 3)
    assert host.requests_within(0.1) == []


def test_an_owner_of_ten_lines_of_shell(host: LifecycleHost) -> None:
    folder = host.define("ci1")
    host.start_handler()
    owner = host.run("sh", str(OWNER_SCRIPT), "/run/brine/lifecycle/ci1")
    wait_for("a watchdog", (folder / "watchdog").exists)
    (folder / "pid").write_text("1 2 3\n")
    assert host.requests_within(12) == []
    owner.terminate()
    assert host.request() == "ci1 end owner-request"
    assert owner.poll() is None
    (folder / "pid").unlink()
    host.answer("ci1 end done ")
    assert owner.wait(30) == 0
    assert not (folder / "watchdog").exists()
    confirmed(folder)


def test_the_owner_command_and_prestop(host: LifecycleHost) -> None:
    folder = host.define("ci1")
    host.start_handler()
    owner = host.run("brine", "lifecycle", "own", "ci1")
    wait_for("a watchdog", (folder / "watchdog").exists)
    process = host.run_instance("ci1")
    assert host.requests_within(12) == []
    prestop = host.run("brine", "lifecycle", "prestop", "ci1")
    assert host.request() == "ci1 end owner-request"
    assert (folder / "terminate").read_text() == "run1\n"
    # The handler is away for a while, and prestop waits.
    host.kill_handler()
    host.start_handler()
    assert host.request() == "ci1 end owner-request"
    assert prestop.poll() is None
    host.end_instance("ci1", process)
    host.answer("ci1 end done ")
    assert prestop.wait(30) == 0
    assert owner.wait(30) == 12
    assert not (folder / "watchdog").exists()
    assert host.run("brine", "lifecycle", "prestop", "ci1").wait(30) == 0


def test_an_owner_that_is_told_to_end_after_its_instance_asks_for_nothing(
    host: LifecycleHost,
) -> None:
    folder = host.define("ci1", watchdog_timeout=600)
    host.start_handler()
    owner = host.run("brine", "lifecycle", "own", "ci1")
    wait_for("a watchdog", (folder / "watchdog").exists)
    process = host.run_instance("ci1")
    time.sleep(2)  # the owner has seen it
    host.end_instance("ci1", process)
    owner.terminate()
    owner.wait(30)
    # Until it was confirmed, the next owner would have to wait.
    assert not (folder / "terminate").exists()


def test_the_last_of_two_owners_counts(host: LifecycleHost) -> None:
    folder = host.define("ci1")
    host.start_handler()
    first = host.run("brine", "lifecycle", "own", "ci1", stderr=subprocess.PIPE)
    wait_for("a watchdog", (folder / "watchdog").exists)
    inode = (folder / "watchdog").stat().st_ino
    second = host.run("brine", "lifecycle", "own", "ci1")
    wait_for("another one", lambda: (folder / "watchdog").stat().st_ino != inode)
    lines = (folder / "watchdog").read_text().splitlines()
    assert [line.split()[0] for line in lines] == [str(second.pid), str(first.pid)]
    assert first.stderr
    assert b"another owner has taken it over" in first.stderr.readline()
    second.kill()
    assert host.request() == "ci1 end owner-gone"
    assert first.poll() is None


def test_an_owner_of_a_command(host: LifecycleHost) -> None:
    folder = host.define("ci1", watchdog_timeout=600)
    host.start_handler()
    command = ["sh", "-c", "echo runs; sleep 1; exit 7"]
    owner = host.run("brine", "lifecycle", "own", "ci1", "--", *command, stdout=subprocess.PIPE)
    (folder / "pid").write_text("1 2 run1\n")
    assert owner.stdout
    assert owner.stdout.readline() == b"runs\n"
    assert host.request() == "ci1 end owner-request"
    (folder / "pid").unlink()
    host.answer("ci1 end done ")
    assert owner.wait(30) == 7
