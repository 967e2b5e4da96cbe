"""The units of instances: their states in systemd, starting, stopping, and limits."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from brine.common.background import begun
from brine.common.errors import BrineError
from brine.common.files import write_whole
from brine.common.process import Process, run_bounded
from brine.vm.run import Run
from brine.vm.unit_name import PREFIX, SUFFIX, unit_of

DROP_INS = Path("/run/systemd/system")
"""Where drop-ins of units are until the next boot."""

NETWORK_S = 120
"""How long the network of the node may take to be there."""

_TIMEOUT_S = 30
_SOON_S = 0.005
_LONGEST_PAUSE_S = 0.5
_CANCELED = f"{SUFFIX} canceled."
_QUEUED = b"Enqueued anchor job "
_NOTED = ("Enqueued anchor job ", "Enqueued auxiliary job ")
_KVMD = ("brine-kvmd.service", "brine-kvmd.path")
_START_ALL = "brine-instances.service"
_NUMBERS = {
    "main_pid": "MainPID",
    "control_pid": "ControlPID",
    "exit_status": "ExecMainStatus",
    "begun_us": "InactiveExitTimestampMonotonic",
    "since_us": "ActiveEnterTimestampMonotonic",
    "changed_us": "StateChangeTimestampMonotonic",
}
_PROPERTIES = ("Id", "ActiveState", "Result", "InvocationID", "Job", *_NUMBERS.values())


class UnitError(BrineError):
    """systemd could not be asked, or refused."""


class CalledOffError(UnitError):
    """A start was called off by a stop, or by the node's shutdown."""


class Active(StrEnum):
    """The state of a unit (ActiveState of systemd)."""

    ACTIVE = "active"
    ACTIVATING = "activating"
    DEACTIVATING = "deactivating"
    INACTIVE = "inactive"
    FAILED = "failed"
    RELOADING = "reloading"
    REFRESHING = "refreshing"
    MAINTENANCE = "maintenance"


_GOING = (Active.ACTIVE, Active.ACTIVATING, Active.RELOADING, Active.REFRESHING)


class Unit(NamedTuple):
    """The state of an instance's unit, as systemd reports it.

    :param main_pid: of QEMU; 0 if there is none. systemd follows the process itself, so it is never
        the number of a later process.
    :param control_pid: of the program that starts it, stops it, or cleans up; 0 if there is none.
    :param result: ``success``, or how it failed.
    :param begun_us: when its last start began, by the clock that begins with the boot; *since_us*
        is when it became active, and *changed_us* when its state last changed.
    :param invocation: of its last run.
    :param is_queued: whether it does not run, and a start job waits.
    """

    name: str
    active: Active
    main_pid: int = 0
    control_pid: int = 0
    result: str = "success"
    exit_status: int = 0
    begun_us: int = 0
    since_us: int = 0
    changed_us: int = 0
    invocation: str = ""
    is_queued: bool = False

    @property
    def run(self) -> Run:
        """Its last run, by systemd."""
        return Run(self.name, self.invocation)

    def came_up(self) -> bool:
        """Whether its last start has succeeded."""
        return self.since_us >= self.begun_us


def units(names: Iterable[str] = ()) -> dict[str, Unit]:
    """The units of instances, by the instance's name; without names, all that systemd has loaded.

    :raises UnitError: if systemd can't be asked.
    """
    found, waiting = {}, []
    wanted = [unit_of(name) for name in names] or [f"{PREFIX}*{SUFFIX}"]
    for values in _shown(_PROPERTIES, *wanted):
        if unit := _unit(values):
            found[unit.name] = unit
            if _number(values.get("Job")) and unit.active in (Active.INACTIVE, Active.FAILED):
                waiting.append(unit.name)
    if waiting:
        queued = _jobs_for("start")
        for name in queued.intersection(waiting):
            found[name] = found[name]._replace(is_queued=True)
    return found


def ask_for_list(_words: Sequence[str]) -> Callable[[], dict[str, Unit]]:
    """Begin to ask systemd for all units, while a command loads; see
    :func:`brine.common.ahead.begin_ahead`."""
    return begun(units)


def ask_for_definition(words: Sequence[str]) -> Callable[[], dict[str, Unit]] | None:
    """Do so for a trial of live changes: what a definition does itself takes time, and then the
    answer is old."""
    return begun(units) if {"--live", "--dry-run"} <= {*words} else None


def find_unit(name: str) -> Unit | None:
    return units([name]).get(name)


