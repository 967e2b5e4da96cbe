"""ExecStopPost of an instance's unit: cleans up, however the instance ended."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from brine.common import markers, paths
from brine.common.errors import BrineError
from brine.common.files import read_regular
from brine.common.markers import BELIEVED_S, MarkerKind
from brine.common.paths import InstanceFiles
from brine.common.peer import is_listening
from brine.common.uids import release_forgotten, release_uid
from brine.instance import messages, store, unit
from brine.instance.observe import is_stop_over
from brine.instance.spec import SecurityModel

_PROGRAM = "brine-instance"
_USER = "user"
_KVMD_IS_OFF = "kvmd is off"
_IN_ORDER = ("success", "exec-condition")  # systemd.exec(5), $SERVICE_RESULT
_VERDICT_S = 1.0
_PAUSE_S = 0.1


def main() -> None:
    """Clean up after the instance that is named on the command line."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    messages.log_to_journal(_PROGRAM)
    clear(name)
    note_stop(name)
    note_unknown_end(name)
    note_failure(name)
    tell_watcher(name)
    if InstanceFiles(name).domain.exists():
        from brine.instance.xen.leftovers import clear_domain  # most are QEMU's

        if not clear_domain(name):
            raise SystemExit(1)


def clear(name: str) -> None:
    """Remove an ended instance's sockets, and the leftovers of its taps. What can't be removed is
    reported; the next start tries again."""
    runtime = _runtime(name)
    _remove([*InstanceFiles(name).sockets(), *_vnc_sockets(runtime)])
    _disconnect_taps(name)
    _give_back_user(name, runtime)
    _give_back_forgotten_users()


def note_stop(name: str) -> None:
    """Write a missing stop marker if the admin has ended the instance, and remove markers of a stop
    or reboot that was not followed. Errors are reported."""
    try:
        _forget_old_reboot(name)
        if markers.is_held(MarkerKind.STOP, name):
            return
        _forget_old_stop(name)
        _note_start_called_off(name)
        _note_unmarked_stop(name)
    except (BrineError, OSError) as error:
        print(f"{_PROGRAM}: warning: {name}: its end can't be noted: {error}", file=sys.stderr)


def note_unknown_end(name: str) -> None:
    """Write the verdict "unknown" if brine-kvmd is off, so that readers need not wait for a
    verdict. Errors are reported."""
    # systemd.exec(5): how the main process ended.
    if (os.environ.get("EXIT_CODE"), os.environ.get("EXIT_STATUS")) != ("exited", "0"):
        return
    try:
        if _is_unmarked(name) and not _verdict(name) and unit.is_kvmd_off():
            run, who, cause = markers.this_run(), markers.WHO_UNKNOWN, _KVMD_IS_OFF
            markers.write_marker(
                MarkerKind.VERDICT, name, run=run, durable=True, who=who, cause=cause
            )
    except (BrineError, OSError) as error:
        print(f"{_PROGRAM}: warning: {name}: its end can't be noted: {error}", file=sys.stderr)


def note_failure(name: str) -> None:
    """Mark that systemd saw this run fail, so that the watcher notices when somebody resets the
    failure.

    The start itself has recorded missing files: here, storage that does not answer would delay the
    unit's end. Errors are reported.
    """
    run, result = markers.this_run(), os.environ.get("SERVICE_RESULT", "success")
    if result in _IN_ORDER or markers.read_marker(MarkerKind.STOP, name, run=run):
        return
    if markers.read_marker(MarkerKind.FAILURE, name, run=run):
        return
    from brine.instance.kvm.resources import missing_bridges_of  # most end in order

    try:
        has_come_up = markers.read_marker(MarkerKind.STARTED, name, run=run) is not None
        lacks = [] if has_come_up else missing_bridges_of(store.load(name))
        markers.write_marker(MarkerKind.FAILURE, name, run=run, lacks=lacks)
    except (BrineError, OSError) as error:
        print(f"{_PROGRAM}: warning: {name}: its failure can't be noted: {error}", file=sys.stderr)


def tell_watcher(name: str) -> None:
    """Make the watcher look at an instance as soon as its unit has ended, if it had come up and no
    admin has stopped it. A start that failed waits for the next pass.

    Without a watcher there is no such folder. Errors are reported.
    """
    run = markers.this_run()
    if not markers.read_marker(MarkerKind.STARTED, name, run=run):
        return
    is_to_come_back = markers.read_marker(MarkerKind.REBOOT, name, run=run) is not None
    if markers.read_marker(MarkerKind.STOP, name, run=run) and not is_to_come_back:
        return
    try:
        (paths.ENDED_DIR / name).touch(mode=0o600)
    except FileNotFoundError:
        return
    except OSError as error:
        text = f"{name}: the watcher hears of its end later: {error.strerror}"
        print(f"{_PROGRAM}: warning: {text}", file=sys.stderr)


