"""``brine node ask``: a node asks whose its instances are, before it starts any of them.

brine-claims.service asks before others start instances. Its first step makes the file of what is
held back: all instances are, until the answer. What is another node's is set aside. If too few
candidates answer, instances stay held back whose disks another node could have. A timer asks again,
also if this was killed at any step. What was released once is not held back again before the next
boot.

An instance whose spec has no claim is never held back or set aside: as before there were claims,
this node runs it because it has its spec.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache

from brine.common import paths
from brine.common.errors import BrineError, tell_error, warn
from brine.common.files import write_whole
from brine.common.locks import LockedError, LockError, node_lock
from brine.common.own_node import noted_node
from brine.instance import messages as of_instances
from brine.instance import store
from brine.instance.claim_changes import set_aside
from brine.instance.messages import log_to_journal
from brine.instance.store import is_this_node
from brine.moves import messages
from brine.moves.question import Answers, Candidates
from brine.moves.settings import MovesSettings, Unasked, settings_or_defaults
from brine.storage.locality import Storage
from brine.vm.claim import Claim
from brine.vm.spec import Spec

TIMER = "brine-claims.timer"
START_ALL = "brine-instances.service"
_LOCK = "claims-question"
_LOCK_S = 30.0
_OTHER_DRIVES = (
    *("drive", "blockdev", "hda", "hdb", "hdc", "hdd", "device", "virtfs", "fsdev"),
    *("pflash", "mtdblock", "sd", "readconfig"),
)
_NO_ANSWER = "too few master candidates have answered whose it is"


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


def others_among(specs: Sequence[Spec], answers: Answers) -> list[tuple[Spec, Claim]]:
    """The instances that are another node's, by newer claims than their specs have."""
    found = []
    for spec in specs:
        claim = answers.get(spec.uuid)
        if claim and not is_this_node(claim.node) and claim.serial > spec.claim_serial:
            found.append((spec, claim))
    return found


def why_held(spec: Spec, start_unasked: str, storage: Callable[[], Storage]) -> str | None:
    """Why an instance must not start while too few candidates have answered; None if it may."""
    if start_unasked == Unasked.ALL or not spec.claim_serial:
        return None
    if start_unasked == Unasked.NONE:
        return f'{_NO_ANSWER}, and start_unasked is "none"'
    try:
        faults = (storage().why_shared(disk) for disk in spec.disks)
        fault = next((one for one in faults if one), None)
    except Exception as error:  # whatever it is, it is of one instance only
        fault = f"its disks can't be looked at: {error}"
    if fault:
        return f"{_NO_ANSWER}, and {fault}"
    options = (one.lstrip("-") for one in spec.extra_arguments if one.startswith("-"))
    if any(one.startswith(_OTHER_DRIVES) for one in options):
        return f"{_NO_ANSWER}, and its extra_arguments may have disks of other nodes"
    return None


def ask_whose(settings: MovesSettings, *, boots: bool = False) -> AskedResult:
    """Ask, set aside what is another's, and release or hold back the rest.

    :param boots: whether all are held back until the answer, if none has asked since the boot.
    """
    is_first = boots and _begin()
    before = _held_before()
    specs = [one for one in store.load_all() if isinstance(one, Spec)]
    answers, error = _answers(specs, settings)
    unanswered = [one for one in specs if one.uuid not in answers]
    if unanswered and not error:
        error = BrineError(f"instances of which no answer came in time: {len(unanswered)}")
    held, storage = dict[str, str](), cache(Storage)
    for spec in unanswered:
        is_waiting = before is None or spec.uuid in before
        if is_waiting and (why := why_held(spec, settings.start_unasked, storage)):
            held[spec.uuid] = why
    others = _set_aside(others_among(specs, answers), held)
    _hold_back(held)
    names = {spec.uuid: spec.name for spec in specs}
    told = before or frozenset()
    for uuid in held.keys() - told:
        of_instances.tell(messages.HELD_BACK, names[uuid], reason=held[uuid])
    for uuid in (told & names.keys()) - held.keys():
        if names[uuid] not in others:
            of_instances.tell(messages.RELEASED, names[uuid])
    waited = names.keys() if before is None and not is_first else told
    _go_on(asks_again=bool(error or held), is_released=bool(waited - held.keys()))
    return AskedResult(others, {names[uuid]: why for uuid, why in held.items()}, error)


