"""The instances that a node has: defining, renaming and undefining them.

A definition is planned first, from what the node knows of the instance (:func:`plan_definition`,
which is pure); then it is compared with the node; then it is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from brine.common import operation
from brine.common.errors import BrineError, UsageError
from brine.common.operation import OperationKind
from brine.common.unix_socket import is_listening
from brine.instance import messages, store, unit
from brine.instance.by_hand import DevicesByHand, clear_of_their_slots, unnamed, with_devices
from brine.instance.claims import note_claim, refuse_old_claim, remove_notes_on
from brine.instance.conflicts import refuse_conflicts
from brine.instance.devices import refuse_other_formats
from brine.instance.disks.changes import NO_VOLUMES, VolumeChanges, changes_of
from brine.instance.disks.sized import with_volumes
from brine.instance.disks.volumes import default_unit, refuse_volumes, with_made
from brine.instance.history import verdicts_on
from brine.instance.intent import tell_cluster
from brine.instance.kvm.programs import refuse_writers
from brine.instance.kvm.runtime_devices import KEYS, DevicesNow, devices_now
from brine.instance.observe import (
    GOING,
    Observed,
    Oper,
    look,
    oper_of,
    refuse_running_without_spec,
)
from brine.instance.owner import make_folder, remove_folder
from brine.instance.start import forget_end, forget_tries
from brine.instance.stop import remove_leftover
from brine.instance.store import InstanceError, cluster_name, is_here
from brine.instance.unit import UnitError
from brine.instance.validate import completed
from brine.instance.xen import last_start, xl
from brine.storage.volume import Wipe
from brine.vm import markers
from brine.vm.conflicts import NONE_PLANNED, OtherIdentities, Planned, identities_lock
from brine.vm.disk import Disk
from brine.vm.files import InstanceFiles
from brine.vm.markers import MarkerKind
from brine.vm.nic import Nic
from brine.vm.spec import AdminState, Spec, to_json
from brine.vm.values import new_name_fault


class SpecChangedError(InstanceError):
    """The spec is not the one any more from which a new one was made."""


@dataclass(frozen=True, slots=True)
class Defined:
    """The result of a definition.

    :param changed: whether the spec differs from the former one.
    :param before: the former one, if there was one that can be used.
    :param aside: the copy of a damaged spec that it replaces.
    :param volumes: what was done with the volumes of its disks, or would be.
    """

    spec: Spec
    changed: bool
    before: Spec | None = None
    aside: Path | None = None
    volumes: VolumeChanges = NO_VOLUMES


@dataclass(frozen=True, slots=True)
class KnownInstance:
    """What a node knows of an instance before its definition.

    :param before: its spec, if it has a sound one.
    :param last: the spec of its last start, if it lacks a sound one and that is known.
    :param has_file: whether it has a spec, sound or damaged.
    """

    before: Spec | None = None
    last: Spec | None = None
    has_file: bool = False


@dataclass(frozen=True, slots=True)
class DefinitionPlan:
    """The spec that an instance gets, in the place of what is known of it.

    :param made: the UUIDs of the disks whose volumes are to be made.
    """

    spec: Spec
    known: KnownInstance
    made: frozenset[str] = frozenset()

    def volumes(self) -> VolumeChanges:
        """What is done with the volumes of its disks."""
        return changes_of(self.spec, self.known.before, self.made)

    def changes(self) -> bool:
        return self.spec != self.known.before

    def new_machine(self) -> str | None:
        """The key in words whose change makes another machine of an instance that is known."""
        before, spec = self.known.before, self.spec
        if before and before.hypervisor != spec.hypervisor:
            return "hypervisor"
        return "UUID" if before and spec.is_xen() and before.uuid != spec.uuid else None

    def is_first(self) -> bool:
        """Whether no instance of that name has been known."""
        return not (self.known.before or self.known.last)

    def changes_claim_alone(self) -> bool:
        """Whether all that changes is that the instance is this node's by a newer claim."""
        before, spec = self.known.before, self.spec
        if before is None or before == spec or before.node not in ("", spec.node):
            return False
        return spec == replace(before, node=spec.node, claim_serial=spec.claim_serial)

    def replaces_damaged(self) -> bool:
        return self.known.has_file and not self.known.before

    def loses_owner(self) -> bool:
        before = self.known.before
        return before is not None and bool(before.owner) and not self.spec.owner

    def raises_it(self) -> bool:
        """Whether an instance that should have been down is to be up from now on."""
        before = self.known.before
        return before is not None and before.admin_state != AdminState.UP == self.spec.admin_state

    def changed_keys(self) -> list[str]:
        """The keys of the spec that differ from the former one, if there is one."""
        if self.known.before is None:
            return []
        before, spec = to_json(self.known.before), to_json(self.spec)
        return [key for key, value in spec.items() if value != before[key]]


