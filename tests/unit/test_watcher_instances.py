"""Passes over instances, and over domains that are none. systemd, kvmd and Xen are stand-ins."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from brine.common import cli as brine
from brine.common import outbox, paths
from brine.common.errors import BrineError
from brine.common.locks import locked
from brine.instance import store, unit
from brine.instance.observe import Observed
from brine.instance.registry import define_instance
from brine.instance.start import Started, start_instance
from brine.instance.stop import stop_instance
from brine.instance.validate import completed
from brine.instance.xen import config
from brine.instance.xen.domain import clean_up_ended, clear_domain
from brine.instance.xen.xl import Domain, ShutdownReason
from brine.vm.end import EndCause
from brine.vm.markers import MarkerKind, file_of, held_marker, write_marker
from brine.vm.spec import Spec, to_json
from brine.vm.unit_name import unit_of
from brine.watcher import cli, commands, passes, restart_counter
from brine.watcher.decide import Action, end_of
from brine.watcher.passes import Instances, Pass, PassOutcome
from brine.watcher.settings import WatcherSettings
from lab.scripted_systemctl import ScriptedSystemctl
from lab.scripted_xl import ScriptedXl

STARTED, ENDED = 1000.0, 1001.0
RUN = "0d" * 16
KILLED = {"Result": "signal", "ExecMainStatus": "9", "InvocationID": "a"}
FAILED = {"ActiveState": "failed", "Result": "exit-code", "InvocationID": "a"}
THEIRS = "6c1f0000-0000-0000-0000-000000000001"


@pytest.fixture(autouse=True)
def systemctl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedSystemctl:
    """The systemctl of a node of its own, where no unit is loaded."""
    monkeypatch.setattr(passes, "_VERDICT_S", 0.0)
    return ScriptedSystemctl(own_node / "systemctl", monkeypatch)


@pytest.fixture
def on_xen(
    systemctl: ScriptedSystemctl, own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> ScriptedXl:
    """The xl of a node that makes domains."""
    monkeypatch.setattr(passes, "_makes_domains", lambda: True)
    return ScriptedXl(own_node / "xl", monkeypatch)


def judged(name: str, who: str, cause: str) -> None:
    """A verdict of kvmd's on the last run."""
    write_marker(MarkerKind.VERDICT, name, run=RUN, who=who, cause=cause)


class Clock:
    """The watcher's, which goes on only when it waits.

    :param then: what is so after a wait.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object] | None) -> None:
        self.waited_s = 0.0
        self._then = then
        monkeypatch.setattr(passes, "time", self)

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds
        if self._then:
            self._then()

    def monotonic(self) -> float:
        return self.waited_s


def ran_on_xen(name: str = "web1", **keys: Any) -> Spec:
    """The same of Xen's."""
    return ran(name, hypervisor="xen-pvm", kernel="/k", **keys)


def ran(name: str = "web1", **keys: Any) -> Spec:
    """An instance that has run, and left no mark when it ended."""
    spec = completed({"name": name, "admin_state": "up", **keys})
    store.save(spec)
    for kind in (MarkerKind.START, MarkerKind.STARTED):
        write_marker(kind, name, run=RUN)
    os.utime(file_of(MarkerKind.STARTED, name), (STARTED, STARTED))
    return spec


def seen() -> dict[str, Observed]:
    found = {}
    for one in Instances(timeout_s=1).look():
        assert isinstance(one, Observed), one
        found[one.name] = one
    return found


def outcomes(**options: Any) -> list[PassOutcome]:
    settings = WatcherSettings(manage="all")
    return list(Pass(Instances(timeout_s=1), settings, **options).run())


def done() -> dict[str, tuple[str, ...]]:
    """The actions of a pass, by instance."""
    return {one.name: tuple(one.actions) for one in outcomes()}


def told() -> dict[str, bool]:
    """Of whom a pass tells something, and whether that is odd."""
    return {one.name: one.decision.is_odd for one in outcomes()}


def tries_of(name: str) -> restart_counter.Tries:
    return restart_counter.load()[name]


def note(name: str, *tries: Any, **others: Any) -> None:
    with restart_counter.changed() as counters:
        counters[name] = restart_counter.Tries(*tries, **others)