def wait_ended(run: Run, *, timeout_s: float) -> bool:
    """Wait until a run of a unit has ended, with its cleanup; False if it has not in time. Its next
    run may begin before the unit was seen to be down, and is not waited for."""

    def is_over(now: Unit | None) -> bool:
        if now is None or now.run != run:
            return True
        return now.active in (Active.INACTIVE, Active.FAILED)

    deadline, pause_s = time.monotonic() + timeout_s, _SOON_S
    while not is_over(now := find_unit(run.name)):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        # Its program that stops it or cleans up, or the main one: systemd waits for that itself.
        pid = (now.control_pid or now.main_pid) if now else 0
        with Process.of(pid, unit=unit_of(run.name)) as program:
            if program:
                program.ended(min(left_s, _LONGEST_PAUSE_S))
                pause_s = _SOON_S  # until systemd has seen it
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def is_told_to_stop(name: str) -> bool:
    """Whether systemd stops an instance's unit because of a stop job, and not by itself."""
    return name in _jobs_for("stop")


def is_kvmd_off() -> bool:
    """Whether brine-kvmd is off: not installed, or stopped by an administrator, but not failed."""
    # A unit that systemd restarts may be inactive for a moment, with a job.
    return all(
        values.get("ActiveState") == Active.INACTIVE and not _number(values.get("Job"))
        for values in _shown(("ActiveState", "Job"), *_KVMD)
    )


def why_not_running(service: str) -> str:
    """Why a service of the node does not run, in systemd's word; empty if it does, or is about
    to."""
    (values,) = _shown(("LoadState", "ActiveState", "Job"), service)
    load, active = values.get("LoadState", ""), values.get("ActiveState", "")
    if _number(values.get("Job")) or active in _GOING:
        return ""
    return active if load == "loaded" else load


def is_node_starting() -> bool:
    """Whether the node's start of all instances is in progress, or queued."""
    return any(
        values.get("ActiveState") == Active.ACTIVATING or bool(_number(values.get("Job")))
        for values in _shown(("ActiveState", "Job"), _START_ALL)
    )


def time_of(clock_us: int) -> float:
    """The time in seconds since 1970 of a time on the clock that begins with the boot."""
    return time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - clock_us / 1e6)


def begin_start(name: str, *, slice_name: str = "") -> Callable[..., None]:
    """Queue the start of an instance's unit, which does not run; returns when systemd has queued
    the job, or refused it.

    If the caller holds the instance's lock until then, a later stop finds the job.

    :param slice_name: of the spec; empty is the slice of the node's instances.
    :returns: a function that waits for the job. It raises :class:`UnitError` if the job failed,
        :class:`CalledOffError` if it was cancelled, and TimeoutError after its argument,
        *timeout_s*; systemd goes on then.
    """
    import subprocess  # takes long to load, and many only want a unit's name

    _set_slice(name, slice_name)
    # With --show-transaction it reports when this very job is queued.
    command = ["systemctl", "--no-ask-password", "--show-transaction", "start", "--", unit_of(name)]
    try:
        program = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**_environment(), "SYSTEMD_LOG_LEVEL": "info", "SYSTEMD_LOG_TARGET": "console"},
        )
    except OSError as error:
        raise _no_systemctl(error) from error
    assert program.stderr is not None

    @contextlib.contextmanager
    def ended() -> Iterator[None]:
        try:
            yield
        except BaseException:
            program.kill()
            program.communicate()
            raise

    with ended():
        first = _read_until(program.stderr.fileno(), _QUEUED, timeout_s=_TIMEOUT_S)

    def wait(timeout_s: float | None = None) -> None:
        try:
            with ended():
                _, rest = program.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        lines = (first + rest).decode(errors="replace").splitlines()
        if program.returncode != 0:
            said = "\n".join(line for line in lines if not line.startswith(_NOTED))
            refusal = _refused("start", said, program.returncode)
            raise CalledOffError(str(refusal)) if _CANCELED in said else refusal

    return wait


def _read_until(descriptor: int, mark: bytes, *, timeout_s: float) -> bytes:
    """The output of a program up to a marker, or all of it if the marker does not come."""
    deadline = time.monotonic() + timeout_s
    said = b""
    while mark not in said:
        if not select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise UnitError(f"systemd has not queued it within {timeout_s} s")
        if not (more := os.read(descriptor, 4096)):
            break
        said += more
    return said


def start_later(name: str, *, slice_name: str = "") -> None:
    """Start an instance's unit, as :func:`begin_start` does, without waiting."""
    _set_slice(name, slice_name)
    _systemctl("start", "--no-block", "--", unit_of(name))


def stop_unit(name: str) -> None:
    """Stop an instance's unit, or cancel its start, without waiting."""
    _systemctl("stop", "--no-block", "--", unit_of(name))