def plan_definition(
    data: dict[str, Any],
    known: KnownInstance,
    *,
    cluster: str = "",
    taken: Container[str] = (),
    over: Spec | None = None,
    keeps_user_state: bool = False,
    now: Callable[[], DevicesNow | None] | None = None,
    default_unit: Callable[[], str] = lambda: "",
) -> DefinitionPlan:
    """Plan a definition of an instance with a spec as people write it.

    :param over: the spec that *data* was made from: refuse it if that has changed meanwhile.
    :param keeps_user_state: an instance that its user has shut down stays so, unless it is to be
        offline.
    :param now: what it was started with last, and has by now, where that is known: *data* is a
        declaration, and what was added by hand stays. None for an operator's own spec.
    :param default_unit: the storage unit of disks that name none; empty is none.
    :param cluster: the name of the cluster, and *taken* identities of others; see
        :func:`brine.instance.validate.completed`.
    :raises BrineError: what is wrong with the spec.
    """
    before = known.before
    if over and before != over:
        if before is None:
            text = "it was undefined, or its spec was damaged, during this edit"
            raise InstanceError(over.name, text)
        hint = f"brine instance edit {over.name}, again"
        raise SpecChangedError(over.name, "its spec changed during this edit", hint=hint)
    if keeps_user_state and before and before.is_down_by_user():
        data = without_state(data)
    last = before or known.last

    def planned(more: Mapping[str, Sequence[Disk | Nic]]) -> DefinitionPlan:
        left = unnamed(data, more)
        sized = with_volumes(with_devices(data, left), last, default_unit)
        added = {one.uuid for devices in left.values() for one in devices}
        by_hand = None if now is None else added
        spec = completed(sized.data, before=last, cluster=cluster, taken=taken, by_hand=by_hand)
        return DefinitionPlan(clear_of_their_slots(spec, added, data), known, sized.made)

    if last is None or now is None:
        return planned({})
    has_any = any(one.by_hand for key in KEYS for one in getattr(last, key))
    by_hand = DevicesByHand.of(last, now() if has_any else None)
    plan = planned(by_hand.kept)
    # The next start drops what is plugged but not in the spec if that has other devices by then.
    if not (changed := {key for key in KEYS if getattr(plan.spec, key) != getattr(last, key)}):
        return plan
    plugged = DevicesByHand.of(last, now()).plugged
    more = {key: [*by_hand.kept[key], *(plugged[key] if key in changed else ())] for key in KEYS}
    return planned(more) if more != by_hand.kept else plan


