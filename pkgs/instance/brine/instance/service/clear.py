"""ExecStopPost of an instance's unit: cleans up, however the instance ended.

No error keeps a later step from being done: errors are reported.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from brine.common import paths
from brine.common.errors import BrineError, die, warn
from brine.common.files import FileMark, remove_same
from brine.common.uids import release_forgotten, release_uid
from brine.common.unix_socket import is_listening
from brine.hotplug.net import records
from brine.hotplug.net.records import TapRecord
from brine.instance import messages, store, unit
from brine.instance.devices import missing_bridges_of
from brine.instance.owner import forget_process
from brine.vm import end, markers
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind
from brine.vm.run import Run
from brine.vm.runtime_file import LastStart
from brine.vm.spec import SecurityModel

_PROGRAM = "brine-instance"
_KVMD_IS_OFF = "kvmd is off"
_VERDICT_S = 1.0
_PAUSE_S = 0.1


def main() -> None:
    """Clean up after the instance that is named on the command line."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    messages.log_to_journal(_PROGRAM)
    messages.tell_people_in_journal(_PROGRAM)
    clear(name)
    forget_process(name, markers.this_run())
    note_stop(name)
    note_unknown_end(name)
    tell_watcher(name)
    note_failure(name)
    if InstanceFiles(name).has_domain():
        from brine.instance.xen.domain import clear_domain  # most are QEMU's

        try:
            is_in_order = clear_domain(name)
        except (BrineError, OSError) as error:
            die(_PROGRAM, BrineError(f"{name}: its domain: {error}"), 1)
        if not is_in_order:
            raise SystemExit(1)


@contextlib.contextmanager
def _warned(text: str) -> Iterator[None]:
    """Report an error in the block, and go on after it."""
    try:
        yield
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        warn(f"{text}: {place}{error.strerror}", program=_PROGRAM)
    except (BrineError, KeyError, TypeError, ValueError, RecursionError) as error:
        warn(f"{text}: {error}", program=_PROGRAM)


def clear(name: str) -> None:
    """Remove an ended instance's sockets, and the leftovers of its taps. The next start tries again
    to remove what is left.

    A socket stays if a process listens there: a VM of that name that is not this unit's, or a QEMU
    that even SIGKILL has not ended yet. The next start must not begin beside it.
    """
    last = None
    with _warned(f"{name}: its runtime file"), contextlib.suppress(FileNotFoundError):
        last = LastStart.read(name)
    for socket in InstanceFiles(name).sockets():
        with _warned(f"{name}: its sockets"):
            if not is_listening(socket):
                markers.clear_way(socket)
    with _warned(f"{name}: its socket for VNC"):
        _remove_vnc_socket(last)
    _disconnect_taps(name)
    if last:
        with _warned(f"{name}: its user id"):
            if last.said("spec")["security_model"] == SecurityModel.POOL:
                uid = last.said("user")
                # A start that failed early has no user id; then the file is of an earlier run.
                is_taken = (paths.LOCK_DIR / f"uid-{uid}.lock").exists()
                if release_uid(uid) and is_taken:
                    messages.tell(messages.UID_RETURNED, name, uid=uid)
    with _warned("user ids"):
        release_forgotten()  # of starts and ends that were killed


def _remove_vnc_socket(last: LastStart | None) -> None:
    """Remove the socket for VNC, which a QEMU in another root directory can't remove. It stays if
    another process listens there. Its folder may be a user's."""
    bind = last.spec.get("vnc_bind") if last and last.spec else None
    if not isinstance(bind, str) or not bind.startswith("/"):
        return
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(bind)
        if stat.S_ISSOCK(status.st_mode) and not is_listening(Path(bind)):
            remove_same(Path(bind), FileMark.of(status))


def _disconnect_taps(name: str) -> None:
    ours: list[TapRecord] = []
    with _warned(f"{name}: its taps"):
        taps = records.load_all().values()
        ours += [record for record in taps if record.nic.instance == name]
    if not ours:
        return
    # It takes long to load, and most have no tap left.
    from brine.hotplug.net.wiring import remove_unheld, unwire

    for tap in ours:
        with _warned(tap.name):
            unwire(tap.name)
            remove_unheld(tap.nic, tap.name)


