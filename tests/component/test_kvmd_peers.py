"""kvmd and everything that can stand in a control directory: slow, broken, hostile, odd.

The peers here are raw sockets, which do what no QEMU would do on demand.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from brine.common.figures import FILE_NAME, Figures, read_figures
from brine.kvmd.discovery import MOST_FOREIGN
from brine.vm.markers import MarkerKind, read_marker, write_marker
from component.kvmd_process import Kvmd
from component.peers import peer, pouring, poweroff, two_of_one_name, user_ends, watched
from lab.fake_qemu import GREETING, Peer, event_line
from lab.waiting import wait_for

RUN = "0d" * 16


def fill(folder: Path) -> list[Path]:
    """Files that leave no room for one more in a small file system."""
    fillers: list[Path] = []
    try:
        while len(fillers) < 100:
            (folder / f"filler{len(fillers)}").touch()
            fillers.append(folder / f"filler{len(fillers)}")
    except OSError as error:
        assert error.errno == errno.ENOSPC
        return fillers
    raise AssertionError("the file system is not full")


@pytest.fixture
def bystander(kvmd: Kvmd) -> Iterator[None]:
    """A good VM; at the end of the test it is still watched, and its verdict comes at once."""
    with watched(kvmd, "bystander") as good:
        yield
        user_ends(kvmd, good)


def test_figures_tell_what_is_watched_and_count_on_over_a_kill(kvmd: Kvmd) -> None:
    file = kvmd.state / FILE_NAME

    def figures() -> Figures:
        found = read_figures(file)
        assert found
        return found

    with watched(kvmd, "one") as one, watched(kvmd, "two"):
        wait_for("both to be counted", lambda: figures().number("watched") == 2)
        assert figures().is_running
        user_ends(kvmd, one)
        wait_for("the end to be counted", lambda: figures().rows("verdicts", 2))
        before = figures()
        assert before.rows("verdicts", 2) == [(("user", "guest-shutdown"), 1)]
        assert before.number("delays") == 1
        kvmd.stop(signal.SIGKILL)
        assert not figures().is_running
        kvmd.start()
        wait_for("a new process to write", lambda: figures().is_running)
        assert figures().rows("verdicts", 2) == before.rows("verdicts", 2)
        kvmd.stop()
        assert not figures().is_running
        file.write_text('{"version": 1, "fig')
        kvmd.start()
        wait_for("damaged figures to be replaced", lambda: figures().is_running)
        assert figures().rows("verdicts", 2) == []


def test_a_socket_that_does_not_listen_yet_is_tried_again(kvmd: Kvmd) -> None:
    with peer(kvmd, "slow", listen=False) as slow:
        time.sleep(0.5)
        slow.listener.listen(1)
        slow.negotiate()
        kvmd.watches("slow")


def test_events_are_logged_for_those_who_want_all(kvmd: Kvmd) -> None:
    kvmd.restart(log_level="debug")
    with watched(kvmd, "moved") as moved:
        moved.event("STOP")
        kvmd.wait_logged("moved: QEMU's event STOP")


def test_a_dead_socket_file_is_left_alone_without_busy_work(kvmd: Kvmd) -> None:
    kvmd.reload_whole(connect_retry_s=0.5)
    Peer(kvmd.control / "dead.kvmd").end(leave_file=True)
    kvmd.wait_logged("dead: no process listens on it; left alone")
    before = kvmd.cpu_ticks()
    time.sleep(1)
    assert kvmd.cpu_ticks() - before <= 2
    assert len(kvmd.log("dead")) == 1


def test_a_dead_socket_file_that_comes_to_life_is_found_at_a_rescan(kvmd: Kvmd) -> None:
    kvmd.restart(connect_retry_s=0.1, rescan_interval_s=1)
    with peer(kvmd, "late", listen=False) as late:
        kvmd.wait_logged("late: no process listens")
        late.listener.listen(1)
        late.negotiate()
        kvmd.watches("late")


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not JSON"),
        (b"\x00\xff\xfe\n", "not JSON"),
        (b"[1, 2]\n", "not a JSON object"),
        (b'{"return": {}}\n', "no QMP greeting"),
        (GREETING + b"garbage\n", "not JSON"),
        (GREETING + b'{"return": {}}\n{"event": 5}\n', "not an event"),
        (b"[" * 50_000 + b"\n", "not JSON"),
    ],
)
def test_a_peer_that_talks_garbage_costs_one_line(kvmd: Kvmd, sent: bytes, said: str) -> None:
    with peer(kvmd, "bad") as bad:
        bad.accept().sendall(sent)
        assert said in kvmd.wait_logged("bad: left alone")
        time.sleep(0.2)
        assert len(kvmd.log(": bad: left alone")) == 1
        assert not kvmd.shut_down_by_user("bad")


@pytest.mark.usefixtures("bystander")
def test_ten_mib_without_a_newline_costs_one_line_and_no_memory(kvmd: Kvmd) -> None:
    before = kvmd.resident_kib()
    with peer(kvmd, "big") as big:
        connection = big.negotiate()
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            connection.sendall(b"x" * 10 * 1024 * 1024)
        kvmd.wait_logged("big: left alone: a line of more than 65536 bytes")
    assert kvmd.resident_kib() - before < 1024
    assert len(kvmd.log("big: left alone")) == 1


@pytest.mark.usefixtures("bystander")
def test_an_endless_stream_of_events_starves_nobody(kvmd: Kvmd) -> None:
    with peer(kvmd, "flood") as flood, peer(kvmd, "good") as good:
        flood.negotiate()
        good.negotiate()
        kvmd.watches("good")
        with pouring(flood, event_line("RTC_CHANGE", offset=1) * 1000):
            good.say(poweroff())
            wait_for("the verdict", lambda: kvmd.shut_down_by_user("good"))
        assert not kvmd.log("flood: left alone")


def test_an_event_before_the_greeting_came_before_kvmd(kvmd: Kvmd) -> None:
    with peer(kvmd, "early") as early:
        early.accept().sendall(event_line("STOP") + GREETING)
        early.answer_negotiation()
        kvmd.watches("early")
        user_ends(kvmd, early)


def test_a_silent_socket_costs_one_line_and_is_waited_for(kvmd: Kvmd) -> None:
    kvmd.reload_whole(greeting_timeout_s=0.2)
    with peer(kvmd, "busy") as busy:
        connection = busy.accept()
        kvmd.wait_logged("busy: no QMP greeting yet")
        time.sleep(0.5)
        assert len(kvmd.log("busy: no QMP")) == 1
        connection.sendall(GREETING)
        connection.recv(100)
        connection.sendall(b'{"return": {}}\n')
        kvmd.watches("busy")


@pytest.mark.usefixtures("bystander")
def test_half_a_line_is_waited_for_without_busy_work(kvmd: Kvmd) -> None:
    with watched(kvmd, "half") as half:
        line = poweroff()
        half.say(line[:40])
        time.sleep(0.2)
        before = kvmd.cpu_ticks()
        time.sleep(1)
        assert kvmd.cpu_ticks() - before <= 2
        assert not kvmd.log("half: ended")
        half.say(line[40:])
        assert kvmd.verdict("half") == "user, guest-shutdown"


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize("reason", ["\ud800", "a\nb\x1b[1m", "x" * 50_000])
def test_a_reason_that_nobody_knows_is_shown_safely(kvmd: Kvmd, reason: str) -> None:
    with watched(kvmd, "odd") as odd:
        odd.event("SHUTDOWN", guest=True, reason=reason)
        assert kvmd.verdict("odd").startswith("crash, ")
        assert len(kvmd.verdict("odd")) < 100
        assert kvmd.verdict("odd").isprintable()


def test_a_clock_that_is_out_of_bounds_costs_no_verdict(kvmd: Kvmd) -> None:
    with watched(kvmd, "odd") as odd:
        for name in ("POWERDOWN", "SHUTDOWN"):
            event = '{"timestamp": {"seconds": %s, "microseconds": 0}, "event": "%s"}'
            odd.say((event % ("9" * 4299, name)).encode() + b"\n")
        assert kvmd.verdict("odd") == "admin, powerdown"
        assert not kvmd.log("Traceback")


@pytest.mark.usefixtures("bystander")
def test_a_guest_that_ends_and_runs_again_in_a_loop_does_not_flood_the_log(kvmd: Kvmd) -> None:
    with watched(kvmd, "mad") as mad:
        with contextlib.suppress(OSError):
            mad.say((poweroff() + event_line("RESUME")) * 1000)
        kvmd.wait_logged("mad: left alone: a guest that ends and runs again without a pause")
        assert len(kvmd.log("mad")) < 10


@pytest.mark.usefixtures("bystander")
def test_a_flood_at_the_time_of_a_replacement_holds_up_nobody(kvmd: Kvmd) -> None:
    with watched(kvmd, "flood") as flood:
        with pouring(flood, b"{}\n" * 20_000):
            flood.path.unlink()
            with peer(kvmd, "flood") as newer, peer(kvmd, "other") as other:
                other.negotiate()
                newer.negotiate()
                kvmd.watches("other")
                kvmd.watches("flood", times=2)


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_stands_in_the_place_of_a_shutdown_file_is_one(kvmd: Kvmd, kind: str) -> None:
    with watched(kvmd, "web") as web:
        place = kvmd.control / "web.shutdown"
        if kind == "folder":
            place.mkdir()
        elif kind == "link":
            place.symlink_to("nowhere")
        else:
            place.touch(0o000)
        user_ends(kvmd, web)
        assert not kvmd.log("web: its shutdown file")
        assert not (kvmd.control / "nowhere").exists()


def test_what_stands_in_the_place_of_a_shutdown_file_makes_way(kvmd: Kvmd) -> None:
    (kvmd.control / "web.shutdown/in").mkdir(parents=True)
    with watched(kvmd, "web"):
        assert not kvmd.shut_down_by_user("web")
        assert not kvmd.log("web: its shutdown file")
        assert list(kvmd.control.glob(".web.shutdown.aside-*/in"))


def test_a_vm_that_takes_its_time_to_end_is_not_taken_for_a_new_one(kvmd: Kvmd) -> None:
    """Its connection has ended, its socket still stands, and somebody looks in between."""
    kvmd.reload_whole(rescan_interval_s=1, connect_retry_s=0.5)
    with peer(kvmd, "web") as web:
        web.negotiate().sendall(poweroff())
        assert web.connection
        web.connection.close()
        assert kvmd.verdict("web") == "user, guest-shutdown"
        time.sleep(1.5)
        assert kvmd.shut_down_by_user("web")


def test_an_end_in_the_middle_of_a_line_is_an_end(kvmd: Kvmd) -> None:
    with watched(kvmd, "cut") as cut:
        cut.say(poweroff()[:40])
        time.sleep(0.1)
        cut.end(leave_file=True)
        assert kvmd.verdict("cut") == "crash, eof"


def test_an_event_may_come_in_single_bytes(kvmd: Kvmd) -> None:
    with peer(kvmd, "drip") as drip:
        connection = drip.negotiate()
        for byte in event_line("STOP") + event_line("RESUME") + poweroff():
            connection.sendall(bytes([byte]))
        assert kvmd.verdict("drip") == "user, guest-shutdown"


@pytest.mark.usefixtures("bystander")
def test_what_is_no_socket_costs_one_line(kvmd: Kvmd) -> None:
    (kvmd.control / "folder.kvmd").mkdir()
    os.mkfifo(kvmd.control / "fifo.kvmd")
    (kvmd.control / "file.kvmd").touch()
    (kvmd.control / "link.kvmd").symlink_to("bystander.kvmd")
    for name in ("folder", "fifo", "file", "link"):
        kvmd.wait_logged(f"{name}: not a socket; left alone")
    (kvmd.control / "folder.kvmd" / "x").touch()
    (kvmd.control / "fifo.kvmd").chmod(0o600)
    time.sleep(0.3)
    assert len(kvmd.log("not a socket")) == 4
    (kvmd.control / ".kvmd").touch()
    (kvmd.control / "other.txt").touch()
    time.sleep(0.1)
    assert len(kvmd.log("not a socket")) == 4


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe", "größe".encode(), b"a b:c@d%e", b"-rf", b"two\nlines"], ids=repr
)
def test_odd_names_are_watched_like_others(kvmd: Kvmd, raw: bytes) -> None:
    name = os.fsdecode(raw)
    with peer(kvmd, name) as odd:
        odd.negotiate().sendall(poweroff())
        wait_for("the verdict", lambda: kvmd.shut_down_by_user(name))


def test_a_datagram_socket_is_left_alone(kvmd: Kvmd) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(kvmd.control / "dgram.kvmd"))
        kvmd.wait_logged("dgram: can't be connected to: Protocol wrong type")
        wait_for("the status", lambda: kvmd.status().endswith("1 out of reach, see the journal"))
    (kvmd.control / "dgram.kvmd").unlink()
    with peer(kvmd, "dgram") as good:
        good.negotiate()
        wait_for("the status", lambda: kvmd.status().startswith("watching 1 instance in"))
        assert "out of reach" not in kvmd.status()


def test_thousands_at_once_are_all_watched(kvmd: Kvmd) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = 2000
    before = kvmd.resident_kib()
    try:
        with ExitStack() as stack:
            peers = [stack.enter_context(peer(kvmd, f"vm{n}")) for n in range(count)]
            for it in peers:
                it.negotiate()
            wait_for("all", lambda: kvmd.watched() == count, timeout_s=30)
            assert kvmd.resident_kib() - before < count * 8
            for it in peers:
                it.event("SHUTDOWN", guest=True, reason="guest-shutdown")
            wait_for(
                "all to end",
                lambda: len(list(kvmd.control.glob("*.shutdown"))) == count,
                timeout_s=30,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_when_descriptors_run_out_the_rest_is_found_later(kvmd: Kvmd) -> None:
    kvmd.restart(rescan_interval_s=1)
    _, hard = resource.prlimit(kvmd.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(kvmd.pid, resource.RLIMIT_NOFILE, (kvmd.descriptors() + 5 + 32, hard))
    with ExitStack() as stack:
        peers = [stack.enter_context(peer(kvmd, f"vm{n}")) for n in range(20)]
        kvmd.wait_logged("can't be connected to: Too many open files")
        resource.prlimit(kvmd.pid, resource.RLIMIT_NOFILE, (hard, hard))
        for it in peers:
            it.negotiate()
        wait_for("all", lambda: kvmd.watched() == 20)
        assert len(kvmd.log("Too many open files")) <= 20


MANY_OF_NOBODY = """
import os, resource, selectors, socket, sys
folder, count = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (3 * count, 3 * count))
os.chdir(folder)
os.setgid(65534)
os.setuid(65534)
ready = selectors.DefaultSelector()
for number in range(count):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"false{number}.kvmd")
    listener.listen(1)
    ready.register(listener, selectors.EVENT_READ)