def done_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Start web1, with a pass just before systemd hears of it; returns the actions of that pass."""
    in_between: list[dict[str, tuple[str, ...]]] = []

    def begin_start(_: str, **__: str) -> Callable[[], None]:
        in_between.append(done())
        return lambda: None

    monkeypatch.setattr(unit, "begin_start", begin_start)
    monkeypatch.setattr(passes, "_LOCK_S", 0.0)
    assert start_instance("web1") is Started.STARTED
    (found,) = in_between
    return found


@pytest.mark.parametrize("who", ["user", "admin"])
def test_a_start_that_systemd_has_refused_is_not_undone_for_the_end_before(
    systemctl: ScriptedSystemctl, who: str
) -> None:
    store.save(completed({"name": "web1", "admin_state_source": "user"}))
    for kind in (MarkerKind.START, MarkerKind.STARTED):
        write_marker(kind, "web1", run=RUN)
    write_marker(MarkerKind.VERDICT, "web1", run=RUN, who=who, cause="guest-shutdown")
    systemctl.refuse("start", "Job failed.\n")
    with pytest.raises(BrineError, match="did not start"):
        start_instance("web1")
    (outcome,) = outcomes(dry_run=True)
    assert outcome.actions == ("try",)


def test_a_users_will_that_left_no_mark_is_kept_all_the_same() -> None:
    ran()
    judged("web1", "user", "guest-shutdown")
    assert done() == {"web1": ("set-down",)}
    spec = store.load("web1")
    assert (spec.admin_state, spec.admin_state_source) == ("down", "user")
    assert [event.name for event in outbox.events()] == ["web1"]
    assert done() == {"web1": ()}


@pytest.mark.parametrize("is_noted", [False, True])
def test_who_defines_it_as_up_after_its_user_shut_it_down_has_it_started(
    systemctl: ScriptedSystemctl, is_noted: bool
) -> None:
    ran()
    write_marker(MarkerKind.SHUTDOWN, "web1", run=RUN)
    if is_noted:
        assert done() == {"web1": ("set-down",)}
    else:
        stop_instance("web1")
    define_instance({"name": "web1", "admin_state": "up"})
    systemctl.becomes("start", "brine-instance@web1.service", ActiveState="active")
    assert done() == {"web1": ("try",)}
    assert store.load("web1").admin_state == "up"
    assert len(systemctl.asked("start")) == 1


def test_what_an_admin_is_just_starting_is_not_set_down_for_what_its_user_did_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran()
    write_marker(MarkerKind.SHUTDOWN, "web1", run=RUN)
    judged("web1", "user", "guest-shutdown")
    assert done_while_it_starts(monkeypatch) == {"web1": ()}
    assert store.load("web1").admin_state == "up"


def test_the_same_where_a_domain_says_what_its_user_did(
    on_xen: ScriptedXl, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ran_on_xen()
    on_xen.domain("web1", 3, "---s--", spec.uuid, ShutdownReason.POWEROFF)
    assert done_while_it_starts(monkeypatch) == {"web1": ()}
    assert on_xen.asked() == ["destroy 3"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_users_shutdown_on_xen_is_worked_on_once(on_xen: ScriptedXl, restart: bool) -> None:
    spec = ran_on_xen(user_shutdown="restart" if restart else "stop")
    on_xen.domain("web1", 3, "---s--", spec.uuid, ShutdownReason.POWEROFF)
    assert done() == {"web1": ("clean-up", "start") if restart else ("set-down", "clean-up")}
    for event in outbox.events():
        outbox.acknowledge(event.id)
    if not restart:
        assert done() == {"web1": ()}
        assert end_of(seen()["web1"]) is EndCause.USER
        assert list(outbox.events()) == []
        define_instance({**to_json(spec), "admin_state": "up"})
        assert done() == {"web1": ("try",)}


def test_a_users_shutdown_is_told_once_also_if_its_domain_can_not_be_destroyed(
    on_xen: ScriptedXl,
) -> None:
    spec = ran_on_xen()
    on_xen.domain("web1", 3, "---s--", spec.uuid, ShutdownReason.POWEROFF)
    on_xen.refuse("destroy", "libxl: error: libxl.c:1:f: it stays\n")
    assert done() == {"web1": ("set-down",)}
    for event in outbox.events():
        outbox.acknowledge(event.id)
    for _ in range(2):
        assert done() == {"web1": ()}
        assert list(outbox.events()) == []


@pytest.mark.parametrize("is_xen", [False, True])
def test_an_event_that_there_is_no_room_for_is_kept_later(
    on_xen: ScriptedXl,
    monkeypatch: pytest.MonkeyPatch,
    is_xen: bool,
) -> None:
    spec = ran_on_xen() if is_xen else ran()
    if is_xen:
        on_xen.domain("web1", 3, "---s--", spec.uuid, ShutdownReason.POWEROFF)
    judged("web1", "user", "guest-shutdown")
    with monkeypatch.context() as patched:
        patched.setattr(outbox, "put", full)
        assert done() == {"web1": ()}
    assert store.load("web1").admin_state == "down"
    assert done() == {"web1": ("set-down", "clean-up") if is_xen else ("set-down",)}
    assert [event.name for event in outbox.events()] == ["web1"]


def test_one_that_is_saved_or_moved_does_not_run_a_second_time(on_xen: ScriptedXl) -> None:
    spec = ran_on_xen()
    config.write_config(spec)
    write_marker(MarkerKind.STARTED, "web1", run=RUN)
    on_xen.domain("web1", 3, "---ss-", spec.uuid, ShutdownReason.SUSPEND)
    assert clear_domain("web1")
    assert done() == {"web1": ()}
    on_xen.rows([])
    assert done() == {"web1": ()}
    assert end_of(seen()["web1"]) is EndCause.ADMIN
    assert on_xen.asked() == []


def test_what_a_broken_start_left_is_cleaned_and_the_start_tried_again(
    on_xen: ScriptedXl, systemctl: ScriptedSystemctl
) -> None:
    spec = completed({"name": "web1", "admin_state": "up", "hypervisor": "xen-pvh", "kernel": "/k"})
    store.save(spec)
    config.write_config(spec)
    on_xen.domain("web1", 3, "--p---", spec.uuid, cpu_s=0.0)
    on_xen.domain("theirs", 4, "--p---", THEIRS, cpu_s=0.0)
    # While systemd starts it, every domain looks so for a moment.
    unit_name = "brine-instance@web1.service"
    systemctl.unit(unit_name, ActiveState="activating")
    assert done() == {"web1": (), "theirs": ()}
    systemctl.unit(unit_name, **KILLED, ActiveState="failed")
    ends = {one.name: end_of(one.seen) for one in outcomes(dry_run=True) if one.seen}
    assert ends == {"web1": EndCause.FAILED, "theirs": None}
    systemctl.becomes("start", unit_name, ActiveState="active")
    assert done() == {"web1": ("clean-up", "try"), "theirs": ()}
    assert on_xen.asked() == ["destroy 3"]


def test_a_crash_that_only_its_domain_told_of_is_not_forgotten_with_it(on_xen: ScriptedXl) -> None:
    """Its xl was ended before, in order, as systemd has it."""
    spec = ran_on_xen()
    on_xen.domain("web1", 3, "---sc-", spec.uuid, ShutdownReason.CRASH)
    assert clean_up_ended(but=None) == []
    assert on_xen.asked() == ["destroy 3"]
    assert done() == {"web1": ("try",)}


def test_a_stop_that_was_broken_off_is_forgotten_in_the_end(systemctl: ScriptedSystemctl) -> None:
    ran()
    systemctl.unit("brine-instance@web1.service", ActiveState="active")
    mark = file_of(MarkerKind.STOP, "web1")
    write_marker(MarkerKind.STOP, "web1", run=RUN)
    assert done() == {"web1": ()}  # who made it may still wait
    os.utime(mark, (STARTED, STARTED))
    with held_marker(MarkerKind.STOP, "web1", run=RUN):
        os.utime(mark, (STARTED, STARTED))
        assert done() == {"web1": ()}
    assert done() == {"web1": ("clean-up",)}
    assert not mark.exists()
    assert done() == {"web1": ()}


def full(*_: object, **__: object) -> None:
    raise outbox.OutboxError("no room")


def test_a_reboot_that_nobody_waits_for_is_finished(systemctl: ScriptedSystemctl) -> None:
    ran()
    judged("web1", "admin", "powerdown")
    with held_marker(MarkerKind.REBOOT, "web1", run=RUN, until=time.time()):
        assert done() == {"web1": ()}
    systemctl.becomes("start", "brine-instance@web1.service", ActiveState="active")
    (outcome,) = outcomes()
    assert outcome.decision.why == "it was to reboot: try 1 of 5"
    assert len(systemctl.asked("start")) == 1


def test_a_verdict_that_is_just_being_written_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran("web1")
    ran("web2")
    judged("web1", "admin", "host-signal")
    Clock(monkeypatch, lambda: judged("web2", "crash", "guest-panic"))
    ends = {name: end_of(one) for name, one in seen().items()}
    assert ends == {"web1": EndCause.ADMIN, "web2": EndCause.CRASH}


@pytest.mark.parametrize("answer", ["room", "fault", "none"])
def test_storage_that_was_full_has_room_if_all_of_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    disks = [tmp_path / "one", tmp_path / "other"]
    for disk in disks:
        disk.touch()
    ran(disks=[{"path": str(disk)} for disk in disks])
    write_marker(MarkerKind.HALTED, "web1", run=RUN, state="io-error", no_space=True)
    is_over, statvfs = threading.Event(), os.statvfs

    def answered(path: str) -> os.statvfs_result:
        if path == str(disks[1]):
            if answer == "fault":
                raise OSError(errno.ESTALE, "Stale file handle", path)
            if answer == "none":
                is_over.wait(30)
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", answered)
    assert seen()["web1"].has_room == (answer == "room")
    is_over.set()


@pytest.mark.parametrize(
    ("state", "reason"), [("---sr-", ShutdownReason.REBOOT), ("---sc-", ShutdownReason.CRASH)]
)
def test_a_domain_of_others_is_left_to_its_xl(
    on_xen: ScriptedXl, monkeypatch: pytest.MonkeyPatch, state: str, reason: ShutdownReason
) -> None:
    on_xen.domain("theirs", 3, state, THEIRS, reason)

    def anew() -> None:
        on_xen.rows([])
        on_xen.domain("theirs", 4, "-b----", THEIRS)

    Clock(monkeypatch, anew)
    done()
    assert on_xen.asked() == []
    # One that nobody makes anew is only in the way.
    on_xen.rows([])
    on_xen.domain("theirs", 4, state, THEIRS, reason)
    Clock(monkeypatch, None)
    assert done() == {"theirs": ("clean-up",)}
    assert on_xen.asked() == ["destroy 4"]


@pytest.mark.parametrize(
    ("state", "later", "expected", "waited_s"),
    [
        ("--ps-d", None, {"(null)": True}, 5),
        # One that is just being destroyed, which takes long if it is large,
        ("--ps-d", [], {}, 5),
        ("--ps-d", [f"(null) 3 32 1 --ps-d 0.4 {THEIRS} 0 -"], {}, 5),
        # and one that has no name yet.
        ("--p---", None, {"(null)": False}, 0),
    ],
)
def test_a_domain_that_xen_can_not_get_rid_of_is_told(
    on_xen: ScriptedXl,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    later: list[str] | None,
    expected: dict[str, bool],
    waited_s: float,
) -> None:
    on_xen.domain("(null)", 3, state, THEIRS, ShutdownReason.POWEROFF)
    clock = Clock(monkeypatch, None if later is None else partial(on_xen.rows, later))
    assert told() == expected
    assert clock.waited_s == waited_s


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_sound", [False, True])
def test_a_domain_that_is_an_instances_by_now_is_not_another_ones(
    on_xen: ScriptedXl, monkeypatch: pytest.MonkeyPatch, is_late: bool, is_sound: bool
) -> None:
    on_xen.domain("web1", 3, "---s--", THEIRS, ShutdownReason.POWEROFF)
    instances = Instances(timeout_s=1)
    (theirs,) = instances.look()
    assert isinstance(theirs, Domain)

    def define_it() -> None:
        ran_on_xen("web1", uuid=THEIRS)
        if not is_sound:
            file = store.spec_file_of("web1")
            file.write_text(file.read_text()[:-5].replace(THEIRS, THEIRS.upper()))

    if is_late:
        assert instances.look_again(theirs) == theirs
        Clock(monkeypatch, define_it)
        instances.clean_up(theirs)
    else:
        define_it()
        assert instances.look_again(theirs) is None
    assert on_xen.asked() == []


def test_a_uuid_in_capital_letters_is_the_same(on_xen: ScriptedXl) -> None:
    ran_on_xen("web1", uuid=THEIRS)
    file = store.spec_file_of("web1")
    file.write_text(file.read_text().replace(THEIRS, THEIRS.upper()))
    on_xen.domain("web1", 3, "---s--", THEIRS, ShutdownReason.POWEROFF)
    assert store.load("web1").uuid == THEIRS
    assert done() == {"web1": ("set-down", "clean-up")}


def test_domains_of_others_are_given_their_time_together(
    on_xen: ScriptedXl, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, None)
    for number in range(3, 9):
        uuid = f"{THEIRS[:-1]}{number}"
        on_xen.domain(f"theirs{number}", number, "---s--", uuid, ShutdownReason.POWEROFF)
    instances = Instances(timeout_s=1)
    for theirs in list(instances.look()):
        assert isinstance(theirs, Domain)
        instances.clean_up(theirs)
    assert len(on_xen.asked()) == 6
    assert clock.waited_s == 10


def test_what_needs_no_record_is_done_without_one(own_node: Path) -> None:
    (own_node / "watcher.json").mkdir()
    ran("web1")
    ran("web2")
    write_marker(MarkerKind.SHUTDOWN, "web1", run=RUN)
    judged("web2", "crash", "guest-panic")
    found = {one.name: one for one in outcomes()}
    assert {name: one.actions for name, one in found.items()} == {
        "": (),
        "web1": (Action.SET_DOWN,),
        "web2": (),
    }
    assert "watcher.json: can't be read" in str(found[""].fault)


def test_what_has_just_ended_waits_for_no_other_pass(
    systemctl: ScriptedSystemctl,
    own_node: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(commands, "log_pass", lambda: None)
    monkeypatch.setattr(commands, "LOCK", paths.LOCK_DIR / "watcher.lock")
    monkeypatch.setattr(paths, "ETC_DIR", own_node)
    for name in ("web1", "web2", "web3"):
        ran(name)
        systemctl.unit(unit_of(name), ActiveState="failed", **KILLED)
    # Its unit clears up after it.
    systemctl.unit(unit_of("web3"), ActiveState="deactivating")
    failed = partial(systemctl.unit, unit_of("web3"), ActiveState="failed", **KILLED)
    threading.Timer(0.3, failed).start()
    paths.ENDED_DIR.mkdir()
    for name in ("web1", "web3", "undefined"):
        (paths.ENDED_DIR / name).touch()
    note("web3", 1, time.time())
    parser = brine.Parser(prog="brine watcher")
    cli.COMMAND.configure(parser)
    parsed = parser.parse_args(["run", "--ended", "--verbose"])
    with locked(commands.LOCK, timeout_s=0):
        assert brine.execute(parsed) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "web1: it crashed: try 1 of 5: started"
    assert said[1].startswith("web3: it crashed: try 2 of 5 is due in ")
    assert len(said) == 2
    assert systemctl.asked("start") == [["--no-block", "--", unit_of("web1")]]
    assert list(paths.ENDED_DIR.iterdir()) == []
    assert brine.execute(parsed) == 0
    assert capsys.readouterr().out == "no instance has ended by itself\n"


def given_up(name: str, run: str, **facts: Any) -> None:
    """An instance failed last, and was tried too often."""
    ran(name)
    write_marker(MarkerKind.FAILURE, name, run=run, **facts)
    note(name, 5, time.time(), given_up=True)


def test_what_failed_is_tried_at_once_when_systemd_has_forgotten_that(
    systemctl: ScriptedSystemctl,
) -> None:
    for name in ("web1", "web2"):
        given_up(name, "a", lacks=[])
        systemctl.unit(unit_of(name), **FAILED)
    assert done() == {"web1": (), "web2": ()}
    systemctl.unit(unit_of("web1"), ActiveState="inactive", Result="success")
    systemctl.becomes("start", unit_of("web1"), ActiveState="active", InvocationID="b")
    assert done() == {"web1": ("try",), "web2": ()}
    assert (tries_of("web1").count, tries_of("web1").given_up) == (1, False)


def test_a_start_that_was_refused_is_tried_at_once_when_nothing_is_lacking_any_more(
    systemctl: ScriptedSystemctl, own_node: Path
) -> None:
    disk, bridge = own_node / "disk", own_node / "br0"
    given_up("web1", "a", lacks=[str(disk), str(bridge)])
    systemctl.unit(unit_of("web1"), **FAILED)
    systemctl.becomes("start", unit_of("web1"), ActiveState="active", InvocationID="b")
    disk.touch()
    assert done() == {"web1": ()}
    (found,) = outcomes(dry_run=True)
    assert f"and lacks {bridge}, and was given up after 5 tries" in found.decision.why
    bridge.touch()
    assert done() == {"web1": ("try",)}
    assert (tries_of("web1").count, tries_of("web1").given_up) == (6, True)


@pytest.mark.parametrize("state", [{"ActiveState": "activating"}, {"Job": "7"}])
def test_whose_turn_comes_while_the_node_starts_is_left_alone(
    systemctl: ScriptedSystemctl, state: Mapping[str, str]
) -> None:
    store.save(completed({"name": "web1", "admin_state": "up"}))
    ran("web2")
    systemctl.unit(unit_of("web2"), ActiveState="failed", **KILLED)
    systemctl.becomes("start", unit_of("web2"), ActiveState="active", InvocationID="b")
    systemctl.unit("brine-instances.service", **{"ActiveState": "inactive", **state})
    found = done()
    assert (found["web1"], found["web2"]) == ((), ("try",))
    systemctl.unit("brine-instances.service", ActiveState="inactive", Job="0")
    systemctl.becomes("start", unit_of("web1"), ActiveState="active", InvocationID="c")
    assert done() == {"web1": ("try",), "web2": ()}