def note_stop(name: str) -> None:
    """Write a missing stop marker if the admin has ended the instance, and remove markers of a stop
    or reboot that was not followed."""
    with _warned(f"{name}: its end can't be noted"):
        now = time.time()
        rebooted = Run.marked(MarkerKind.REBOOT, name)
        if rebooted and end.is_reboot_over(rebooted, now):
            markers.remove_unheld(MarkerKind.REBOOT, name)
        if markers.is_held(MarkerKind.STOP, name):
            return
        # The marker of a stop that was given up is not why the run ended.
        stopped = Run.marked(MarkerKind.STOP, name)
        if stopped and end.is_stop_over(stopped, store.load(name).shutdown_timeout, now):
            markers.remove_unheld(MarkerKind.STOP, name)
        _note_start_called_off(name)
        _note_unmarked_stop(name)


def _note_start_called_off(name: str) -> None:
    """Mark the stop of a start in progress: systemd runs no ExecStop for it."""
    found = unit.find_unit(name)
    if found and not found.came_up() and unit.is_told_to_stop(name):
        run = Run.own(name)
        if not run.is_last():
            store.note_unbegun_run(name, run.id)
        _mark_stop(name)


def _note_unmarked_stop(name: str) -> None:
    """Mark a stop by systemd whose stop command could not; unless the user was faster."""
    run = Run.own(name)
    if not _is_unmarked(run) or _is_users(run) or not unit.is_told_to_stop(name):
        return
    deadline = time.monotonic() + _VERDICT_S
    while not run.verdict and time.monotonic() < deadline and not unit.is_kvmd_off():
        time.sleep(_PAUSE_S)
        run = run.again()
    if not _is_users(run):
        _mark_stop(name)


def _mark_stop(name: str) -> None:
    """Write the stop marker. One that another process has made meanwhile stays."""
    with markers.held_marker(MarkerKind.STOP, name, run=markers.this_run()):
        pass


def _is_unmarked(run: Run) -> bool:
    """Whether this run was a QEMU without a stop marker."""
    return not InstanceFiles(run.name).has_domain() and end.lacks_stop(run)


def _is_users(run: Run) -> bool:
    return run.verdict is not None and run.verdict.who == end.USER


def note_unknown_end(name: str) -> None:
    """Write the verdict "unknown" if brine-kvmd is off, so that readers need not wait for a
    verdict."""
    # systemd.exec(5): how the main process ended.
    if (os.environ.get("EXIT_CODE"), os.environ.get("EXIT_STATUS")) != ("exited", "0"):
        return
    with _warned(f"{name}: its end can't be noted"):
        run, who = Run.own(name), markers.WHO_UNKNOWN
        if _is_unmarked(run) and not run.verdict and unit.is_kvmd_off():
            markers.write_marker(
                MarkerKind.VERDICT, name, run=run.id, durable=True, who=who, cause=_KVMD_IS_OFF
            )


def note_failure(name: str) -> None:
    """Mark that systemd saw this run fail, so that the watcher notices when an admin resets the
    failure. The start itself has recorded missing files: storage may not answer, and would delay
    the unit's end here."""
    run, result = Run.own(name), os.environ.get("SERVICE_RESULT", "success")
    if not end.has_failed(run, result):
        return
    facts = run.facts(MarkerKind.FAILURE)
    if "lacks" in facts:
        return
    with _warned(f"{name}: its failure can't be noted"):
        lacks = [] if run.has_come_up() else missing_bridges_of(store.load(name))
        markers.write_marker(MarkerKind.FAILURE, name, run=run.id, **{**facts, "lacks": lacks})


def tell_watcher(name: str) -> None:
    """Make the watcher look at an instance as soon as its unit has ended, if it had come up and no
    admin has stopped it. A start that failed waits for the next pass. If this program is killed,
    the unit has failed, and brine-instance-failed@.service does the same."""
    if not end.is_for_watcher(Run.own(name)):
        return
    with _warned(f"{name}: the watcher hears of its end later"):
        with contextlib.suppress(FileNotFoundError):  # there is no watcher
            (paths.ENDED_DIR / name).touch(mode=0o600)


if __name__ == "__main__":
    main()