def define_instance(
    data: Any,
    *,
    dry_run: bool = False,
    is_new: bool = False,
    over: Spec | None = None,
    keeps_user_state: bool = False,
    keeps_by_hand: bool = False,
    planned: Planned = NONE_PLANNED,
    wipe: Wipe = Wipe.ZERO,
) -> Defined:
    """Write the spec of an instance. A running instance uses it from its next start on.

    :param is_new: refuse it if an instance of that name exists.
    :param over: the spec that it was made from, and *keeps_user_state*: see
        :func:`plan_definition`.
    :param keeps_by_hand: the spec is a declaration, and the devices that were added by hand stay.
    :param planned: the specs that other instances would have.
    :param wipe: what is done about former data where new volumes are.
    :raises BrineError: what is wrong with the spec, or what failed.
    """
    name = data.get("name") if isinstance(data, dict) else None
    if not isinstance(name, str):
        return Defined(completed(data), changed=True)  # which tells the fault
    aside = None
    with ExitStack() as locks:
        if not dry_run:
            locks.enter_context(store.alone(name))
        if is_new:
            refuse_name(name)
        plan = plan_definition(
            data,
            _known(name, data),
            cluster=cluster_name(),
            taken=OtherIdentities(name, planned),
            over=over,
            keeps_user_state=keeps_user_state,
            now=partial(_devices_now, name) if keeps_by_hand else None,
            default_unit=default_unit,
        )
        spec, before = plan.spec, plan.known.before
        refuse_old_claim(spec, before)
        if plan.changes_claim_alone():
            if not dry_run:
                store.save(spec)
            return Defined(spec, changed=False, before=spec)
        if plan.changes():
            _refuse_on_node(plan)
            check = partial(refuse_conflicts, spec, before, planned)
            if dry_run:
                check()
            else:
                if plan.volumes().needs_work():
                    check()
                    spec = locks.enter_context(with_made(spec, plan.volumes(), wipe=wipe))
                    plan = replace(plan, spec=spec)
                locks.enter_context(identities_lock(check))
                aside = _commit(plan)
    return Defined(spec, plan.changes(), before, aside, plan.volumes())


def _devices_now(name: str) -> DevicesNow | None:
    """What an instance was started with last, and has by now; None if that is not known."""
    if not InstanceFiles(name).runtime.exists():
        return None
    with suppress(InstanceError):  # its next start tells the fault
        return devices_now(name)
    return None


def without_state(data: dict[str, Any]) -> dict[str, Any]:
    """A spec as people write it that leaves the admin_state as it is, unless it is offline."""
    if data.get("admin_state") == AdminState.OFFLINE:
        return data
    keys = ("admin_state", "admin_state_source")
    return {key: value for key, value in data.items() if key not in keys}


def _known(name: str, data: dict[str, Any]) -> KnownInstance:
    """What is known of an instance.

    :raises InstanceError: if no new instance may have that name, and there is none of it.
    """
    before, has_file = store.load_sound(name), store.spec_file_of(name).exists()
    if before is None and not has_file:
        _refuse_odd_name(name)
    return KnownInstance(before, None if before else _last(name, data), has_file)


def _last(name: str, data: dict[str, Any]) -> Spec | None:
    """The spec of the last start of an instance without a sound spec, unless the UUID differs, or
    is another instance's by now: 0.2.0 left files of the old name when its rename was killed.

    With it, the guest sees the same machine at the next start.
    """
    spec = store.started_as(name)
    if spec is None or str(data.get("uuid") or spec.uuid).lower() != spec.uuid:
        return None
    others = (one for one in store.load_all() if isinstance(one, Spec) and one.name != name)
    return None if any(one.uuid == spec.uuid for one in others) else spec


def _refuse_on_node(plan: DefinitionPlan) -> None:
    """Refuse what the node's programs, domains and disks do not allow."""
    spec = plan.spec
    if plan.known.before is None:
        _refuse_to_lose_domain(spec)
    elif what := plan.new_machine():
        _refuse_running(look(spec.name), f"give another {what} to")
    if any(disk.unit or disk.size_mib for disk in spec.disks):
        refuse_volumes(spec, plan.volumes(), plan.known.before)
    refuse_other_formats(spec)
    refuse_writers(spec)


