"""What QEMU can give a guest here: its processor models, their flags, and its machine types.

QEMU itself is asked, on a monitor of a machine without anything in it. That takes a quarter of a
second, so its answer is noted for commands that people wait for. Source: QEMU's QAPI schema.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brine.common import __version__, paths
from brine.common.errors import BrineError, install_hint, printable, root_hint
from brine.common.files import fault_of_writers, read_json, write_whole
from brine.common.process import ENDING_WITH_US
from brine.common.qmp.client import QmpClient
from brine.common.qmp.wire import QmpCommandError, QmpError
from brine.common.schema import SchemaError
from brine.instance.kvm.programs import NOBODY, begin_unprivileged, identity_of
from brine.vm.spec import WHOLE_CPUS, known_part, parse

if TYPE_CHECKING:
    import subprocess

_End = Callable[[float | None], "subprocess.CompletedProcess[str]"]

KVM_DEVICE = Path("/dev/kvm")
PROCESSORS_FILE = Path("/proc/cpuinfo")
MODULES_DIR = Path("/sys/module")

_VARYING = ("cpu MHz", "bogomips")

_TIMEOUT_S = 30.0
_END_S = 5.0
_FLAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_MACHINE = ("-nodefaults", "-no-user-config", "-machine", "none", "-display", "none")


class ProcessorError(BrineError):
    """QEMU can't be asked for its processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A processor model of QEMU's.

    :param missing: its flags that a guest can't have here.
    :param flags: all of its flags; empty for a model that other nodes may have otherwise, and for
        one of another vendor.
    """

    missing: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """The processor of this node, as QEMU has it for guests.

    :param accel: ``kvm``, or ``tcg`` where QEMU emulates it.
    :param flags: all that a guest can have and take along in a live move, by QEMU's names.
    :param models: by name, aliases too.
    :param model_name: as the kernel has it, and so is the *microcode*; empty is not known.
    :param machines: the machine types of this QEMU.
    """

    accel: str
    vendor: str
    family: int
    model: int
    stepping: int
    model_name: str
    microcode: str
    flags: tuple[str, ...]
    models: dict[str, Model]
    qemu: str
    qemu_version: str
    machines: tuple[str, ...]

    def knows(self, flag: str) -> bool:
        """Whether a word is a flag of this processor, or of a model."""
        if flag in self.flags:
            return True
        return any(flag in one.missing or flag in one.flags for one in self.models.values())

    def to_json(self) -> dict[str, Any]:
        """It as ``brine node cpu --json`` prints it."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any, where: str = "") -> Processor:
        """The inverse, of this or another version.

        :raises SchemaError: what is wrong.
        """
        known = known_part(cls, data)
        if isinstance(known, dict) and isinstance(known.get("models"), dict):
            models = {name: known_part(Model, one) for name, one in known["models"].items()}
            known["models"] = models
        return parse(cls, known, where)


def known_processor_of(qemu: str) -> Processor:
    """The processor of this node, as QEMU has told it before, unless something has changed since
    that the answer depends on.

    :raises ProcessorError: as :func:`processor_of` does.
    """
    identity = _identity_with(qemu)
    if identity and (noted := _noted(identity)):
        return noted
    found = processor_of(qemu)
    if identity:
        data = json.dumps({"of": identity, "processor": found.to_json()}).encode() + b"\n"
        with contextlib.suppress(OSError):  # then it is asked again
            write_whole(paths.PROCESSOR_FILE, data, mode=0o600, durable=False)
    return found


def _identity_with(qemu: str) -> str:
    """What changes with QEMU's answer: the program, this code, the first processor as the kernel
    has it, and the settings of the kernel's module. Empty if that is not known."""
    parts = [__version__, qemu, str(KVM_DEVICE.exists())]
    try:
        if not (program := identity_of(qemu)):
            return ""
        cpu = PROCESSORS_FILE.read_text(errors="replace").partition("\n\n")[0]
        parts += [program, *(row for row in cpu.splitlines() if not row.startswith(_VARYING))]
    except OSError:
        return ""
    for file in sorted(MODULES_DIR.glob("kvm*/parameters/*")):
        with contextlib.suppress(OSError):
            parts.append(f"{file}={file.read_text(errors='replace')}")
    return hashlib.sha256("\n".join(parts).encode(errors="replace")).hexdigest()


def _noted(identity: str) -> Processor | None:
    """What was noted with this identity; None if others than root may have written it."""
    file = paths.PROCESSOR_FILE
    data = None if fault_of_writers(file) else read_json(file)
    if not isinstance(data, dict) or data.get("of") != identity:
        return None
    with contextlib.suppress(SchemaError):
        return Processor.from_json(data.get("processor"))
    return None