print("made", flush=True)
kept = []
while True:
    for key, _ in ready.select():
        connection, _ = key.fileobj.accept()
        connection.sendall(b'{"QMP": {}}\\n{"return": {}}\\n')
        kept.append(connection)
"""
"""Makes sockets as nobody. Each is a QEMU as far as kvmd can tell."""


@contextlib.contextmanager
def many_of_nobody(kvmd: Kvmd, count: int) -> Iterator[None]:
    """Sockets that a member of the control group makes."""
    kvmd.control.chmod(0o777)
    command = [sys.executable, "-c", MANY_OF_NOBODY, str(kvmd.control), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as member:
        try:
            assert member.stdout
            assert member.stdout.readline() == "made\n"
            yield
        finally:
            member.kill()


def test_a_member_who_makes_sockets_without_end_takes_a_share(kvmd: Kvmd) -> None:
    kvmd.restart(rescan_interval_s=1)
    with watched(kvmd, "before") as before:
        with many_of_nobody(kvmd, 3 * MOST_FOREIGN):
            kvmd.wait_logged("more sockets of others than root than are looked after")
            with watched(kvmd, "after") as after:
                user_ends(kvmd, after)
            wait_for("its share", lambda: kvmd.watched() >= MOST_FOREIGN)
            # A look at the directory writes the status; the last sockets were made after one.
            wait_for("those left out", lambda: "of others than root left out" in kvmd.status())
            assert kvmd.descriptors() < MOST_FOREIGN + 100
        # Each of theirs costs two records, that it is watched and how it ended.
        wait_for("their ends", lambda: len(kvmd.log(": false")) >= 2 * MOST_FOREIGN)
        for file in kvmd.control.glob("false*"):
            file.unlink()
        wait_for("room for others", lambda: "left out" not in kvmd.status())
        assert len(kvmd.log()) < 3 * MOST_FOREIGN
        user_ends(kvmd, before)


def test_the_control_directory_may_go_and_come_back(kvmd: Kvmd) -> None:
    with watched(kvmd, "before") as before:
        shutil.rmtree(kvmd.control)
        kvmd.control.mkdir()
        with watched(kvmd, "after"):
            pass
        # The VM whose socket file is gone runs on, and is still watched.
        user_ends(kvmd, before)
        assert kvmd.shut_down_by_user("before")


def test_a_verdict_without_a_directory_is_written_when_it_returns(kvmd: Kvmd) -> None:
    with watched(kvmd, "web") as web:
        shutil.rmtree(kvmd.control)
        user_ends(kvmd, web)
        kvmd.wait_logged("web: its shutdown file can't be made, trying again: No such file")
    kvmd.control.mkdir()
    wait_for("the file", lambda: kvmd.shut_down_by_user("web"))
    kvmd.wait_logged("web: its shutdown file is made at last")
    assert len(kvmd.log("web: its shutdown file can't")) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system; ./dev test runs as root")
def test_a_full_file_system_delays_a_verdict_and_loses_none(kvmd: Kvmd) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=6", "tmpfs", str(kvmd.control)],
        check=True,
    )
    # No event tells of a mount: only a look at the directory does.
    kvmd.restart(rescan_interval_s=1)
    try:
        with watched(kvmd, "web") as web:
            fillers = fill(kvmd.control)
            web.connection.sendall(poweroff())  # type: ignore[union-attr]
            kvmd.wait_logged("web: its shutdown file can't be made, trying again: No space left")
            # Killed while the verdict waits, the daemon still knows it afterwards.
            web.listener.close()
            web.connection.close()  # type: ignore[union-attr]
            time.sleep(0.2)
            kvmd.stop(signal.SIGKILL)
            kvmd.start()
            fillers[0].unlink()
            wait_for("the file", lambda: kvmd.shut_down_by_user("web"))
    finally:
        subprocess.run(["umount", "--lazy", str(kvmd.control)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system; ./dev test runs as root")
def test_a_shutdown_file_that_could_not_be_removed_stays_after_the_users_shutdown(
    kvmd: Kvmd,
) -> None:
    in_the_way = kvmd.control / "web.shutdown"
    in_the_way.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(in_the_way)], check=True)
    with peer(kvmd, "web") as web:
        web.negotiate()
        kvmd.wait_logged("web: its shutdown file can't be removed, trying again")
        subprocess.run(["umount", str(in_the_way)], check=True)
        user_ends(kvmd, web)
        kvmd.wait_logged("web: its shutdown file is ")  # at last
        assert kvmd.shut_down_by_user("web")


def test_a_vm_that_is_replaced_can_only_write_to_the_journal(kvmd: Kvmd) -> None:
    with two_of_one_name(kvmd) as (old, new):
        assert kvmd.log("web: runs on behind another's socket")
        user_ends(kvmd, old)
        assert not kvmd.shut_down_by_user("web")
        new.say(poweroff())
        kvmd.verdict("web", times=2)
        assert kvmd.shut_down_by_user("web")


def test_verdicts_are_logged_whatever_the_level(kvmd: Kvmd) -> None:
    kvmd.configure(log_level="error")
    kvmd.reload()
    with peer(kvmd, "web") as web:
        web.negotiate()
        user_ends(kvmd, web)
        assert not kvmd.log("web: watching")


def test_a_touched_socket_file_is_still_the_same_vm(kvmd: Kvmd) -> None:
    with watched(kvmd, "web") as web:
        web.path.touch()
        web.path.chmod(0o660)
        time.sleep(0.2)
        assert len(kvmd.log("web")) == 1
        user_ends(kvmd, web)


def test_a_peer_that_closes_every_connection_is_left_alone_after_a_while(kvmd: Kvmd) -> None:
    kvmd.reload_whole(connect_retry_s=2)
    with peer(kvmd, "rude") as rude:
        rude.listener.settimeout(2)
        accepted = 0
        with contextlib.suppress(TimeoutError):
            while accepted < 100:
                rude.accept().close()
                accepted += 1
        assert 1 < accepted < 30
        kvmd.wait_logged("rude: closes every connection; left alone")
        assert not kvmd.log("rude: ended")


def test_descriptors_are_not_leaked(kvmd: Kvmd) -> None:
    before = kvmd.descriptors()
    for round_number in range(1, 21):
        with peer(kvmd, "web") as web:
            web.negotiate().sendall(poweroff())
            kvmd.verdict("web", times=round_number)
    wait_for("descriptors to be closed", lambda: kvmd.descriptors() == before)
    wait_for("the last record to be dropped", lambda: not list(kvmd.state.glob("*.json")))


def test_bad_settings_at_a_restart_leave_the_old_ones_in_use(kvmd: Kvmd) -> None:
    with watched(kvmd, "web") as web:
        kvmd.settings.write_text("control_dri = '/x'\n")
        kvmd.stop()
        web.say(poweroff())
        kvmd.start()
        assert kvmd.verdict("web") == "user, guest-shutdown"
        assert kvmd.log("bad settings, those of the last start stay in use")


def test_an_intent_to_stop_that_was_left_behind_is_said(kvmd: Kvmd) -> None:
    (kvmd.control / "web.stopping").touch()
    with peer(kvmd, "web") as web:
        web.negotiate().sendall(poweroff())
        kvmd.wait_logged("web: web.stopping is there: its end will be the administrator's")
        assert kvmd.verdict("web") == "admin, stopping"


@pytest.mark.parametrize(
    ("run", "made", "verdict"),
    [
        (RUN, "stop", "admin, stopping"),
        ("0e" * 16, "stop", "user, guest-shutdown"),
        # Whoever may write to the control directory says nothing of a VM that Brine started.
        (RUN, "stopping", "user, guest-shutdown"),
    ],
)
def test_an_intent_to_stop_is_for_the_run_that_it_names(
    kvmd: Kvmd, run: str, made: str, verdict: str
) -> None:
    write_marker(MarkerKind.START, "web", run=RUN, folder=kvmd.marks, pid=os.getpid())
    if made == "stop":
        write_marker(MarkerKind.STOP, "web", run=run, folder=kvmd.marks)
    else:
        (kvmd.control / "web.stopping").touch()
    with peer(kvmd, "web") as web:
        web.negotiate().sendall(poweroff())
        assert kvmd.verdict("web") == verdict
        by_user = verdict.startswith("user")
        mark = read_marker(MarkerKind.SHUTDOWN, "web", run=RUN, folder=kvmd.marks)
        assert (mark is not None, kvmd.shut_down_by_user("web")) == (by_user, by_user)


def test_a_mark_of_another_process_is_not_the_vms(kvmd: Kvmd) -> None:
    """Brine ran one of that name, and somebody else runs one now."""
    write_marker(MarkerKind.START, "web", run=RUN, folder=kvmd.marks, pid=os.getppid())
    write_marker(MarkerKind.STOP, "web", run=RUN, folder=kvmd.marks)
    with peer(kvmd, "web") as web:
        web.negotiate()
        user_ends(kvmd, web)
        assert kvmd.shut_down_by_user("web")
        assert read_marker(MarkerKind.SHUTDOWN, "web", folder=kvmd.marks) is None


def test_a_late_verdict_is_of_its_own_run(kvmd: Kvmd) -> None:
    """The daemon is down while a VM ends, and the next one of its name begins."""
    write_marker(MarkerKind.START, "web", run=RUN, folder=kvmd.marks, pid=os.getpid())
    with watched(kvmd, "web") as web:
        kvmd.stop()
        write_marker(MarkerKind.STOP, "web", run=RUN, folder=kvmd.marks)
        web.say(poweroff())
        write_marker(MarkerKind.START, "web", run="0e" * 16, folder=kvmd.marks, pid=os.getpid())
        kvmd.start()
        assert kvmd.verdict("web") == "admin, stopping"


def test_a_powerdown_of_an_earlier_run_explains_nothing(kvmd: Kvmd) -> None:
    """A VM ends, and the next one of its name begins, while the daemon is down."""
    write_marker(MarkerKind.START, "web", run=RUN, folder=kvmd.marks, pid=os.getpid())
    with watched(kvmd, "web") as first:
        first.event("POWERDOWN")
        wait_for("that to be kept", lambda: '"powerdown_usec": 1' in kept(kvmd))
        kvmd.stop()
    write_marker(MarkerKind.START, "web", run="0e" * 16, folder=kvmd.marks, pid=os.getpid())
    with peer(kvmd, "web") as second:
        kvmd.start()
        assert kvmd.verdict("web") == "crash, eof"
        second.negotiate().sendall(poweroff())
        assert kvmd.verdict("web", times=2) == "user, guest-shutdown"
    mark = read_marker(MarkerKind.SHUTDOWN, "web", folder=kvmd.marks)
    assert mark
    assert mark.run == "0e" * 16


def kept(kvmd: Kvmd) -> str:
    """The daemon's records."""
    return "".join(file.read_text() for file in kvmd.state.glob("*.json"))


