"""ExecStart of an instance's unit: prepares a start, and becomes QEMU or xl.

No process of ours stays. What fails before is told in one line, and undone; what QEMU refuses it
tells itself, and the unit's last step undoes the rest.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from brine.common import markers
from brine.common.errors import BrineError, die
from brine.common.markers import MarkerKind
from brine.common.paths import InstanceFiles
from brine.common.peer import is_listening
from brine.instance import files, messages, store
from brine.instance.hypervisor import hypervisor_of
from brine.instance.intent import offline
from brine.instance.kvm.resources import missing_paths_of
from brine.instance.spec import AdminState, Spec
from brine.instance.store import InstanceError, refuse_elsewhere
from brine.instance.unit import (
    UnitError,
    wait_for_network,
)

_PROGRAM = "brine-instance"
_RUNTIME_MODE = 0o600


def main() -> NoReturn:
    """Become the QEMU of the instance that is named on the command line, or the xl that makes its
    domain."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    messages.log_to_journal(_PROGRAM)
    try:
        spec = _current(name)
        if spec.wait_for_network:
            _wait_for_network(name)
        hypervisor_of(spec).exec(spec)
    except BrineError as error:
        _note_failure(name)
        die(_PROGRAM, error, 1)
    except OSError as error:
        _note_failure(name)
        text = f"{name}: {error.filename or 'the system'}: {error.strerror}"
        die(_PROGRAM, BrineError(text), 1)


def _note_failure(name: str) -> None:
    """Note what of the node this start lacked: the watcher tries again as soon as it is there."""
    try:
        lacks = missing_paths_of(store.load(name))
    except BrineError:
        return  # its spec is the fault, which is told
    try:
        markers.write_marker(MarkerKind.FAILURE, name, run=markers.this_run(), lacks=lacks)
    except OSError as error:
        print(f"{_PROGRAM}: warning: {name}: its failure can't be noted: {error}", file=sys.stderr)


def _current(name: str) -> Spec:
    """The spec with what was plugged while it ran last, which it has from now on."""
    with store.alone(name):
        files.settle(name)
        spec = store.load(name)
        _refuse_running(spec, InstanceFiles(name))
        if spec.admin_state == AdminState.OFFLINE:
            raise offline(name)  # whoever asks, as systemd does
        refuse_elsewhere(spec)
        prepared = hypervisor_of(spec).prepared(spec)
        if prepared != spec:
            store.save(prepared)
    return prepared


def _wait_for_network(name: str) -> None:
    try:
        wait_for_network()
    except UnitError as error:
        # Whether its disks and bridges are there is seen by themselves.
        print(f"{_PROGRAM}: warning: {name}: the node's network: {error}", file=sys.stderr)


def _refuse_running(spec: Spec, control: InstanceFiles) -> None:
    """Leave alone a VM of that name which runs without us."""
    if not is_listening(control.qmp):
        return
    text = f"{control.qmp}: a VM of that name runs already, and not as this unit"
    raise InstanceError(spec.name, text)


if __name__ == "__main__":
    main()
