"""Operations on a Xen instance whose xl does not run, and the leftovers of other domains."""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from brine.common import outbox
from brine.instance import intent, stop, store
from brine.instance.definition import SpecInput, define_several
from brine.instance.intent import forget_user_shutdown
from brine.instance.observe import Observed, look, look_at_all
from brine.instance.operations import reboot_instance, reset_instance
from brine.instance.registry import define_instance, rename_instance, undefine_instance
from brine.instance.service import run
from brine.instance.stop import Stopped, stop_instance
from brine.instance.store import InstanceError
from brine.instance.validate import completed
from brine.instance.xen import config, last_start
from brine.instance.xen import xl as tool
from brine.instance.xen.domain import clean_up_ended
from brine.instance.xen.xl import ShutdownReason
from brine.vm.files import InstanceFiles
from brine.vm.markers import UNKNOWN_RUN, MarkerKind, file_of, write_marker
from brine.vm.spec import Spec, SpecError, to_json
from lab.scripted_systemctl import ScriptedSystemctl
from lab.scripted_xl import ScriptedXl


@pytest.fixture
def xl(own_node: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedXl:
    """The xl of a node of its own, where systemd has no unit."""
    monkeypatch.setattr(stop, "_GONE_S", 1.0)
    ScriptedSystemctl(own_node / "systemctl", monkeypatch)
    return ScriptedXl(own_node / "xl", monkeypatch)


def defined(name: str = "web1", **keys: Any) -> Spec:
    given = {"name": name, "hypervisor": "xen-pvm", "kernel": "/k", "admin_state": "up", **keys}
    spec = completed(given)
    store.save(spec)
    return spec


def wanted(name: str = "web1") -> tuple[str, str]:
    spec = store.load(name)
    return spec.admin_state, spec.admin_state_source


@pytest.mark.parametrize(("state", "first"), [("-b----", []), ("--p---", ["unpause 3"])])
def test_one_without_xl_is_stopped_and_removed(
    xl: ScriptedXl, state: str, first: list[str]
) -> None:
    spec = defined()
    xl.domain("web1", 3, state, spec.uuid)
    assert look("web1").state.oper == "running"
    assert stop_instance("web1", timeout_s=30) is Stopped.STOPPED
    assert xl.asked() == [*first, "shutdown 3", "destroy 3"]
    assert wanted() == ("down", "admin")
    assert not file_of(MarkerKind.SHUTDOWN, "web1").exists()
    assert stop_instance("web1") is Stopped.UNCHANGED


def test_others_may_see_whether_there_is_a_domain_and_no_more(xl: ScriptedXl) -> None:
    folder = InstanceFiles("web1").domain.parent
    folder.mkdir(mode=0o700)  # of a former Brine
    file = config.write_config(defined())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o711
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["web1", "(null)"])
def test_what_a_broken_start_left_does_not_run_and_is_removed(xl: ScriptedXl, name: str) -> None:
    spec = defined()
    config.write_config(spec)
    xl.domain(name, 3, "--p---", spec.uuid, cpu_s=0.0)
    seen = look("web1")
    assert (seen.state.oper, seen.state.status) == ("down", "ERROR_down")
    assert "its start was broken off" in seen.state.why
    assert clean_up_ended(but=None) == []
    xl.domain(name, 4, "--p---", spec.uuid, cpu_s=0.0)
    assert stop_instance("web1") is Stopped.CLEANED_UP
    assert xl.asked() == ["destroy 3", "destroy 4"]  # no guest is asked


@pytest.mark.parametrize(
    ("row", "is_started_here"),
    [
        # Another node sends it, or an administrator made it or paused it.
        ({"name": "web1--incoming"}, True),
        ({}, False),
        ({"cpu_s": 0.1}, True),
        ({"state": "-b----"}, True),
    ],
)
def test_a_paused_domain_of_others_is_left_alone(
    xl: ScriptedXl, row: dict[str, Any], is_started_here: bool
) -> None:
    spec = defined()
    if is_started_here:
        config.write_config(spec)
    xl.domain(
        **{"name": "web1", "number": 3, "state": "--p---", "cpu_s": 0.0, **row}, uuid=spec.uuid
    )
    assert look("web1").state.oper == "running"
    assert clean_up_ended(but=None) == []
    assert xl.asked() == []