def test_bad_settings_at_a_reload_leave_the_old_ones_in_use(kvmd: Kvmd) -> None:
    kvmd.settings.write_text("control_dri = '/x'\n")
    kvmd.reload()
    assert "control_dri: there is no such setting" in kvmd.wait_logged("settings not reloaded")
    with watched(kvmd, "web"):
        pass


def test_a_reload_may_move_to_another_directory_and_suffix(kvmd: Kvmd) -> None:
    with watched(kvmd, "old") as old:
        kvmd.control = kvmd.control.with_name("other")
        kvmd.control.mkdir()
        kvmd.reload_whole(suffix=".qmp")
        new = Peer(kvmd.control / "new.qmp")
        new.negotiate()
        user_ends(kvmd, new)
        new.end()
        assert kvmd.shut_down_by_user("new")
        user_ends(kvmd, old)


def test_a_reload_may_change_the_suffix_of_vms_that_run(kvmd: Kvmd) -> None:
    with watched(kvmd, "web") as events:
        other = Peer(kvmd.control / "web.qmp")
        kvmd.configure(suffix=".qmp")
        kvmd.reload()
        other.negotiate()
        kvmd.watches("web", times=2)
        assert not kvmd.log("runs on behind")
        other.say(poweroff())
        with contextlib.suppress(BrokenPipeError):
            events.say(poweroff())
        assert kvmd.verdict("web") == "user, guest-shutdown"
        other.end()
        time.sleep(0.1)
        assert len(kvmd.log("web: ended")) == 1