def _answers(specs: Sequence[Spec], settings: MovesSettings) -> tuple[Answers, BrineError | None]:
    """The answers, and why there is none. A host that is no node of a cluster needs none."""
    try:
        candidates = Candidates.known()
        if candidates and specs:
            if node := noted_node():
                timeout_s = float(settings.ask_timeout)
                return candidates.claims_on(node, specs, timeout_s=timeout_s), None
            hint = "brine instance define --from-config notes it"
            text = "this host has not noted which node it is, so it asks no master candidate"
            warn(text, hint=hint)
    except BrineError as error:
        return {}, error
    except Exception as error:  # nothing may leave all instances held back
        return {}, BrineError(f"the question failed: {type(error).__name__}: {error}")
    return {one.uuid: None for one in specs}, None


def _set_aside(found: Sequence[tuple[Spec, Claim]], held: dict[str, str]) -> dict[str, Claim]:
    """Set instances aside; returns their claims, by name.

    :param held: gets those for which that fails.
    """
    others = {}
    for spec, claim in found:
        if not spec.claim_serial:
            text = f"{spec.name}: is defined here, and is {claim.node}'s in the cluster's"
            warn(f"{text} configuration", hint=f"brine instance undefine {spec.name}")
            continue
        try:
            set_aside(spec.name, spec.uuid, claim)
            others[spec.name] = claim
        except BrineError as error:
            held[spec.uuid] = f"it is {claim.node}'s, and can't be set aside: {error}"
    return others


def _begin() -> bool:
    """Hold all instances back, if none has asked since the boot; returns whether that is so."""
    try:
        with paths.UNASKED_FILE.open("x"):
            return True
    except FileExistsError:
        return False
    except OSError as error:  # then nothing can be held back
        warn(f"{paths.UNASKED_FILE}: {error.strerror}")
        return False


def _held_before() -> frozenset[str] | None:
    """The UUIDs of the instances that are held back by an earlier question; None are all."""
    try:
        return frozenset(json.loads(paths.UNASKED_FILE.read_bytes()).keys())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def _hold_back(held: Mapping[str, str]) -> None:
    """Replace what is held back, in one step. The file stays: it tells that this node has asked."""
    if not held and not paths.UNASKED_FILE.exists():
        return
    try:
        data = json.dumps(held).encode() + b"\n"
        write_whole(paths.UNASKED_FILE, data, mode=0o644, durable=False)
    except OSError as error:
        if not held:
            with suppress(OSError):
                paths.UNASKED_FILE.unlink()
                return
        raise BrineError(f"{paths.UNASKED_FILE}: {error.strerror}") from error


def _go_on(*, asks_again: bool, is_released: bool) -> None:
    """Have the timer ask again, or no more, and systemd start what was held back: the start of all
    instances when the node boots comes after the first question only. One that is underway has
    passed by what was held back, and would be all that a further start gets: it begins anew."""
    jobs = [("start" if asks_again else "stop", TIMER)]
    jobs += [("restart", START_ALL)] * is_released
    for verb, unit in jobs:
        command = ["systemctl", "--quiet", "--no-block", verb, "--", unit]
        with suppress(OSError):  # without systemd, none runs
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
            )


def ask(arguments: argparse.Namespace) -> int:
    log_to_journal("brine")
    with ExitStack() as stack:
        try:
            stack.enter_context(node_lock(_LOCK, timeout_s=_LOCK_S))
        except LockedError:
            raise
        except LockError as error:  # nothing may leave all instances held back
            warn(str(error))
        found = ask_whose(settings_or_defaults(), boots=arguments.boot)
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
