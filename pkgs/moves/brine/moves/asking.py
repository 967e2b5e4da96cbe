"""``brine node ask``: a node asks whose its instances are, before it starts any of them.

systemd-tmpfiles makes the file of what is held back when the node boots, before anything else: all
instances are held back until the answer, also if this is killed at any step. What is another
node's is set aside. If no candidate answers, instances stay held back whose disks another node
could have, and a timer asks again until one answers. What was released once is not held back again
before the next boot.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from brine.common import paths
from brine.common.errors import BrineError, tell_error
from brine.common.files import write_whole
from brine.instance import messages as of_instances
from brine.instance import store
from brine.instance.claim_changes import set_aside
from brine.instance.messages import log_to_journal
from brine.instance.store import is_this_node
from brine.moves import messages
from brine.moves.question import Candidates, ClaimsByUuid, own_reference
from brine.moves.settings import MovesSettings, Unasked, settings_or_defaults
from brine.storage.locality import Storage
from brine.vm.claim import Claim
from brine.vm.spec import Spec

TIMER = "brine-claims.timer"
START_ALL = "brine-instances.service"
_OTHER_DRIVES = ("-drive", "-blockdev", "-hda", "-hdb", "-hdc", "-hdd", "-device")
_NO_ANSWER = "no master candidate has answered whose it is"


@dataclass(frozen=True, slots=True)
class AskedResult:
    """The result of a question.

    :param others: the instances that are another node's, with its claim.
    :param held: why others are held back, by name.
    :param error: why there is no answer.
    """

    others: Mapping[str, Claim]
    held: Mapping[str, str]
    error: BrineError | None = None


def others_among(specs: Sequence[Spec], claims: ClaimsByUuid) -> list[tuple[Spec, Claim]]:
    """The instances that another node may run, by newer claims than their specs have."""
    found = []
    for spec in specs:
        claim = claims.get(spec.uuid)
        is_others = claim and claim.node and not is_this_node(claim.node)
        if claim and is_others and claim.serial > spec.claim_serial:
            found.append((spec, claim))
    return found


def why_held(spec: Spec, start_unasked: str, storage: Storage) -> str | None:
    """Why an instance must not start while no candidate has answered; None if it may."""
    if start_unasked == Unasked.ALL:
        return None
    if start_unasked == Unasked.NONE:
        return f'{_NO_ANSWER}, and start_unasked is "none"'
    faults = (storage.why_shared(disk) for disk in spec.disks)
    if fault := next((one for one in faults if one), None):
        return f"{_NO_ANSWER}, and {fault}"
    if any(one.startswith(_OTHER_DRIVES) for one in spec.extra_arguments):
        return f"{_NO_ANSWER}, and its extra_arguments may have disks of other nodes"
    return None


def ask_whose(settings: MovesSettings) -> AskedResult:
    """Ask, set aside what is another's, and release or hold back the rest."""
    before = _held_before()
    specs = [one for one in store.load_all() if isinstance(one, Spec)]
    claims: ClaimsByUuid | None = {}
    error = None
    try:
        candidates = Candidates.known()
        if candidates and specs:
            timeout_s = float(settings.ask_timeout)
            claims = candidates.claims_on(own_reference(), specs, timeout_s=timeout_s)
    except BrineError as fault:
        claims, error = None, fault
    others, held = dict[str, Claim](), dict[str, str]()
    if claims is None:
        storage = Storage()
        waiting = [one for one in specs if before is None or one.uuid in before]
        found = ((one, why_held(one, settings.start_unasked, storage)) for one in waiting)
        held = {spec.uuid: why for spec, why in found if why}
    for spec, claim in others_among(specs, claims or {}):
        try:
            set_aside(spec.name, spec.uuid, claim)
            others[spec.name] = claim
        except BrineError as fault:
            held[spec.uuid] = f"it is {claim.node}'s, and can't be set aside: {fault}"
    _hold_back(held)
    names = {spec.uuid: spec.name for spec in specs}
    told = before or frozenset()
    for uuid in held.keys() - told:
        of_instances.tell(messages.HELD_BACK, names[uuid], reason=held[uuid])
    for uuid in (told & names.keys()) - held.keys():
        if names[uuid] not in others:
            of_instances.tell(messages.RELEASED, names[uuid])
    _go_on(asks_again=bool(error or held), is_released=bool(told - held.keys()))
    return AskedResult(others, {names[uuid]: why for uuid, why in held.items()}, error)


def _held_before() -> frozenset[str] | None:
    """The UUIDs of the instances that are held back by an earlier question; None are all, by the
    boot."""
    try:
        return frozenset(json.loads(paths.UNASKED_FILE.read_bytes()).keys())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _hold_back(held: Mapping[str, str]) -> None:
    """Replace what is held back, in one step."""
    try:
        if held:
            data = json.dumps(held).encode() + b"\n"
            write_whole(paths.UNASKED_FILE, data, mode=0o644, durable=False)
        else:
            paths.UNASKED_FILE.unlink(missing_ok=True)
    except OSError as error:
        raise BrineError(f"{paths.UNASKED_FILE}: {error.strerror}") from error


def _go_on(*, asks_again: bool, is_released: bool) -> None:
    """Have the timer ask again, or no more, and systemd start what was held back.

    When the node boots, its start of all instances comes after the first question anyway.
    """
    jobs = [("start" if asks_again else "stop", TIMER)]
    jobs += [("start", START_ALL)] * is_released
    for verb, unit in jobs:
        command = ["systemctl", "--quiet", "--no-block", verb, "--", unit]
        with suppress(OSError):  # without systemd, none runs
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )


def ask(arguments: argparse.Namespace) -> int:
    log_to_journal("brine")
    found = ask_whose(settings_or_defaults())
    if arguments.json:
        others = [
            {"name": name, "node": claim.node, "serial": claim.serial}
            for name, claim in found.others.items()
        ]
        held = [{"name": name, "why": why} for name, why in found.held.items()]
        print(json.dumps({"others": others, "held": held, "answered": found.error is None}))
    else:
        for name, claim in found.others.items():
            print(f"set aside: {name}, which is {claim.node}'s")
        for name, why in found.held.items():
            print(f"held back: {name}: {why}")
    if found.error:
        tell_error(found.error)
    return 3 if found.held or found.error else 0