def test_a_directory_that_may_not_be_entered_is_looked_at_again(kvmd: Kvmd) -> None:
    """As on a node that lacks the drop-in for such a directory, until somebody opens it."""
    kvmd.stop()
    kvmd.configure(control_dir=f"{kvmd.control}/closed/ctrl", rescan_interval_s=1)
    closed = kvmd.control / "closed"
    (closed / "ctrl").mkdir(parents=True)
    for path in (kvmd.control, closed / "ctrl", kvmd.state, kvmd.control.parent):
        path.chmod(0o777)
    closed.chmod(0o700)
    kvmd.start_as_nobody()
    time.sleep(2.5)
    troubles = [line for line in kvmd.log("WARNING") if "closed" in line]
    assert 1 <= len(troubles) <= 2
    assert not kvmd.log("Traceback")
    kvmd.control = closed / "ctrl"
    with peer(kvmd, "web") as web:
        web.path.chmod(0o777)
        closed.chmod(0o755)
        web.negotiate()
        kvmd.watches("web")


def test_idle_it_uses_no_processor(kvmd: Kvmd) -> None:
    with ExitStack() as stack:
        for number in range(20):
            stack.enter_context(peer(kvmd, f"vm{number}")).negotiate()
        wait_for("all", lambda: kvmd.watched() == 20)
        time.sleep(0.5)
        before = kvmd.cpu_ticks()
        time.sleep(2)
        assert kvmd.cpu_ticks() - before <= 1


def test_it_ends_when_told(kvmd: Kvmd) -> None:
    assert kvmd.stop() == 0
    kvmd.start()
    assert kvmd.stop(signal.SIGINT) == 0