def _commit(plan: DefinitionPlan) -> Path | None:
    """Carry out a definition; returns the copy of a damaged spec that it replaces."""
    spec, name, before = plan.spec, plan.spec.name, plan.known.before
    if before and before.is_xen() and plan.new_machine():
        _let_go(name, "define")
    if spec.owner:
        make_folder(name, spec.owner)
    aside = None
    if plan.replaces_damaged():
        aside = store.keep_aside(name)
    elif plan.is_first() and not _runs_unknown(name):
        store.forget(name)  # of one that had this name before, and does not run
    if before:
        tell_cluster(before, spec)
        if plan.raises_it():
            _forget_end(before)
    store.save(spec)
    with store.telling(name, "the note of its claim can't be removed"):
        remove_notes_on(spec)
    if before is None:
        messages.tell(messages.DEFINED, name)
    else:
        messages.tell(messages.CHANGED, name, keys=" ".join(plan.changed_keys()))
    if plan.loses_owner():
        remove_folder(name)  # owners that wait there for its end see that
    return aside


def _runs_unknown(name: str) -> bool:
    """Whether a VM of that name runs that may have no spec."""
    control = InstanceFiles(name)
    return is_listening(control.qmp) or control.domain.exists()


def _forget_end(spec: Spec) -> None:
    """Forget the last end of an instance that should be up and does not run."""
    try:
        if look(spec.name).is_going:
            return
    except BrineError:
        return  # of what can't be known nothing is forgotten
    try:
        forget_end(spec)
    except OSError as error:
        raise InstanceError(spec.name, f"its last end: {error}") from error


def _refuse_to_lose_domain(spec: Spec) -> None:
    """Refuse a definition that would orphan a running Xen domain."""
    if not InstanceFiles(spec.name).has_domain():
        return
    uuid = last_start.uuid_of(spec.name)
    is_its_own = spec.is_xen() and spec.uuid == uuid
    if uuid and not is_its_own and xl.domain_of(uuid):
        hint = f'give it "uuid": "{uuid}", or xl destroy what runs'
        raise InstanceError(spec.name, "its domain, of another UUID, is still there", hint=hint)


def undefine_instance(name: str, *, over: Spec | None = None) -> None:
    """Remove the spec and all files of an instance that does not run.

    :param over: its spec as it was looked at: refuse it if its disks have changed meanwhile.
    """
    with store.alone(name):
        if over and store.load(name).disks != over.disks:
            text = "its disks changed during this command"
            raise InstanceError(name, text, hint="see whether they may go, and do it again")
        if store.load_sound(name) or not store.spec_file_of(name).exists():
            _let_go(name, "undefine")
        elif (oper := oper_of(unit.find_unit(name))) in GOING:
            raise _is_going(name, oper, "undefine")
        refuse_stray_vm(name, "end it, then undefine the instance")
        _note_whose(name)
        store.remove(name)
        store.forget(name)
        forget_tries(name)
        messages.tell(messages.UNDEFINED, name)
        remove_folder(name)
        _forget_unit(name)  # before another instance of that name starts


def _note_whose(name: str) -> None:
    """Note the claim of an instance of another node, before its spec is removed."""
    spec = store.load_sound(name)
    if spec and spec.claim_serial and not is_here(spec):
        with store.telling(name, "its claim can't be noted"):
            note_claim(spec)


def _forget_unit(name: str) -> None:
    """Have systemd keep nothing of the unit of an instance that is no more."""
    unit.forget_failure(name)
    with suppress(UnitError):  # the next start of that name does it
        unit.forget_slice(name)


def _let_go(name: str, what: str) -> None:
    """Refuse to change a running instance, and remove the leftovers of its domain."""
    seen = look(name)
    _refuse_running(seen, what)
    if seen.domain:
        remove_leftover(seen.spec)


def refuse_name(name: str) -> None:
    """Refuse a name for another instance, if one has it or runs by it, with or without a spec."""
    store.refuse_existing(name)
    _refuse_odd_name(name)
    refuse_running_without_spec(name)
    refuse_stray_vm(name, "give another name")