def _note_unmarked_stop(name: str) -> None:
    """Mark a stop by systemd whose stop command could not; unless the user was faster."""
    if not _is_unmarked(name) or _verdict(name) == _USER or not unit.is_told_to_stop(name):
        return
    deadline = time.monotonic() + _VERDICT_S
    while not _verdict(name) and time.monotonic() < deadline and not unit.is_kvmd_off():
        time.sleep(_PAUSE_S)
    if _verdict(name) != _USER:
        with markers.held_marker(MarkerKind.STOP, name, run=markers.this_run()):
            pass


def _is_unmarked(name: str) -> bool:
    """Whether this run was a QEMU without a stop marker."""
    run = markers.this_run()
    return (
        not InstanceFiles(name).domain.exists()
        and markers.last_run(name) == run != markers.UNKNOWN_RUN
        and not markers.read_marker(MarkerKind.STOP, name, run=run)
    )


def _verdict(name: str) -> str:
    """Who ended this run, by the verdict; empty if there is none."""
    mark = markers.read_marker(MarkerKind.VERDICT, name, run=markers.this_run())
    return str(mark.facts.get("who")) if mark else ""


def _forget_old_stop(name: str) -> None:
    """Remove the marker of a stop that was given up: it is not why the run ended."""
    if markers.read_marker(MarkerKind.STOP, name) and is_stop_over(store.load(name)):
        markers.remove_unheld(MarkerKind.STOP, name)


def _forget_old_reboot(name: str) -> None:
    """Remove the marker of a reboot that the guest has not followed for long."""
    note = markers.read_marker(MarkerKind.REBOOT, name)
    if note is None:
        return
    until = note.facts.get("until")
    if not isinstance(until, int | float) or time.time() > until + BELIEVED_S:
        markers.remove_unheld(MarkerKind.REBOOT, name)


def _note_start_called_off(name: str) -> None:
    """Mark the stop of a start in progress: systemd runs no ExecStop for it."""
    found = unit.units([name]).get(name)
    if found and not found.came_up() and unit.is_told_to_stop(name):
        run = markers.this_run()
        if markers.last_run(name) != run:
            # It had not begun yet: without this, the run before would count as stopped.
            markers.write_marker(MarkerKind.START, name, run=run)
        # If another process has made the marker meanwhile, that one stays.
        with markers.held_marker(MarkerKind.STOP, name, run=run):
            pass


def _runtime(name: str) -> Any:
    """The content of its runtime file; None if there is none, or it has Ganeti's form."""
    try:
        runtime = json.loads(read_regular(paths.InstanceFiles(name).runtime))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        print(f"{_PROGRAM}: warning: {name}: its runtime file: {error}", file=sys.stderr)
        return None
    return None if isinstance(runtime, list) else runtime


def _vnc_sockets(runtime: Any) -> list[Path]:
    """Remove the socket for VNC, which a QEMU in another root directory can't remove; not if
    another process listens there."""
    spec = runtime.get("spec") if isinstance(runtime, dict) else None
    bind = spec.get("vnc_bind") if isinstance(spec, dict) else None
    if not isinstance(bind, str) or not bind.startswith("/"):
        return []
    socket = Path(bind)
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISSOCK(socket.lstat().st_mode) and not is_listening(socket):
            return [socket]
    return []


def _remove(sockets: Iterable[Path]) -> None:
    for socket in sockets:
        try:
            markers.clear_way(socket)
        except OSError as error:
            print(f"{_PROGRAM}: warning: {socket}: {error.strerror}", file=sys.stderr)


def _disconnect_taps(name: str) -> None:
    from brine.hotplug.net import records

    try:
        taps = records.load_all(records.PLACES).values()
    except (BrineError, OSError) as error:
        print(f"{_PROGRAM}: warning: {name}: its taps: {error}", file=sys.stderr)
        return
    ours = [record.name for record in taps if record.nic.instance == name]
    if not ours:
        return
    from brine.hotplug.net.wiring import unwire  # takes long to load, and most have no tap left

    for tap in ours:
        try:
            unwire(tap)
        except BrineError as error:
            print(f"{_PROGRAM}: warning: {tap}: {error}", file=sys.stderr)


def _give_back_user(name: str, runtime: Any) -> None:
    """Release the user id of the pool, unless another process has it."""
    if runtime is None:
        return
    try:
        if runtime["spec"]["security_model"] == SecurityModel.POOL:
            uid = runtime["user"]
            # A start that failed early has no user id; then the file is that of an earlier run.
            is_taken = (paths.LOCK_DIR / f"uid-{uid}.lock").exists()
            if release_uid(uid) and is_taken:
                messages.tell(messages.UID_RETURNED, name, uid=uid)
    except (BrineError, OSError, KeyError, TypeError) as error:
        print(f"{_PROGRAM}: warning: {name}: its user id: {error}", file=sys.stderr)


def _give_back_forgotten_users() -> None:
    """Release user ids that no runtime file names, because a start or an end was killed."""
    try:
        release_forgotten()
    except (BrineError, OSError) as error:
        print(f"{_PROGRAM}: warning: user ids: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