def test_a_domain_that_came_up_and_was_paused_at_once_runs(xl: ScriptedXl) -> None:
    spec = defined()
    config.write_config(spec)
    write_marker(MarkerKind.STARTED, "web1", run=UNKNOWN_RUN)
    xl.domain("web1", 3, "--p---", spec.uuid, cpu_s=0.0)
    assert look("web1").state.oper == "running"


def test_a_domain_of_a_later_run_is_not_stopped_with_the_former_one(
    xl: ScriptedXl, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = defined()
    xl.domain("web1", 3, "-b----", spec.uuid)

    def shut_down(number: int, **_: object) -> None:
        assert number == 3
        xl.rows([])
        xl.domain("web1", 4, "-b----", spec.uuid)  # which a start has made meanwhile

    monkeypatch.setattr(tool, "ask_shutdown", shut_down)
    assert stop_instance("web1", force=True, timeout_s=5) is Stopped.STOPPED
    assert xl.asked() == []


def test_all_that_is_defined_of_a_domain_that_runs_waits_for_a_restart(xl: ScriptedXl) -> None:
    spec = defined()
    config.write_config(spec)
    xl.domain("web1", 3, "-b----", spec.uuid)
    given = {**to_json(spec), "memory_mib": 512, "nics": [{"link": "br0"}]}
    (result,) = define_several([SpecInput("web1", "web1", given)], dry_run=False, live=True)
    assert result.live
    told = result.live.to_json()
    assert told["restart_pending"] == ["memory_mib", "nics"]
    assert (told["attached"], told["detached"], told["live_errors"]) == ([], [], [])


def test_a_damaged_spec_is_written_anew_and_the_domain_stays_its_own(xl: ScriptedXl) -> None:
    spec = defined(nics=[{"link": "br0"}])
    config.write_config(spec)
    xl.domain("web1", 3, "-b----", spec.uuid)
    store.spec_file_of("web1").write_text('{"name": "web1", ')
    data = {"name": "web1", "hypervisor": "xen-pvm", "kernel": "/k", "nics": [{"link": "br0"}]}
    with pytest.raises(InstanceError, match="its domain, of another UUID, is still there") as found:
        define_instance(data | {"uuid": "1b9f9bd1-8b7a-4b9e-9c51-0d3f6a2f0f1e"})
    assert spec.uuid in str(found.value.hint)
    assert define_instance(data).spec == spec
    assert look("web1").state.oper == "running"


def test_what_xl_was_given_may_be_damaged_as_well(xl: ScriptedXl) -> None:
    spec = defined()
    file = config.write_config(spec)
    file.write_text(file.read_text().replace('{"name"', '{"name'))
    xl.domain("web1", 3, "-b----", spec.uuid)
    store.remove("web1")
    data = {"name": "web1", "hypervisor": "xen-pvm", "kernel": "/k"}
    other = data | {"uuid": "1b9f9bd1-8b7a-4b9e-9c51-0d3f6a2f0f1e"}
    with pytest.raises(InstanceError, match="is still there"):
        define_instance(other)
    assert define_instance(data).spec.uuid == spec.uuid  # which comes of its name
    xl.rows([])
    assert define_instance(other).changed


def test_one_that_is_deaf_runs_on_unless_it_is_forced(xl: ScriptedXl) -> None:
    spec = defined()
    xl.be_deaf()
    xl.domain("web1", 3, "-b----", spec.uuid)
    with pytest.raises(InstanceError, match="did not shut down within 0.3 s, and runs on"):
        stop_instance("web1", timeout_s=0.3)
    assert not file_of(MarkerKind.STOP, "web1").exists()
    assert xl.asked() == ["shutdown 3"]
    assert stop_instance("web1", timeout_s=0.3, force=True) is Stopped.STOPPED
    assert xl.asked()[-1] == "destroy 3"


def test_one_that_its_user_has_shut_down_is_cleaned_up(xl: ScriptedXl) -> None:
    spec = defined()
    xl.domain("web1", 3, "---s--", spec.uuid, ShutdownReason.POWEROFF)
    assert look("web1").state.status == "USER_down"
    assert stop_instance("web1") is Stopped.CLEANED_UP
    assert xl.asked() == ["destroy 3"]
    assert wanted() == ("down", "admin")


def test_a_domain_of_the_same_name_is_left_alone(xl: ScriptedXl) -> None:
    defined()
    xl.domain("web1", 3, "-b----", "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f")
    assert look("web1").state.oper == "down"
    assert stop_instance("web1") is Stopped.NOTED
    assert xl.asked() == []


def test_what_is_left_goes_with_its_spec(xl: ScriptedXl) -> None:
    spec = defined()
    xl.domain("web1", 3, "---s--", spec.uuid, ShutdownReason.POWEROFF)
    undefine_instance("web1")
    assert xl.asked() == ["destroy 3"]
    again = defined()
    xl.domain("web1", 4, "---sc-", again.uuid, ShutdownReason.CRASH)
    shape = {key: to_json(again)[key] for key in ("name", "uuid", "kernel")}
    define_instance({**shape, "hypervisor": "kvm"})
    assert xl.asked() == ["destroy 3", "destroy 4"]


def test_what_its_start_has_left_goes_where_it_goes(xl: ScriptedXl) -> None:
    config.write_config(defined())
    write_marker(MarkerKind.STARTED, "web1", run=UNKNOWN_RUN)
    rename_instance("web1", "web2")
    assert not file_of(MarkerKind.STARTED, "web1").exists()
    assert file_of(MarkerKind.STARTED, "web2").exists()
    assert last_start.uuid_of("web2")
    undefine_instance("web2")
    assert list(InstanceFiles("web2").domain.parent.iterdir()) == []


def test_a_uuid_in_capital_letters_is_taken_too(own_node: Path) -> None:
    spec = defined()
    file = store.spec_file_of("web1")
    file.write_text(file.read_text().replace(spec.uuid, spec.uuid.upper()))
    with pytest.raises(SpecError, match="is the UUID of web1"):
        define_instance({"name": "web2", "uuid": spec.uuid})


def test_what_runs_keeps_its_hypervisor_and_its_uuid(xl: ScriptedXl) -> None:
    spec = defined()
    xl.domain("web1", 3, "-b----", spec.uuid)
    for keys in ({"hypervisor": "kvm"}, {"uuid": "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f"}):
        given = {"name": "web1", "hypervisor": "xen-pvm", "kernel": "/k", **keys}
        with pytest.raises(InstanceError, match="is running"):
            define_instance(given)
    with pytest.raises(InstanceError, match="no reset button"):
        reset_instance("web1")


def test_room_is_made_and_users_wills_are_kept(xl: ScriptedXl) -> None:
    off, again, crash = defined("off"), defined("again", user_shutdown="restart"), defined("crash")
    mine, saved, stopped = defined("mine"), defined("saved"), defined("stopped")
    xl.domain("off", 1, "---s--", off.uuid, ShutdownReason.POWEROFF)
    xl.domain("again", 2, "---s--", again.uuid, ShutdownReason.POWEROFF)
    xl.domain("crash", 3, "---sc-", crash.uuid, ShutdownReason.CRASH)
    xl.domain("mine", 4, "---s--", mine.uuid, ShutdownReason.POWEROFF)
    xl.domain("saved", 5, "---ss-", saved.uuid, ShutdownReason.SUSPEND)
    xl.domain("stopped", 6, "---s--", stopped.uuid, ShutdownReason.POWEROFF)
    xl.domain(
        "theirs", 7, "---s--", "6f1b5c1e-8a3b-4a50-9d0e-0d6f1c2b3a4f", ShutdownReason.POWEROFF
    )
    write_marker(MarkerKind.STOP, "stopped", run=UNKNOWN_RUN)
    assert clean_up_ended(but="mine") == []
    assert sorted(xl.asked()) == ["destroy 1", "destroy 2", "destroy 3", "destroy 6"]
    assert wanted("off") == ("down", "user")
    assert wanted("again") == wanted("stopped") == ("up", "admin")
    assert file_of(MarkerKind.SHUTDOWN, "again").exists()
    assert not file_of(MarkerKind.SHUTDOWN, "stopped").exists()
    assert [event.data["admin_state"] for event in outbox.events()] == ["down"]


def test_room_is_made_by_the_unit_whoever_starts_it(
    xl: ScriptedXl, own_node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = own_node / "kernel"
    kernel.touch()
    crash = defined("crash")
    defined("mine", kernel=str(kernel))
    xl.domain("crash", 3, "---sc-", crash.uuid, ShutdownReason.CRASH)

    def becomes(program: str, *_: object) -> None:
        assert xl.asked() == ["destroy 3"]
        raise SystemExit(program)

    monkeypatch.setattr(os, "execvpe", becomes)
    monkeypatch.setattr(sys, "argv", ["runner", "mine"])
    with pytest.raises(SystemExit, match="xl"):
        run.main()


def test_a_mark_that_can_not_be_removed_keeps_no_other_from_being_cleaned_up(
    xl: ScriptedXl, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("web1", "web2"), start=1):
        spec = defined(name, admin_state="up")
        xl.domain(name, number, "---s--", spec.uuid, ShutdownReason.POWEROFF)
    write_marker(MarkerKind.SHUTDOWN, "web1", run=UNKNOWN_RUN)

    def refused(name: str) -> None:
        if name == "web1":
            raise OSError(
                errno.EROFS, "Read-only file system", str(file_of(MarkerKind.SHUTDOWN, name))
            )
        forget_user_shutdown(name)

    monkeypatch.setattr(intent, "forget_user_shutdown", refused)
    (error,) = clean_up_ended(but=None)
    assert str(error).startswith("web1: ")
    assert xl.asked() == ["destroy 2"]


def test_what_is_noted_for_good_is_not_told_again_when_it_is_cleaned_up(xl: ScriptedXl) -> None:
    spec = defined(admin_state="down", admin_state_source="user")
    xl.domain("web1", 3, "---s--", spec.uuid, ShutdownReason.POWEROFF)
    assert clean_up_ended(but=None) == []
    assert xl.asked() == ["destroy 3"]
    assert list(outbox.events()) == []


def test_an_xl_that_fails_is_told_of_its_instances_only(xl: ScriptedXl) -> None:
    defined("web1")
    defined("web2")
    store.save(completed({"name": "web3"}))
    xl.refuse("list", "libxl: error: libxl.c:1:f: nobody answers\n")
    found = list(look_at_all())
    assert [isinstance(one, Observed) for one in found] == [False, False, True]
    assert str(found[0]) == "web1: its state can't be known: xl list -v: nobody answers"
    # It is asked once for all of them.
    assert xl.lists() == 1


def test_a_node_of_qemus_is_asked_nothing_of_xen(xl: ScriptedXl) -> None:
    store.save(completed({"name": "web3"}))
    assert len(list(look_at_all())) == 1
    assert xl.lists() == 0


def test_a_reboot_of_one_without_xl_is_finished_by_who_waits_or_by_nobody(xl: ScriptedXl) -> None:
    """It could have been moved meanwhile, and nobody would know."""
    xl.domain("web1", 3, "-b----", defined().uuid)
    xl.be_deaf()
    with pytest.raises(InstanceError, match="did not shut down"):
        reboot_instance("web1", timeout_s=0.2)
    assert not file_of(MarkerKind.REBOOT, "web1").exists()
