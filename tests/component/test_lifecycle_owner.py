"""The messages of `brine lifecycle own` and `prestop`; the test stands for the instance."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.vm.markers import MarkerKind, write_marker
from component.lifecycle_host import LifecycleHost, lifecycle_host
from lab.waiting import wait_for


@pytest.fixture
def host() -> Iterator[LifecycleHost]:
    with lifecycle_host() as host:
        yield host


def said(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The exit status of a command, and its stderr."""
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr.decode()


def lifecycle(host: LifecycleHost, *arguments: str) -> subprocess.Popen[bytes]:
    """Start one of the commands."""
    return host.run("brine", "lifecycle", *arguments, stderr=subprocess.PIPE)


def wait_touched(folder: Path) -> None:
    """Wait until an owner touches its watchdog once more."""
    touched = (folder / "watchdog").stat().st_mtime_ns
    wait_for("a touch", lambda: (folder / "watchdog").stat().st_mtime_ns != touched)


@pytest.mark.parametrize(
    ("who", "cause", "status"),
    [
        ("user", "guest-shutdown", 0),
        ("admin", "owner-request", 0),
        ("admin", "owner-gone", 10),
        ("crash", "eof", 11),
    ],
)
def test_an_owner_tells_of_an_end_that_nobody_asked_for(
    host: LifecycleHost, who: str, cause: str, status: int
) -> None:
    folder = host.define("ci1")
    owner = lifecycle(host, "own", "ci1")
    process = host.run_instance("ci1")
    wait_for("a watchdog", (folder / "watchdog").exists)
    wait_touched(folder)  # it has seen the instance run then
    marks = host.root / "run/brine/marks"
    write_marker(MarkerKind.VERDICT, "ci1", run="run1", folder=marks, who=who, cause=cause)
    host.end_instance("ci1", process)
    text = f"brine: error: ci1: has ended: {who}, {cause}\nbrine: hint: brine instance info ci1\n"
    assert said(owner) == (status, text if status else "")


def test_an_owner_learns_of_a_run_that_began_and_ended_between_two_looks(
    host: LifecycleHost,
) -> None:
    folder = host.define("ci1")
    marks = host.root / "run/brine/marks"

    def ended(run: str, who: str, cause: str) -> None:
        write_marker(MarkerKind.START, "ci1", run=run, folder=marks)
        write_marker(MarkerKind.VERDICT, "ci1", run=run, folder=marks, who=who, cause=cause)

    ended("run1", "user", "guest-shutdown")
    owner = lifecycle(host, "own", "ci1")
    wait_for("a watchdog", (folder / "watchdog").exists)
    wait_touched(folder)
    assert owner.poll() is None
    ended("run2", "crash", "eof")
    assert said(owner)[0] == 11


def test_a_command_that_does_not_exist_owns_nothing(host: LifecycleHost) -> None:
    folder = host.define("ci1")
    status, text = said(lifecycle(host, "own", "ci1", "--start", "--", "/no/such/command"))
    assert (status, text) == (1, "brine: error: ci1: there is no command /no/such/command\n")
    assert list(folder.iterdir()) == []


def test_a_command_that_cannot_run_ends_the_instance(host: LifecycleHost) -> None:
    host.define("ci1", watchdog_timeout=600)
    program = host.root / "run/program"
    program.write_bytes(b"\0")
    program.chmod(0o755)
    process = host.run_instance("ci1")
    host.start_handler()
    owner = lifecycle(host, "own", "ci1", "--", "/run/program")
    assert host.request() == "ci1 end owner-request"
    host.end_instance("ci1", process)
    host.answer("ci1 end done ")
    status, text = said(owner)
    assert status == 1
    assert "/run/program: Exec format error" in text


def test_a_command_without_dashes_is_told_of_them(host: LifecycleHost) -> None:
    host.define("ci1")
    status, text = said(lifecycle(host, "own", "ci1", "sleep", "5"))
    assert status == 2
    assert "unrecognized arguments: sleep 5; a command comes after --" in text


def test_an_owner_that_waits_for_a_former_one_can_be_told_to_end(host: LifecycleHost) -> None:
    folder = host.define("ci1")
    (folder / "terminate").touch()
    owner = lifecycle(host, "own", "ci1")
    assert owner.stderr
    assert b"waiting for the end that a former owner has asked for" in owner.stderr.readline()
    owner.terminate()
    assert owner.wait(30) == 0
    assert [one.name for one in folder.iterdir()] == ["terminate"]


def test_prestop_of_what_has_no_owner(host: LifecycleHost) -> None:
    status, text = said(lifecycle(host, "prestop", "ci2"))
    assert status == 0
    assert "warning: ci2: there is no such instance" in text
    host.define("ci1").rmdir()
    file = host.root / "var/lib/brine/instances/ci1.json"
    file.write_text(file.read_text().replace('{"watchdog_timeout": 8}', "null"))
    status, text = said(lifecycle(host, "prestop", "ci1"))
    assert status == 1
    assert "ci1: its spec has no owner" in text


def test_prestop_asks_again_in_a_folder_that_is_made_anew(host: LifecycleHost) -> None:
    folder = host.define("ci1", watchdog_timeout=600)
    process = host.run_instance("ci1")
    prestop = lifecycle(host, "prestop", "ci1")
    wait_for("a request", (folder / "terminate").exists)
    new = host.root / "run/new"
    new.mkdir()
    shutil.copy(folder / "pid", new)
    folder.rename(host.root / "run/old")
    new.rename(folder)
    wait_for("a request in the new folder", (folder / "terminate").exists)
    assert prestop.poll() is None
    host.end_instance("ci1", process)
    assert said(prestop) == (0, "")


def test_an_owner_that_can_see_the_process_needs_no_file_of_it(host: LifecycleHost) -> None:
    folder = host.define("ci1")
    owner = lifecycle(host, "own", "ci1")
    process = host.run_instance("ci1")
    wait_for("a watchdog", (folder / "watchdog").exists)
    wait_for("it to be watched", lambda: f"Pid:\t{process.pid}\n" in descriptors(owner))
    (folder / "pid").unlink()
    wait_touched(folder)
    assert owner.poll() is None
    (host.root / "run/brine/marks/ci1.start").unlink()  # so that no verdict is waited for
    process.kill()
    assert said(owner)[0] == 12


def descriptors(process: subprocess.Popen[bytes]) -> str:
    """The descriptors of a process, as the kernel has them."""
    return "".join(one.read_text() for one in Path(f"/proc/{process.pid}/fdinfo").iterdir())