def processor_of(qemu: str) -> Processor:
    """The processor of this node.

    :param qemu: the program.
    :raises ProcessorError: if QEMU can't be asked, or does not answer in time.
    """
    accel = "kvm" if KVM_DEVICE.exists() else "tcg"
    try:
        with _asked(qemu, accel) as qmp:
            numbers = qmp.execute("query-version")["qemu"]
            machines = qmp.execute("query-machines")
            models = sorted(qmp.execute("query-cpu-definitions"), key=lambda row: str(row["name"]))
            props = _expanded(qmp, WHOLE_CPUS[accel])
            lasting = [row["name"] for row in models if _is_lasting(row)]
            flags = {name: _flags(_expanded(qmp, name)) for name in lasting}
        if accel == "kvm":
            own = _models_of_vendor(qemu, props["vendor"], lasting)
            flags = {name: flags[name] for name in own}
        return Processor(
            accel=accel,
            vendor=str(props["vendor"]),
            family=int(props["family"]),
            model=int(props["model"]),
            stepping=int(props["stepping"]),
            **_kernels(),
            flags=_flags(props),
            models={
                row["name"]: Model(
                    missing=tuple(sorted(row.get("unavailable-features", ()))),
                    flags=flags.get(row["name"], ()),
                )
                for row in models
            },
            qemu=qemu,
            qemu_version=".".join(str(numbers[key]) for key in ("major", "minor", "micro")),
            machines=tuple(sorted(_machines(machines))),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProcessorError(f"{qemu} says nothing of use of its processors: {error!r}") from error


def _models_of_vendor(qemu: str, vendor: str, models: Sequence[str]) -> list[str]:
    """The models that are processors of a vendor. With KVM, QEMU says of each that it is of the
    node's own; the emulator knows better."""
    with _asked(qemu, "tcg") as qmp:
        return [name for name in models if _expanded(qmp, name).get("vendor") == vendor]


def _expanded(qmp: QmpClient, model: str) -> Mapping[str, Any]:
    """The properties of a model; none if QEMU can't tell them."""
    # The static type has one name for each flag, and no property that is none.
    question = {"type": "static", "model": {"name": model}}
    try:
        props: Mapping[str, Any] = qmp.execute("query-cpu-model-expansion", question)["model"][
            "props"
        ]
    except QmpCommandError:
        return {}
    return props


def _flags(props: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(name for name, value in props.items() if value is True and _is_flag(name)))


def _is_flag(name: str) -> bool:
    return _FLAG.fullmatch(name) is not None


def _is_lasting(row: Mapping[str, Any]) -> bool:
    """Whether a model is the same on any node, today and later."""
    is_other = row.get("static") or row.get("deprecated") or row.get("alias-of")
    return bool(row["migration-safe"] and not is_other)


def _machines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield from (row[key] for key in ("name", "alias") if key in row)


def _kernels() -> dict[str, str]:
    """What the kernel says of the first processor."""
    try:
        text = PROCESSORS_FILE.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        text = ""
    parts = [line.partition(":") for line in text.splitlines()]
    rows = {name.strip(): printable(value.strip()) for name, _, value in parts}
    return {"model_name": rows.get("model name", ""), "microcode": rows.get("microcode", "")}


@contextlib.contextmanager
def _asked(qemu: str, accel: str) -> Iterator[QmpClient]:
    """The monitor of a QEMU of this block's own, which ends with it.

    :raises ProcessorError: if it can't be run, or does not answer.
    """
    if fault := fault_of_writers(qemu):
        raise ProcessorError(f"{qemu} is not run: {fault}")
    user, group = _who_may_use_kvm() if accel == "kvm" else (NOBODY, NOBODY)
    # Not its standard output: what waits there when QEMU quits is lost.
    ours, its = socket.socketpair()
    with ours:
        with its:
            monitor = ("-chardev", f"socket,id=qmp,fd={its.fileno()}", "-mon", "qmp,mode=control")
            end = _begun(
                qemu,
                *_MACHINE,
                "-accel",
                accel,
                *monitor,
                descriptor=its.fileno(),
                user=user,
                group=group,
            )
        try:
            with QmpClient.over(ours, Path(qemu), timeout_s=_TIMEOUT_S, limit_s=_TIMEOUT_S) as qmp:
                yield qmp
        except QmpError as error:
            said = _last_words(end) or str(error).removeprefix(f"{qemu}: ")
            is_forbidden = os.geteuid() != 0 and "ermission" in said
            text = f"{qemu} does not answer: {said}"
            raise ProcessorError(text, hint="be root" if is_forbidden else None) from error
        finally:
            with contextlib.suppress(TimeoutError):
                end(0)  # it has nothing that needs an end in order


def _begun(qemu: str, *arguments: str, descriptor: int, user: int, group: int) -> _End:
    try:
        return begin_unprivileged(
            qemu,
            *arguments,
            descriptors=[descriptor],
            user=user,
            group=group,
            through=ENDING_WITH_US,
        )
    except FileNotFoundError as error:
        hint = install_hint(apt="qemu-system-x86", dnf="qemu-system-x86")
        raise ProcessorError(f"{qemu}: {error.strerror}", hint=hint) from error
    except OSError as error:
        fault = error.strerror or str(error)
        raise ProcessorError(f"{qemu}: {fault}", hint=root_hint(error)) from error


def _last_words(end: _End) -> str:
    """What a QEMU said before it ended; empty if it did not, or said nothing."""
    try:
        lines = end(_END_S).stderr.strip().splitlines()
    except TimeoutError:
        return ""
    return printable(lines[-1]) if lines else ""


def _who_may_use_kvm() -> tuple[int, int]:
    """A user and a group, as which QEMU may use KVM: without other privileges, if any may."""
    status = KVM_DEVICE.stat()
    if status.st_mode & stat.S_IROTH and status.st_mode & stat.S_IWOTH:
        return NOBODY, NOBODY
    if status.st_mode & stat.S_IRGRP and status.st_mode & stat.S_IWGRP:
        return NOBODY, status.st_gid
    return status.st_uid, status.st_gid