def set_properties(name: str, properties: Iterable[str]) -> None:
    """Set properties of an instance's unit, as ``NAME=VALUE``, until the next boot."""
    _systemctl("set-property", "--runtime", "--", unit_of(name), *properties)


def _set_slice(name: str, slice_name: str) -> None:
    """Have an instance's unit start in a slice. systemd takes the slice of a unit from files alone.

    :raises UnitError: if that can't be done.
    """
    if not slice_name:
        forget_slice(name)
        return
    file = _slice_file(name)
    text = f"# By brine instance, of the spec.\n[Service]\nSlice={slice_name}\n"
    try:
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            write_whole(file, text.encode(), durable=False)
    except OSError as error:
        raise UnitError(f"{file}: can't be written: {error.strerror}") from error
    # systemd reads it at once, unless it has loaded the unit already.
    if _slice_of(name) != slice_name:
        _systemctl("daemon-reload")
        if (other := _slice_of(name)) != slice_name:
            text = f"its unit would be in {other}, and its spec says {slice_name}"
            raise UnitError(text, hint=f"systemctl cat {unit_of(name)}")


def forget_slice(name: str) -> None:
    """Have an instance's unit, which does not run, be in the slice of the node's instances."""
    file = _slice_file(name)
    if not file.exists():
        return
    try:
        file.unlink()
        with contextlib.suppress(OSError):  # there are drop-ins of others
            file.parent.rmdir()
    except OSError as error:
        raise UnitError(f"{file}: can't be removed: {error.strerror}") from error
    _systemctl("daemon-reload")


def _slice_file(name: str) -> Path:
    return DROP_INS / f"{unit_of(name)}.d" / "50-brine-slice.conf"


def _slice_of(name: str) -> str:
    (values,) = _shown(("Slice",), unit_of(name))
    return values.get("Slice", "")


def wait_for_network() -> None:
    """Wait for the node's network (network-online.target), at most :data:`NETWORK_S`."""
    _systemctl("start", "--", "network-online.target", timeout_s=NETWORK_S)


def forget_failure(name: str) -> None:
    """Reset the failure of a unit, if systemd still knows the unit."""
    with contextlib.suppress(UnitError):
        _systemctl("reset-failed", "--", unit_of(name))


def _jobs_for(kind: str) -> set[str]:
    """The instances whose units have a job of a kind, or a restart job."""
    text = _systemctl("list-jobs", "--plain", "--no-legend", "--", f"{PREFIX}*{SUFFIX}")
    jobs = (line.split() for line in text.splitlines())
    wanted = (job[1] for job in jobs if len(job) >= 3 and job[2] in (kind, "restart"))
    return {one.removeprefix(PREFIX).removesuffix(SUFFIX) for one in wanted}


def _shown(properties: Iterable[str], *names: str) -> Iterator[dict[str, str]]:
    """The properties of units, one dictionary each."""
    text = _systemctl("show", f"--property={','.join(properties)}", "--", *names)
    for block in text.strip().split("\n\n"):
        yield dict(line.partition("=")[::2] for line in block.splitlines())


def _unit(values: Mapping[str, str]) -> Unit | None:
    name = values.get("Id", "").removeprefix(PREFIX).removesuffix(SUFFIX)
    if not name:
        return None
    state = values.get("ActiveState")
    if state is None:
        raise UnitError(f"systemd says nothing of the state of {values['Id']}")
    try:
        active = Active(state)
    except ValueError:
        raise UnitError(f"{values['Id']} is {state}, which is not known here") from None
    result, invocation = values.get("Result", ""), values.get("InvocationID", "")
    numbers: Any = {key: _number(values.get(word)) for key, word in _NUMBERS.items()}
    return Unit(name, active, result=result, invocation=invocation, **numbers)


def _number(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _systemctl(*args: str, timeout_s: float | None = _TIMEOUT_S) -> str:
    command = ["systemctl", "--no-ask-password", *args]
    try:
        done = run_bounded(command, timeout_s=timeout_s, environment=_environment())
    except TimeoutError:
        raise UnitError(f"systemd does not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise _no_systemctl(error) from error
    if done.returncode != 0:
        raise _refused(args[0], done.stderr, done.returncode)
    return done.stdout


def _environment() -> dict[str, str]:
    # Its output is parsed, so it must not be translated.
    return {**os.environ, "LC_ALL": "C", "SYSTEMD_PAGER": ""}


def _no_systemctl(error: OSError) -> UnitError:
    return UnitError(f"systemctl: {error.strerror}", hint="instances need systemd")


def _refused(verb: str, said: str, status: int) -> UnitError:
    lines = said.strip().splitlines()
    return UnitError(f"systemctl {verb}: {lines[0] if lines else status}")