def refuse_stray_vm(name: str, hint: str) -> None:
    """Refuse a name by which a VM runs that is not a unit's, or that even SIGKILL has not ended.

    :param hint: what to do.
    """
    monitor = InstanceFiles(name).qmp
    if is_listening(monitor):
        text = "a QEMU of that name runs, and not as its unit"
        raise InstanceError(name, text, hint=f"{hint}; {monitor} is its monitor")


def _refuse_odd_name(name: str) -> None:
    if fault := new_name_fault(name):
        raise InstanceError(name, fault, hint="give another name")


def _refuse_running(seen: Observed, what: str) -> None:
    if seen.is_going:
        raise _is_going(seen.name, seen.state.oper, what)
    refuse_stray_vm(seen.name, f"end it, then {what} it")


def _is_going(name: str, oper: Oper, what: str) -> InstanceError:
    return InstanceError(name, f"is {oper}", hint=f"brine instance stop {name}, then {what} it")


def rename_instance(name: str, new_name: str) -> Spec:
    """Give an instance that does not run another name; its UUID stays.

    At any time the instance has exactly one name, with all its files, even if this is killed.

    :raises BrineError: if it runs, it does not exist, or the new name is taken.
    """
    first, second = sorted((name, new_name))
    if first == second:
        raise UsageError(f"that is its name already: {name}", hint="give it another one")
    with store.alone(first), store.alone(second):
        seen = look(name)
        _refuse_running(seen, "rename")
        refuse_name(new_name)
        has_crashed = _has_crashed(seen)
        store.try_to_save(seen.spec, new_name)
        there = {"name": name, "new_name": new_name}
        with operation.begin(
            RENAME, store.operation_key(name), store.operation_key(new_name)
        ) as work:
            work.step("link the files", undo=("forget", {"name": new_name}))
            if seen.spec.owner:
                make_folder(new_name, seen.spec.owner)
            store.share(name, new_name)
            finish = ("finish", {**there, "has_crashed": has_crashed})
            rest = (finish, ("forget", {"name": name}), ("save", there))
            # At no moment do other commands miss its identities.
            with work.committing(("is renamed", there), *rest), identities_lock():
                store.switch(name, new_name)
    return replace(seen.spec, name=new_name)


def _is_renamed(facts: operation.Facts) -> bool:
    specs = (store.spec_file_of(facts[key]) for key in ("name", "new_name"))
    return [one.exists() for one in specs] == [False, True]


def _finish_rename(facts: operation.Facts) -> None:
    if facts["has_crashed"]:
        # The records of the crash have its old name. So it counts as never started, and starts
        # again.
        with suppress(OSError):
            markers.remove_marker(MarkerKind.STARTED, facts["new_name"])
    messages.tell(messages.RENAMED, facts["new_name"], name=facts["name"])


def _forget_name(facts: operation.Facts) -> None:
    """Remove all that belongs to a name, unless an instance has it."""
    name = facts["name"]
    if store.spec_file_of(name).exists():
        return
    store.forget(name)
    forget_tries(name)
    remove_folder(name)
    _forget_unit(name)  # before another instance of that name starts


def _save_renamed(facts: operation.Facts) -> None:
    """Save the spec under its new name, which its content lacks."""
    if spec := store.load_sound(facts["new_name"]):
        store.save(spec)


RENAME = OperationKind(
    "rename",
    {
        "forget": _forget_name,
        "is renamed": _is_renamed,
        "finish": _finish_rename,
        "save": _save_renamed,
    },
    alone=store.all_held,
)


def _has_crashed(seen: Observed) -> bool:
    """Whether an instance should be up and is down, and neither user nor admin ended it."""
    if seen.spec.admin_state != AdminState.UP or seen.state.oper is not Oper.DOWN:
        return False
    if seen.run.was_stopped():
        return False
    if not seen.ended_in_order():
        return True
    verdict = verdicts_on([seen]).get(seen.name)
    return verdict is not None and verdict.who == "crash"
