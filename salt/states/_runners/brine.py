"""
The nodes of the cluster, from the Salt master
==============================================

::

    salt-run brine.list
    salt-run brine.find web1
    salt-run brine.health
    salt-run brine.metrics
    salt-run brine.record
    salt-run brine.redistribute
    salt-run brine.redistribute test=True
    salt-run brine.rotate_key
    salt-run brine.cpu_baseline
    salt-run brine.cpu_baseline test=True
    salt-run brine.migrate web1 to=node2
    salt-run brine.migrate web1 to=node2 test=True
    salt-run brine.drain kvm1
    salt-run brine.fill kvm1
    salt-run brine.undrain kvm1
    salt-run brine.reboot 'kvm*' upgrade=True test=True
    salt-run brine.reboot 'kvm*' upgrade=True

These run on the master, whose host has the cluster's configuration. A minion is the node whose name
is its id, where either may be the short one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import fcntl
import fnmatch
import functools
import hashlib
import json
import logging
import math
import os
import re
import subprocess
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    __context__: dict[str, Any] = {}
    __opts__: dict[str, Any] = {}
    __jid_event__: Any = None
    __salt__: dict[str, Callable[..., Any]] = {}

__func_alias__ = {"list_": "list"}

Result = dict[str, Any]

_TIMEOUT_S = 60
_SALT_TIMEOUT_S = 5  # its own default
_LONGEST_SAID = 300
# A node that is just applying states is asked again after the first of these, then each time after
# twice as long, up to the second. A first run installs packages, and takes minutes.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0
_BUSY_TIMEOUT_S = 900.0
_GOING = ("running", "starting", "stopping")
# A node that reboots is looked at so often, and asked again after a minute.
_BOOT_PAUSE_S, _ASK_AGAIN_S = 5.0, 60.0
# What a minion answers that applies states just now, or has a job of several functions: then Salt,
# as of 3008.5, fails at the list of these when it looks for runs of states.
_BUSY = "is running as PID"
_BUSY_WITH_SEVERAL = "expected str, bytes or os.PathLike object, not list"
# A minion looks for so long whether a step has ended, then it answers how far it is.
_STEP_WAIT_S = 5.0
# After so long without an answer of a node, a move that can go back does so; others stay pending.
_PATIENCE_S = 300.0
# For so long a daemon may take to answer from a configuration that it has got.
_DAEMON_S = 10.0
# For so long a move waits for another redistribution, and for a node that applies states just now,
# before it says so, and tries again.
_PUBLISH_S = 30.0
_LOCK_PAUSE_S = 0.1
_PENDING = ("begun", "undoing", "committed")
# How the lines of a command's failure begin that count; others are warnings.
_SAID = ("brine: error: ", "brine: hint: ")

log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """The fault, in one line."""


class _Together:
    """What the moves of one drain, or of one fill, have in common.

    :ivar spent: the names of steps that all patience was spent on, and that go forward only. Such a
        step of another move is not waited for again.
    :ivar given: by node, the serial of a configuration that one of the moves has given it.
    """

    def __init__(self) -> None:
        self.spent: set[str] = set()
        self.given: dict[str, int] = {}


def list_(timeout: int | None = None) -> Result:
    """
    List the instances of all nodes, with their states.

    :param timeout: how long a minion may take to say that it is there, in seconds.

    CLI Example::

        salt-run brine.list
    """
    try:
        found = _instances(timeout)
    except _RefusedError as error:
        return _ended(False, str(error))
    return {
        node: {one["name"]: one["status"] for one in answer} if _are_instances(answer) else answer
        for node, answer in found.items()
    }


def find(instance: str, timeout: int | None = None) -> Result:
    """
    Find the nodes that have an instance.

    :param instance: its name, or the name's first part, or its UUID.
    :param timeout: how long a minion may take to say that it is there, in seconds.

    Returns ``nodes``, for each what it knows of the instance, and ``unknown``: the nodes that have
    not answered, or failed, and why.

    CLI Example::

        salt-run brine.find web1
    """
    instance = str(instance)  # Salt makes a number of 100
    try:
        found = _instances(timeout)
    except _RefusedError as error:
        return _ended(False, str(error))
    keys = ("name", "uuid", "status", "admin_state", "admin_state_source")
    nodes = {
        node: {key: one.get(key) for key in keys}
        for node, answer in found.items()
        for one in (answer if _are_instances(answer) else [])
        if instance in (one["name"], one["name"].partition(".")[0], one.get("uuid"))
    }
    unknown = {node: answer for node, answer in found.items() if not _are_instances(answer)}
    comment = f"{instance} is on {', '.join(nodes)}" if nodes else f"no node has {instance}"
    return _ended(bool(nodes), comment, nodes=nodes, unknown=unknown)


def health(timeout: int | None = None) -> Result:
    """
    Look whether all nodes answer, and have what the configuration says.

    :param timeout: how long a minion may take to say that it is there, in seconds.

    Returns ``nodes``: for each its version of Brine, the serial of its configuration if it has one,
    its instances by state, the names of those that are not in the cluster's configuration, and the
    events that are not recorded yet. ``not_answered`` and ``offline`` are names of nodes; so is
    ``stale``, with what ``brine.redistribute`` would change there, or why that is not known, and
    with a serial that this host does not have. It fails if one is not well.

    CLI Example::

        salt-run brine.health
    """
    try:
        nodes = _nodes()
        # This comes first: it waits for nodes that are just becoming so.
        would = _redistributed("brine", nodes, nodes, test=True, timeout=timeout).get("nodes", {})
        newest, in_cluster = _serial(), {*_config("/instances")}
        answers = _execute("brine.health", would, [], timeout=timeout)
    except _RefusedError as error:
        return _ended(False, str(error))
    told: dict[str, Result] = {}
    faults: dict[str, list[str]] = {}
    for name, answer in sorted(answers.items()):
        grains = answer.get("grains") if isinstance(answer, dict) else None
        grains = grains if isinstance(grains, dict) else {}
        instances, events, serial = (
            _said(answer, key) for key in ("instances", "outbox", "serial")
        )
        parts = grains.get("parts")
        faults[name] = []
        # A node that is to run no instances lacks the command that lists them.
        lacks_list = isinstance(parts, list) and "instance" not in parts
        if not _are_instances(instances) and not lacks_list:
            faults[name].append(f"its instances are not known: {_printable(instances)}")
        if not isinstance(events, list):
            faults[name].append(f"its outbox is not known: {_printable(events)}")
        known = instances if _are_instances(instances) else []
        states = [one["status"] for one in known]
        told[name] = {
            "version": grains.get("version") or "",
            "serial": serial if isinstance(serial, int) else None,
            "instances": {state: states.count(state) for state in sorted(set(states))},
            "not_in_configuration": [
                one["name"] for one in known if one.get("uuid") not in in_cluster
            ],
            "not_recorded": len(events) if isinstance(events, list) else 0,
        }
    for name in told:
        faults[name] += would[name]["failed"] or would[name]["changed"]
    for name, one in told.items():
        if one["serial"] not in (None, newest):
            faults[name].append(f"serial {one['serial']}; this host has {newest}")
    stale = {name: lines for name, lines in faults.items() if lines}
    silent = sorted(name for name in nodes if name not in answers and not nodes[name])
    away = sorted(name for name in nodes if name not in answers and nodes[name])
    comment = f"{len(told)} of {len(nodes)} nodes answer, and {len(stale)} of these are stale"
    is_well = not (silent or stale)
    return _ended(is_well, comment, nodes=told, not_answered=silent, offline=away, stale=stale)


def metrics(textfile: str = "", timeout: int | None = None) -> str | Result:
    """
    Print figures of the cluster for Prometheus, in the text format of OpenMetrics: which nodes are
    away, whose serial is another than this host's, and the instances of all by status. What a node
    knows of itself, its own ``brine metrics`` prints.

    :param textfile: a file to put them in, in one step, such as
        ``/var/lib/prometheus/node-exporter/brine-cluster.prom``.
    :param timeout: how long a minion may take to say that it is there, in seconds.

    CLI Example::

        salt-run --out=newline_values_only brine.metrics
        salt-run brine.metrics textfile=/var/lib/prometheus/node-exporter/brine-cluster.prom
    """
    try:
        nodes, newest = _nodes(), _serial()
        answers = _execute("brine.health", nodes, [], timeout=timeout)
    except _RefusedError as error:
        return _ended(False, str(error))
    text = "".join(f"{line}\n" for line in _metric_lines(nodes, newest, answers))
    if not textfile:
        return text
    temporary = os.path.join(os.path.dirname(textfile), f".{os.path.basename(textfile)}.new")
    try:
        # The folder may be another user's, who must not have a link of theirs followed.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o644), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
        os.replace(temporary, textfile)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return _ended(False, f"{textfile}: can't be written: {error.strerror}")
    return _ended(True, f"written: {textfile}")


def _metric_lines(
    nodes: Mapping[str, bool], newest: int, answers: Mapping[str, Any]
) -> Iterator[str]:
    """The lines of the text: what of a node is not known is absent."""
    serials = {name: _said(answers[name], "serial") for name in sorted(answers)}
    serials = {name: one for name, one in serials.items() if type(one) is int}
    statuses: dict[tuple[str, str], int] = {}
    for name, answer in sorted(answers.items()):
        found = _said(answer, "instances")
        for one in found if _are_instances(found) else []:
            key = (name, one["status"])
            statuses[key] = statuses.get(key, 0) + 1
    away = sum(name not in answers and not nodes[name] for name in nodes)
    apart = sum(one != newest for one in serials.values())
    yield from _metric("nodes", "Nodes in the configuration.", {(): len(nodes)})
    about = "Whether a node answers; of one that is marked as offline 0, too."
    rows = {(name,): int(name in answers) for name in sorted(nodes)}
    yield from _metric("node_answers", about, rows, "node")
    yield from _metric("nodes_away", "Nodes that do not answer, and should.", {(): away})
    yield from _metric("serial", "The serial number of this host's configuration.", {(): newest})
    rows = {(name,): one for name, one in serials.items()}
    about = "The serial number of the configuration of each node that has one."
    yield from _metric("node_serial", about, rows, "node")
    about = "Nodes whose serial number is another than this host's."
    yield from _metric("serials_apart", about, {(): apart})
    about = "Instances of each node by status."
    yield from _metric("instances", about, statuses, "node", "status")
    yield "# EOF"


def _metric(name: str, about: str, values: Mapping[Any, int], *labels: str) -> Iterator[str]:
    """A gauge in the text format of OpenMetrics; each value is of so many words as there are
    labels."""
    name = f"brine_cluster_{name}"
    if values:
        yield f"# TYPE {name} gauge"
        yield f"# HELP {name} {about}"
    for words, value in values.items():
        escaped = (
            word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for word in words
        )
        pairs = zip(labels, escaped, strict=True)
        inner = ",".join(f'{label}="{word}"' for label, word in pairs)
        yield f"{name}{{{inner}}} {value}" if inner else f"{name} {value}"


def _said(answer: Any, key: str) -> Any:
    """What a node's ``brine`` has printed, or why it has not."""
    part = answer.get(key) if isinstance(answer, dict) else answer
    return part.get("said", part.get("refused")) if isinstance(part, dict) else part


def record(minion: str | None = None, timeout: int | None = None) -> Result:
    """
    Record what the outbox of a node tells, or of all nodes, in the cluster's configuration.

    The reactor ``brine/reactor/recorded.sls`` calls this for each event of the beacon. The node's
    minion itself is asked, as Salt lets any minion send any event. This host, which has to be the
    cluster's master, writes the configuration. Then the node, and the master candidates, get their
    new one. Once the node has it, what is recorded is acknowledged; what is refused stays in the
    outbox.

    One call works at a time, and also does what others leave to it meanwhile. If it is killed, or a
    minion is away, the beacon's next event has it done. Nodes that were to get the new
    configuration and have not, get it in the next call, whichever node that is of.

    :param minion: of the node.
    :param timeout: how long a minion may take to say that it is there, in seconds.

    Returns ``nodes``, for each how many events were ``recorded``, and why others were ``refused``;
    and ``not_redistributed``, the nodes that have not got the new configuration, and why. If there
    are any, it fails.

    CLI Example::

        salt-run brine.record
        salt-run brine.record node1.example.com
    """
    told: dict[str, Result] = {}
    recorded: dict[str, list[str]] = {}
    undone: dict[str, str] = {}
    try:
        nodes = _nodes()
        chosen = [name for name in nodes if minion is None or _is_same(name, str(minion))]
        if not chosen:
            raise _RefusedError(f"{_printable(minion)} is no node of the cluster")
        _put("record", chosen)
        for names, _ in _taken("record"):
            _expect_master()
            told.update(_record(names, recorded, timeout))
        for names, left in _taken("redistribute"):
            nodes = _nodes()
            concerned = [name for name in nodes if name in names]
            failed = _undone(_redistributed("brine.confd", concerned, nodes, timeout=timeout))
            undone = {name: why for name, why in undone.items() if name not in names} | failed
            left.extend(failed)
            # Until then, the node's own record of what its user wants is the only one it goes by.
            for name in [name for name in concerned if name in recorded and name not in failed]:
                events = recorded.pop(name)
                _execute("brine.outbox_acknowledge", [name], events, timeout=timeout)
    except _RefusedError as error:
        log.error("brine.record: %s", error)
        return _ended(False, str(error))
    count = sum(one["recorded"] for one in told.values())
    many = "1 event is" if count == 1 else f"{count} events are"
    comment = f"{many} recorded" if told else "another call of brine.record does this now"
    for name, reason in undone.items():
        log.error("brine.record: %s is not as the configuration says: %s", name, _printable(reason))
    return _ended(not undone, comment, nodes=told, not_redistributed=undone)


def redistribute(
    test: bool = False, if_changed: bool = False, timeout: int | None = None
) -> Result:
    """
    Apply the states ``brine`` on all nodes of the cluster, this host's first: what the external
    pillar gives them is put in place.

    The reactor ``brine/reactor/changed.sls`` calls this with ``if_changed=True`` when a minion says
    that it has changed the configuration. Salt lets any minion send any event; so the configuration
    itself is looked at, and nothing is done while its serial is that of the last redistribution.

    One call works at a time. A node that is just applying states is waited for.

    :param test: only say what would change.
    :param if_changed: do nothing if all nodes were given this configuration already, and leave it
        to another call that is at work, which looks for changes before it ends. This host's node is
        left out, as its own run has changed the configuration, but not if no redistribution is
        known.
    :param timeout: how long a minion may take to say that it is there, in seconds.

    Returns ``nodes``, for each what changed and what failed, the ``serial`` that they were given,
    and the names of those that have ``not_answered`` and of those that are ``offline`` in the
    configuration and have not answered. The next run of their states has these catch up.

    CLI Example::

        salt-run brine.redistribute
    """
    try:
        nodes = _nodes()
        if test:
            return _redistributed("brine", nodes, nodes, test=True, timeout=timeout)
        told = None
        if not if_changed:
            with _locked("redistribution", waits_s=math.inf):
                told = _redistributed("brine", nodes, nodes, timeout=timeout)
                _note_given(told["serial"])
        return _changes_redistributed(timeout) or told or _ended(True, "all is distributed already")
    except _RefusedError as error:
        log.error("brine.redistribute: %s", error)
        return _ended(False, str(error))


def rotate_key(timeout: int | None = None) -> Result:
    """
    Replace the key of the configuration daemon, while all requests are answered.

    The key is in ``/etc/brine/salt/keys.json`` on the master, and the external pillar ``brine``
    gives it to the nodes. First all nodes accept a new key besides the old one; then the new one
    signs; then the old one goes. Each step waits until all nodes have confirmed the one before. If
    some have not, they are named, and nothing more is done. Run it again then: it continues with
    the step that it had begun, also after it was killed.

    The first run takes over this host's key, ``/etc/brine/hmac.key``, or makes the first key of the
    cluster. A node that is offline in the configuration is not waited for: it gets the key of that
    time by its next highstate.

    :param timeout: how long a minion may take to say that it is there, in seconds.

    CLI Example::

        salt-run brine.rotate_key
    """
    try:
        with _locked("rotation"):
            return _rotate(timeout)
    except BlockingIOError:
        return _ended(False, "another brine.rotate_key is at work")
    except _RefusedError as error:
        return _ended(False, str(error))
    except OSError as error:
        return _ended(False, f"{error.filename}: {error.strerror}; nothing more was done")


def cpu_baseline(
    group: str | None = None, test: bool = False, timeout: int | None = None
) -> Result:
    """
    Find a processor that all nodes of a group can give a guest, and make it the cluster's default:
    ``cpu_type`` of the ``hvparams`` of KVM. A guest that has it can move live between these nodes.

    The nodes say what QEMU can do there, and ``brine config cpu-baseline``, of the package
    brine-cluster, computes the rest. What is written is then redistributed, as by
    ``brine.redistribute``. It counts for instances that have no ``cpu_type`` of their own, and
    from their next start on. If a node has not answered, or has no processor in common with the
    others, nothing is written.

    :param group: its name; all nodes of the cluster if there is none.
    :param test: only say what would be written.
    :param timeout: how long a minion may take to say that it is there, in seconds.

    Returns ``cpu_type`` and the one ``before``, if there was one; ``lacking``, by node the flags
    that no guest gets because this node lacks them; ``own``, the instances with one of their own;
    ``other_nodes``, those of other groups, whose guests get the default, too; ``not_answered``,
    ``offline`` (in the configuration, and did not answer) and, by node, why it has ``failed``.

    CLI Example::

        salt-run brine.cpu_baseline test=True
        salt-run brine.cpu_baseline default
    """
    try:
        nodes, others = _nodes_of(group)
        answers = _execute("brine.node_cpu", nodes, [], timeout=timeout)
        silent = sorted(name for name in nodes if name not in answers and not nodes[name])
        away = sorted(name for name in nodes if name not in answers and nodes[name])
        wrong = {
            name: _printable(one) for name, one in answers.items() if not isinstance(one, dict)
        }
        if silent or wrong or not answers:
            reasons = {**dict.fromkeys(silent, "has not answered"), **wrong}
            named = (
                "; ".join(f"{name}: {why}" for name, why in reasons.items()) or "no node answers"
            )
            comment = f"nothing was changed, as processors are not known: {named}"
            more = {"not_answered": silent, "offline": away, "failed": wrong}
            return _ended(False, comment, **more)
        found = _baseline(answers)
        told = {"cpu_type": found["cpu_type"], "before": _cpu_type(), "lacking": found["lacking"]}
        told |= {"own": _with_own_cpu(nodes), "other_nodes": others, "offline": away}
        if told["before"] == told["cpu_type"]:
            return _ended(True, "the cluster's cpu_type is that already", **told)
        _refuse_declared_cpu(found["cpu_type"])
        if test:
            return _ended(True, "the cluster's cpu_type would change", **told)
        _expect_master()
        _brine("config", "apply", "-", "--json", stdin=json.dumps(found["declaration"]))
        return {key: one for key, one in told.items() if one} | redistribute(timeout=timeout)
    except _RefusedError as error:
        return _ended(False, str(error))


def migrate(
    instance: str,
    to: str | None = None,
    cold: bool = False,
    test: bool = False,
    auto_converge: bool = False,
    max_downtime: int | None = None,
    rate: int | None = None,
    plaintext: bool = False,
    patience: float | None = None,
    timeout: int | None = None,
    display_progress: bool = False,
) -> Result:
    """
    Move an instance to another node: live if it runs, else with its volumes as they are.

    The move is an operation of this host, the cluster's master. If this call is killed, the same
    call goes on with it, and so does ``brine operations resume ID``. A node that does not answer is
    asked again and again. After *patience* the move goes back if it can; otherwise it stays
    pending.

    :param instance: its name, or the name's first part, or its UUID.
    :param to: the node; by default the one with most free memory that nothing keeps it from.
    :param cold: stop a guest that runs, and start it on the other node.
    :param test: only say what keeps it from moving; nothing changes.
    :param auto_converge: slow a guest down that changes its memory faster than it can be sent.
    :param max_downtime: how long the guest may stand still, in milliseconds.
    :param rate: how much is sent at most, in bytes a second.
    :param plaintext: send memory and disks without encryption.
    :param patience: how long a node may be silent, in seconds; 300 by default.
    :param timeout: how long a minion may take to say that it is there, in seconds.
    :param display_progress: print how far it is, as Salt's events.

    Returns the ``instance``, its ``source`` and its ``target``; ``obstacles``, each in a line; the
    ``operation`` of a move that stays pending; and ``notes`` about what else the user should know.

    CLI Example::

        salt-run brine.migrate web1 to=node2 test=True
        salt-run brine.migrate web1 to=node2
        salt-run brine.migrate web1 cold=True
    """
    wishes = {"auto_converge": auto_converge, "max_downtime_ms": max_downtime}
    wishes |= {"rate": rate, "plaintext": plaintext}
    told = _migrate(
        str(instance),  # Salt makes a number of 100
        None if to is None else str(to),
        cold,
        wishes=wishes,
        test=test,
        patience_s=_PATIENCE_S if patience is None else float(patience),
        timeout=timeout,
        tell=_teller(display_progress),
    )
    result, comment = told.pop("result"), told.pop("comment")
    return _ended(result, comment, **told)


def resume(
    operation: str,
    abort: bool = False,
    patience: float | None = None,
    timeout: int | None = None,
    display_progress: bool = False,
) -> Result:
    """
    Go on with a move that is pending, as after its ``salt-run brine.migrate`` was killed. A reboot
    of nodes goes on as by ``salt-run brine.reboot``.

    :param operation: its id, as ``brine operations list`` shows it.
    :param abort: have it go back, if it can, and carry that out; a reboot is forgotten.
    :param patience: how long a node may be silent, in seconds; 300 by default.
    :param timeout: how long a minion may take to say that it is there, in seconds.
    :param display_progress: print how far it is, as Salt's events.

    Returns what ``brine.migrate`` or ``brine.reboot`` does; with *abort*, it succeeds if the move
    is undone. Of a move that another call has ended, ``node`` is where the instance is, and decides
    that.

    CLI Example::

        salt-run brine.resume 01764000000000000000-0123abcd
    """
    try:
        _expect_master()
        pending = _brine("operations", "list", "--json")
        if any(one["id"] == str(operation) and one["kind"] == "reboot" for one in pending):
            return reboot(abort=abort, timeout=timeout, display_progress=display_progress)
        patience_s = _PATIENCE_S if patience is None else float(patience)
        tell = _teller(display_progress)
        status = _move("next", str(operation))
        is_last = (
            abort and status["state"] == "undoing" and (status["step"] or {}).get("step") == "drop"
        )
        if abort and not is_last:
            status = _move("abort", str(operation))
        told = _carried(status, 0.0 if is_last else patience_s, timeout, tell)
        if is_last and told.get("operation"):
            told = _ending(_move("abort", str(operation)))
            left = f"{status['target']} has not dropped its part: what it made may be left there"
            told["notes"] = [left]
    except _RefusedError as error:
        return _ended(False, str(error))
    result, comment = told.pop("result"), told.pop("comment")
    is_back = told["state"] == "undone" or ("node" in told and not result)
    return _ended(is_back if abort else result, comment, **told)


# Moves.


def _teller(is_shown: bool) -> Callable[[str], None]:
    """What gets lines about how far it is: ``salt-run``, which prints them, or else the log."""
    return _tell if is_shown else log.info


def _tell(line: str) -> None:
    if __jid_event__:
        __jid_event__.fire_event({"message": line}, "progress")


def _migrate(
    name: str,
    to: str | None = None,
    cold: bool = False,
    *,
    wishes: Mapping[str, Any] | None = None,
    test: bool = False,
    patience_s: float = _PATIENCE_S,
    timeout: int | None = None,
    tell: Callable[[str], None] = log.info,
    locks: bool = True,
    together: _Together | None = None,
) -> Result:
    """Move an instance, and wait for that. It sets no return code, and raises nothing that a node
    or a command causes; several threads may call it at the same time, each in a copy of the
    caller's context (contextvars), which has Salt's functions.

    :param to: a node's name; None chooses one.
    :param wishes: ``auto_converge``, ``max_downtime_ms``, ``rate``, ``plaintext``.
    :param test: only look for obstacles.
    :param patience_s: how long a node may be silent before the move goes back, or is left pending.
    :param tell: gets a line now and then, about how far it is.
    :param locks: take the instance's lock, and share the nodes', if ``brine-lockd`` has them; a
        caller that has one of them says no.
    :param together: of a drain or a fill, which has asked before whether nodes can move.

    Returns ``result`` (True: it is on its node, or could move), ``comment`` (one line), and where
    it applies ``instance``, ``source``, ``target`` (names), ``obstacles`` (lines), ``operation``
    (the id of a move that is still pending), ``state`` (``done``, ``undone``, ``ended``, or that of
    the pending one) and ``notes`` (lines).
    """
    known: Result = {"instance": name}
    identity = ""
    try:
        _expect_master()
        found = _instance_of(name)
        known |= {"instance": found["name"], "source": found["node"]}
        pending = _pending_move(found["name"])
        if pending and to is None:
            to = pending["facts"]["target"]
        if not pending and to is not None and _is_same(found["node"], to):
            return {"result": True, "comment": f"{found['name']} is on {found['node']}", **known}
        if to is None or test:
            to, obstacles = _place_of(found, to, cold, timeout)
            if test or not to:
                return _could_move(found, to, obstacles, known)
        known |= {"target": to}
        if not pending and together is None:
            _expect_mover(to, timeout)
        # A drain and a fill have it: what they move has its home where it was.
        flags = {"--cold": cold, "--keeps-home": together is not None}
        begin = ["begin", found["name"], "--to", to, *(key for key, one in flags.items() if one)]
        given = {key: one for key, one in (wishes or {}).items() if one not in (None, False)}
        identity = _move(*begin, "--wishes", json.dumps(given))["id"]
        status = _move("next", identity)

        def tell_wait(line: str) -> None:
            if status["step"]:  # the move's record shows it
                _move("answer", stdin=json.dumps(_own_answer(status["step"], line)[0]))
            tell(line)

        with _cluster_locks(
            found["name"], [found["node"], to], tell_wait, locks, patience_s
        ) as note:
            told = _carried(_move("next", identity), patience_s, timeout, tell, together)
        notes = [*told.pop("notes", []), *([note] if note else [])]
        return {**known, **told, **({"notes": notes} if notes else {})}
    except _RefusedError as error:
        known |= {"operation": identity} if identity else {}
        return {"result": False, "comment": str(error), **known}


def _expect_mover(node: str, timeout: int | None) -> None:
    """Refuse a target that says that it can't take part in moves. One that is silent may answer
    later."""
    answer = _execute("brine.ask", [node], ["move", "list"], timeout=timeout).get(node)
    if isinstance(answer, str) or (isinstance(answer, dict) and "said" not in answer):
        why = answer if isinstance(answer, str) else answer.get("refused")
        raise _RefusedError(f"{node} takes part in no moves: {_printable(why)}")


def _could_move(found: Result, target: str, obstacles: list[str], known: Result) -> Result:
    """What test mode says."""
    name, where = found["name"], target or "any other node"
    known = {**known, "target": target}
    if obstacles:
        known = {**known, "obstacles": obstacles}
        text = f"{name} can't move to {where}: {'; '.join(obstacles)}"
        return {"result": False, "comment": text, **known}
    return {"result": True, "comment": f"{name} could move to {where}", **known}


def _move(*command: str, stdin: str = "") -> Result:
    """The answer of one of the master's commands of moves."""
    try:
        return _brine("move", *command, "--json", stdin=stdin)  # type: ignore[no-any-return]
    except _RefusedError:
        if "cluster" not in _brine("--version", "--json")["parts"]:
            raise _RefusedError("this host lacks the package brine-cluster: install it") from None
        raise


def _pending_move(name: str) -> Result | None:
    """The recorded operation that moves an instance."""
    for one in _brine("operations", "list", "--json"):
        if one["kind"] == "move" and _is_named(one["facts"].get("instance"), name):
            return one  # type: ignore[no-any-return]
    return None


def _is_named(whole: Any, name: str) -> bool:
    return isinstance(whole, str) and name in (whole, whole.partition(".")[0])


def _instance_of(name: str) -> Result:
    """The ``name``, ``uuid`` and ``node`` of an instance of the configuration."""
    instances, nodes = _config("/instances"), _config("/nodes")
    found = [
        {"name": one["name"], "uuid": uuid, "node": nodes[one["primary_node"]]["name"]}
        for uuid, one in instances.items()
        if name == uuid or _is_named(one["name"], name)
    ]
    whole = [one for one in found if name in (one["name"], one["uuid"])]
    if len(whole or found) != 1:
        text = (
            "is the short name of several instances" if found else "is no instance of the cluster"
        )
        raise _RefusedError(f"{_printable(name)} {text}")
    return (whole or found)[0]


def _place_of(
    found: Result, to: str | None, cold: bool, timeout: int | None
) -> tuple[str, list[str]]:
    """The node that an instance is to move to, and what keeps it from that. If none is named, it
    is the one with most free memory among those that nothing keeps it from; empty if there is
    none."""
    nodes = {one["name"]: one for one in _all_nodes()}
    source = found["node"]
    if to is not None:
        named = [name for name in nodes if _is_same(name, to)]
        if len(named) != 1:
            raise _RefusedError(f"{_printable(to)} is no node of the cluster")
    else:
        named = [name for name, one in nodes.items() if name != source and not _why_not(one)]
    offer = _execute(
        "brine.move_offer", [source], [], timeout=timeout, name=found["name"], cold=cold
    )
    said = offer.get(source, f"{source} has not answered")
    if not isinstance(said, dict) or "obstacles" in said:
        lines = said["obstacles"] if isinstance(said, dict) else [_printable(said)]
        return (named[0] if to is not None else ""), [f"{source}: {one}" for one in lines]
    # A node in bad hands could offer what root of another one must not run.
    if fault := _move("compare", found["name"], stdin=json.dumps(said))["fault"]:
        return (named[0] if to is not None else ""), [f"{source}: {_printable(fault)}"]
    answers = _execute("brine.move_check", named, [], timeout=timeout, offer=said)
    reasons = {}
    for name in named:
        one = answers.get(name, "it has not answered")
        is_known = isinstance(one, dict) and isinstance(one.get("obstacles"), list)
        lines = (
            [str(each.get("why")) for each in one["obstacles"]] if is_known else [_printable(one)]
        )
        why = _why_not(nodes[name])
        reasons[name] = [f"{name}: {line}" for line in ([why] if why else []) + lines]
    if to is not None:
        return named[0], reasons[named[0]]
    fit = [name for name in named if not reasons[name]]
    if not fit:
        return "", [line for one in reasons.values() for line in one] or ["there is no other node"]
    facts = _execute("brine.node_facts", fit, [], timeout=timeout)
    return max(fit, key=lambda name: (_free_mib(facts.get(name)), name)), []


def _why_not(node: Mapping[str, Any]) -> str:
    """Why a node takes no instance; empty if it does."""
    if node.get("offline"):
        return "it is offline in the configuration"
    if node.get("drained"):
        return "it is drained"
    return "" if node.get("vm_capable", True) else "it runs no instances (vm_capable is false)"


def _free_mib(facts: Any) -> int:
    free = facts.get("memory_available_mib") if isinstance(facts, dict) else None
    return free if isinstance(free, int) else -1


@contextlib.contextmanager
def _cluster_locks(
    name: str,
    nodes: Collection[str],
    tell: Callable[[str], None],
    are_wanted: bool,
    patience_s: float,
) -> Iterator[str]:
    """Have the lock of an instance, and share those of nodes, for the time of the block; yields a
    note if ``brine-lockd`` does not grant them in *patience_s* seconds, each. Nothing rests on
    them: they keep other work from waiting for this."""
    if not are_wanted:
        yield ""
        return
    purpose = ["--timeout", f"{max(0.0, patience_s):g}", "--purpose", f"move of {name}", "--"]
    shared = [word for node in nodes for word in ("--node", node)]
    command = ["brine", "lock", "run", "--instance", name, *purpose]
    command += ["brine", "lock", "run", "--shared", *shared, *purpose]
    # It holds them until this process ends, however that happens.
    command += ["sh", "-c", "echo held; exec cat"]
    pipe = subprocess.PIPE
    try:
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
    except OSError as error:
        yield f"moved without locks: brine can't be run: {error}"
        return
    with holder:
        said = ""
        assert holder.stdin
        assert holder.stdout
        for line in holder.stdout:
            said = _printable(line.decode(errors="replace").strip())
            if said == "held":
                break
            tell(said)
        try:
            yield "" if said == "held" else f"moved without the locks of brine-lockd: {said}"
        finally:
            holder.stdin.close()


def _carried(
    status: Result,
    patience_s: float,
    timeout: int | None,
    tell: Callable[[str], None],
    together: _Together | None = None,
) -> Result:
    """Carry the questions of a move to nodes, and their answers back, until it has ended."""
    identity, last = status["id"], status
    asked, heard, told = "", time.monotonic(), ""
    together = together or _Together()
    vain = 0
    while status["state"] in _PENDING:
        last, step, began = status, status["step"] or {"id": "", "step": ""}, time.monotonic()
        if step["id"] != asked:
            asked, heard, vain = step["id"], began, 0
        try:
            status, why, is_well = _step_carried(status, _longer(timeout, vain), together)
        except _RefusedError as error:
            why, is_well = _printable(error), False
        line = f"{last['instance']}: {why}" if why else ""
        if line and line != told:
            tell(line)
            log.info("brine.migrate: %s", line)
            told = line
        if status["state"] not in _PENDING or (status["step"] or {}).get("id", "") != asked:
            continue
        vain = 0 if is_well else vain + 1
        if is_well:
            heard = time.monotonic()
        elif time.monotonic() - heard > (0 if step["step"] in together.spent else patience_s):
            if status["state"] != "begun":
                together.spent.add(step["step"])
                return _left(identity, status, why)
            tell(f"{status['instance']}: it goes back")
            try:
                status = _move("abort", identity, "--why", why)
            except _RefusedError as error:
                return _left(identity, status, _printable(error))
            continue
        if vain:
            time.sleep(min(_FIRST_PAUSE_S * 2**vain, _LONGEST_PAUSE_S))
        else:
            time.sleep(max(0.0, began + _FIRST_PAUSE_S - time.monotonic()))
    return _ending_elsewhere(last) if status["state"] == "ended" else _ending(status)


def _longer(timeout: int | None, vain: int) -> int | None:
    """How long a minion gets to answer, after so many questions in vain. A busy one works on each
    question that was asked too early, and is the busier for it."""
    return max(timeout or 0, min(_SALT_TIMEOUT_S * 2**vain, _TIMEOUT_S)) if vain else timeout


def _step_carried(
    status: Result, timeout: int | None, together: _Together
) -> tuple[Result, str, bool]:
    """Carry the question of a move that waits, and the answer. Returns how far the move is, a line
    about it, and whether the step goes on, or has ended: else patience runs out."""
    step = status["step"]
    if not step:
        now = _move("next", status["id"])
        return now, now["waits_for"], False
    answer, line = _asked(step, timeout, together)
    try:
        now = _move("answer", stdin=json.dumps(answer))
    except (_RefusedError, TypeError, ValueError) as error:
        answer, line = _own_answer(step, f"{step['step']}: {step['node']}: {_printable(error)}")
        now = _move("answer", stdin=json.dumps(answer))
    is_faulty = bool(answer["error"] or answer["found"].get("fault"))
    return now, line, answer["state"] == "running" and not is_faulty


def _own_answer(step: Result, why: str, state: str = "running") -> tuple[Result, str]:
    """In place of a node's answer: why there is none. The move's record shows it."""
    known = {"id": step["id"], "step": step["step"], "state": state}
    return {**known, "progress": 0.0, "error": why, "found": {}}, why


def _left(identity: str, status: Result, why: str) -> Result:
    """The move stays pending."""
    way = {"undoing": "it goes back", "committed": "it goes forward"}.get(
        status["state"], "it stays"
    )
    hint = f"brine operations resume {identity}"
    comment = f"{status['instance']}: {way}, and waits: {why}; then: {hint}"
    return {"result": False, "comment": comment, "operation": identity, "state": status["state"]}


def _ending(status: Result) -> Result:
    name, state = status["instance"], status["state"]
    if state == "done":
        return {"result": True, "comment": f"{name} has moved", "state": state}
    comment = f"{name} has not moved: {_printable(status['error'])}"
    return {"result": False, "comment": comment, "state": state}


def _ending_elsewhere(last: Result) -> Result:
    """The ending of a move that another call has carried to its end: the configuration tells it.

    :param last: what was known of the move while it was pending.
    """
    name, target = last["instance"], last["target"]
    if not name:
        comment = f"{last['id']}: no such operation is pending"
        return {"result": False, "comment": comment, "state": "ended"}
    node = _instance_of(name)["node"]
    is_there = node == target
    comment = f"another call has ended the move of {name} to {target}: {name} is on {node}"
    return {"result": is_there, "node": node, "comment": comment, "state": "ended"}


def _asked(step: Result, timeout: int | None, together: _Together) -> tuple[Result, str]:
    """Ask for a step; its answer, and a line about how far it is."""
    node, name = step["node"], step["step"]
    if node == "candidates":
        return _published(step, timeout, together.given)
    question = {"id": step["id"], "step": name, "facts": step["facts"]}
    more = {"question": question, "wait": _STEP_WAIT_S}
    answers = _execute("brine.move_step", [node], [], timeout=timeout, **more)
    answer = answers.get(node)
    if answer is None:
        return _own_answer(step, f"{name}: {node} does not answer; it is asked again")
    if not isinstance(answer, dict):
        # Salt's text, such as that the node lacks the command. What has begun is not given up.
        is_refused = isinstance(answer, str) and name in ("offer", "prepare")
        state = "failed" if is_refused else "running"
        return _own_answer(step, f"{name}: {node}: {_printable(answer)}", state)
    if (answer.get("id"), answer.get("step")) != (step["id"], name):
        return _own_answer(step, f"{name}: {node} answers another step")
    known = answer.get("found")
    found = known if isinstance(known, dict) else {}
    if fault := answer.get("error") or found.get("fault"):
        return answer, f"{name}: {node}: {_printable(fault)}"
    share = answer.get("progress")
    percent = f" {100 * share:.0f} %" if isinstance(share, (int, float)) and share else ""
    return (
        answer,
        f"{name} on {node}:{percent} {_printable(found.get('text') or answer.get('state'))}",
    )


def _published(step: Result, timeout: int | None, given: dict[str, int]) -> tuple[Result, str]:
    """Give the master candidates, and both nodes, the configuration, and ask each candidate's
    daemon where the instance is.

    :param given: the serials that nodes have got by now: moves that end while another one does this
        have it done once for all of them.
    """
    known, facts, serial = _all_nodes(), step["facts"], _serial()  # which has the claim
    nodes = {one["name"]: bool(one.get("offline")) for one in known}
    candidates = {
        one["name"]: one["primary_ip"]
        for one in known
        if one.get("master_candidate") and not one.get("offline")
    }
    concerned = [one for one in nodes if one in (*candidates, facts["source"], facts["target"])]
    undone: dict[str, str] = {}
    try:
        with _locked("redistribution", waits_s=_PUBLISH_S):
            if lacking := [one for one in concerned if given.get(one, -1) < serial]:
                newest = _serial()
                done = _redistributed(
                    "brine.confd", lacking, nodes, timeout=timeout, busy_s=_PUBLISH_S
                )
                undone = _undone(done)
                got = {*done.get("nodes", {})} - {*undone}
                given |= dict.fromkeys(got, newest)
    except BlockingIOError:
        return _own_answer(step, "publish: waiting for another redistribution")
    # Where pillar still has the old node, this host's states fail; it has the configuration.
    wrong = {name: undone[name] for name in candidates if name in undone and not _is_here(name)}
    if "confd" in _brine("--version", "--json")["parts"]:
        until = time.monotonic() + _DAEMON_S
        wrong = _misled(candidates, facts)
        while wrong and time.monotonic() < until:  # a daemon reads its file a moment later
            time.sleep(_FIRST_PAUSE_S)
            wrong = _misled(candidates, facts)
    if wrong:
        for name in wrong:
            given.pop(name, None)
        name, why = min(wrong.items())
        text = f"publish: {name}: {_printable(undone.get(name, why))}; it is asked again"
        return _own_answer(step, text)
    told = [f"; {name}: {_printable(why)}" for name, why in undone.items()]
    answer = {"id": step["id"], "step": step["step"], "state": "done", "progress": 1.0}
    line = f"publish: all candidates answer {facts['target']}{''.join(told)}"
    return {**answer, "error": "", "found": {}}, line


def _misled(candidates: Mapping[str, str], facts: Mapping[str, Any]) -> dict[str, str]:
    """The candidates whose daemons do not answer an instance's new node, and what they answer.

    :param candidates: their addresses, by name.
    """
    wrong = {}
    for name, address in candidates.items():
        query = ["query", "instance-primary-node", facts["instance"], "--peer", address]
        try:
            said = _brine("confd", *query, "--json").get("answer")
        except _RefusedError as error:
            said = str(error)
        if said != facts["target"]:
            wrong[name] = f"its daemon answers: {said}"
    return wrong


def drain(
    node: str,
    to: str | None = None,
    cold: bool = False,
    jobs: int = 4,
    test: bool = False,
    timeout: int | None = None,
    display_progress: bool = False,
) -> Result:
    """
    Empty a node: move all instances that run there to other nodes. It takes nothing new until
    ``brine.fill`` or ``brine.undrain``.

    The configuration has it as ``drained``, and has a record of what was there. A node that is the
    cluster's master is emptied, and not marked. An instance that can't move holds up no other.

    :param node: its name.
    :param to: the node that gets all; otherwise each goes where the most memory is free.
    :param cold: stop instances that can't move live for their move.
    :param jobs: how many instances move at a time.
    :param test: only say what would move where.
    :param timeout: how long a minion may take to say that it is there, in seconds.
    :param display_progress: print how far each move is, as Salt's events.

    Returns ``moved``, by instance the node that has it now; ``failed``, by instance why it is still
    there; ``left``, those that do not run; and ``notes``, in lines. It fails if one runs there
    still.

    CLI Example::

        salt-run brine.drain kvm1 test=True
        salt-run brine.drain kvm1 to=kvm2 cold=True
    """
    question = {"verb": "drain", "nodes": [str(node)], "to": str(to or ""), "jobs": int(jobs)}
    how: Result = {"test": test, "timeout": timeout, "tell": _teller(display_progress)}
    done = functools.partial(_drained, question, cold, how)
    return _verb_done(str(node), done, test)


def fill(
    node: str,
    cold: bool = False,
    jobs: int = 4,
    test: bool = False,
    timeout: int | None = None,
    display_progress: bool = False,
) -> Result:
    """
    Have a node take instances again, and bring those home that ``brine.drain`` has moved away.

    Parameters and returns are as those of ``brine.drain``. What could not come home stays on
    record: run it again.

    CLI Example::

        salt-run brine.fill kvm1
    """
    question = {"verb": "fill", "nodes": [str(node)], "jobs": int(jobs)}
    how: Result = {"test": test, "timeout": timeout, "tell": _teller(display_progress)}
    done = functools.partial(_filled, question, cold, how)
    return _verb_done(str(node), done, test)


def undrain(node: str, timeout: int | None = None) -> Result:
    """
    Have a node take instances again; nothing moves. What a drain has moved away comes home by
    ``brine.fill``; once the node is drained again, it stays where it is.

    CLI Example::

        salt-run brine.undrain kvm1
    """

    def done() -> Result:
        _mark("undrained", [str(node)])
        return {}

    return _verb_done(str(node), done, False)


def reboot(
    nodes: str | list[str] | None = None,
    upgrade: bool = False,
    batch: int = 1,
    cold: bool = False,
    jobs: int = 4,
    test: bool = False,
    abort: bool = False,
    boot_timeout: int = 900,
    check_timeout: int = 300,
    timeout: int | None = None,
    display_progress: bool = False,
) -> Result:
    """
    Reboot nodes one after another, without a reboot of their guests: for each node, move its guests
    to other nodes, upgrade its packages, reboot it, look whether it is well, and bring its guests
    home.

    A node is well when its minion answers after another boot, Brine's daemons are back, no unit has
    failed that had not before, its kernel is the newest one that is installed, and the states
    ``brine`` have given it the configuration. At the first doubt, all stops as it is: the result
    says why. Run it again, without nodes, to go on with the step that it has stopped at; also if it
    was killed, or the master has rebooted. The cluster's master, and nodes that are offline or
    drained, are left out, and named.

    :param nodes: names, or a pattern of names, as ``kvm*``. None goes on with what has begun.
    :param upgrade: upgrade all packages, with ``pkg.upgrade``, before the reboot.
    :param batch: how many nodes at a time, at most; fewer if the others can't hold all guests.
    :param cold: stop instances that can't move live for their move.
    :param jobs: how many instances move at a time.
    :param test: only print the plan; without nodes, of what has begun and is left. Of each batch
        of nodes it has what the drain would return.
    :param abort: forget what has begun. Nodes that are drained stay so: see ``brine.fill``.
    :param boot_timeout: how long a node may take to come back, in seconds.
    :param check_timeout: how long it may take to be well after that, in seconds.
    :param timeout: how long a minion may take to say that it is there, in seconds.
    :param display_progress: print each step, and how far each move is, as Salt's events.

    CLI Example::

        salt-run brine.reboot 'kvm*' upgrade=True test=True
        salt-run brine.reboot 'kvm*' upgrade=True display_progress=True
        salt-run brine.reboot
    """
    try:
        left_out: list[str] = []
        with contextlib.nullcontext() if test else _locked("reboot"):
            if abort:
                if test:
                    raise _RefusedError("abort has no test mode: nothing was changed")
                _reboot_step("abort")
                return _ended(True, "no reboot is pending any more")
            now = _reboot_step("next")
            if test and now["step"] and not nodes:
                return _reboot_plan(now["left"], [], now["wanted"]["batch"], timeout)
            if nodes or not now["step"]:
                begun = now["wanted"]["nodes"] if now["step"] else []
                names, left_out = _to_reboot(nodes, begun)
                if test:
                    return _reboot_plan(names, left_out, int(batch), timeout)
                if now["step"] and now["wanted"]["nodes"] != names:
                    text = f"a reboot of {', '.join(now['wanted']['nodes'])} is pending"
                    raise _RefusedError(f"{text}: brine.reboot without nodes goes on with it")
                if not now["step"]:
                    wanted = {"nodes": names, "batch": int(batch), "upgrade": bool(upgrade)}
                    wanted |= {"cold": bool(cold), "jobs": int(jobs)}
                    now = _reboot_step("begin", wanted)
            known: Result = {"timeout": timeout, "tell": _teller(display_progress)}
            known |= {"boot_timeout_s": int(boot_timeout), "check_timeout_s": int(check_timeout)}
            return _rebooted(now, known, left_out)
    except BlockingIOError:
        return _ended(False, "another brine.reboot is at work")
    except _RefusedError as error:
        return _ended(False, str(error))


# Nodes that are emptied and filled. brine-cluster decides; this asks the nodes.


def _verb_done(node: str, done: Callable[[], Result], test: bool) -> Result:
    try:
        _expect_master()
        told = done()
        undone = {} if test else _undone(_changes_redistributed(None) or {})
        for name, reason in undone.items():
            text = "%s is not as the configuration says: %s"
            log.error(text, name, _printable(reason))
    except _RefusedError as error:
        return _ended(False, str(error))
    moved, failed = told.get("moved", {}), told.get("failed", {})
    count = "1 instance" if len(moved) == 1 else f"{len(moved)} instances"
    done_so = "would move" if test else "has moved" if len(moved) == 1 else "have moved"
    comment = f"{node}: {count} {done_so}"
    comment = comment if "moved" in told else f"{node} takes instances again"
    comment += f", and {len(failed)} can't" if failed else ""
    return _ended(not failed, comment, **told, not_redistributed=undone)


def _drained(question: Result, cold: bool, how: Result) -> Result:
    """:param how: ``test``, ``timeout`` and ``tell``, as for :func:`_migrate`; so those below."""
    plan = _plan(question, how["timeout"])
    if not how["test"]:
        _mark_leaving(plan)
        # One may have come before the mark; _placed looks once more after it has moved some.
        plan = plan if plan["moves"] else _plan(question, how["timeout"])
    told = _placed(question, plan, cold, how)
    text = "is the master, which is never marked as drained: instances may still come there"
    return {**told, "notes": [f"{name} {text}" for name in plan.get("unmarked", [])]}


def _filled(question: Result, cold: bool, how: Result) -> Result:
    plan = _plan(question, how["timeout"])  # which refuses a node that does not answer
    if not how["test"]:
        _mark("filling", question["nodes"])
    told = _placed(question, plan, cold, how)
    if not how["test"]:
        _mark("home", question["nodes"])
    return told


def _mark_leaving(plan: Result) -> None:
    """Mark nodes as drained, with a record of what a plan has leave them."""
    _mark("drained", plan["nodes"], {one["uuid"]: one["source"] for one in plan["moves"]})


def _mark(what: str, nodes: Collection[str], leaving: Mapping[str, str] | None = None) -> None:
    """Write into the configuration what becomes of nodes; and of drained ones, what leaves them."""
    leaving = leaving or {}
    marked = {name: [uuid for uuid, at in leaving.items() if at == name] for name in nodes}
    _brine("node", "mark", what, "--json", stdin=json.dumps({"nodes": marked}))


def _plan(question: Result, timeout: int | None) -> Result:
    """Which instance goes where, by what the nodes answer just now."""
    names = [*_nodes()]
    nodes = [name for name in names if any(_is_same(name, one) for one in question["nodes"])]
    others = [name for name in names if name not in nodes]
    asked = {"drain": others, "batch": names, "fill": nodes}[question["verb"]]
    rows = _listed(names, timeout)
    facts = _execute("brine.node_facts", asked, [], timeout=timeout)
    # A target without brine-moves would be asked for its part of a move again and again.
    for name, answer in _execute("brine.ask", facts, ["move", "list"], timeout=timeout).items():
        if isinstance(answer, dict) and "said" not in answer:
            facts[name] = _printable(answer.get("refused"))
    text = json.dumps({**question, "rows": rows, "facts": facts})
    planned: Result = _brine("node", "plan", "--json", stdin=text)
    return planned


def _placed(question: Result, plan: Result, cold: bool, how: Result) -> Result:
    """Move what a plan says. What can't go to one node is tried on others, until nothing has a
    place that it was not tried on. With *cold*, what no node takes live is then tried once more,
    stopped. Moves that a killed call has begun go on before."""
    moved = {one["instance"]: one["target"] for one in plan["pending"]}
    barred: dict[str, dict[str, str]] = {}
    test, timeout = how["test"], how["timeout"]
    how = {**how, "together": _Together()}
    if moved and not test:
        refused = _moves_done(plan["pending"], question["jobs"], None, how)
        moved = {name: target for name, target in moved.items() if name not in refused}
        barred = {name: why for name, why in refused.items() if "*" in why}
        plan = _plan({**question, "barred": barred}, timeout)
    is_drain = question["verb"] == "drain"
    stopped = set[str]() if cold else None
    while True:
        new = [one for one in plan["moves"] if moved.get(one["instance"]) != one["target"]]
        if not new:
            left = {name for name, why in barred.items() if "*" not in why}
            if stopped is None or left <= stopped:
                break
            stopped |= left
            barred = {name: why for name, why in barred.items() if name not in left}
            plan = _plan({**question, "barred": barred}, timeout)
            continue
        if is_drain and not test:
            _mark_leaving(plan)
        refused = _moves_done(new, question["jobs"], stopped, how)
        moved |= {one["instance"]: one["target"] for one in new if one["instance"] not in refused}
        for name, why in refused.items():
            barred.setdefault(name, {}).update(why)
        if refused or not test:
            plan = _plan({**question, "barred": barred}, timeout)
    if test:  # nothing has moved, so the last plan has all
        moved |= {one["instance"]: one["target"] for one in plan["moves"]}
    told: Result = {"moved": moved, **_staying(plan)}
    for one in [] if test else plan["pending"]:
        text = f"its move to {one['target']} is pending: brine operations resume {one['operation']}"
        told["failed"][one["instance"]] = barred.get(one["instance"], {}).get("*", text)
    told["moved"] = {name: at for name, at in moved.items() if name not in told["failed"]}
    return told


def _staying(plan: Result) -> dict[str, dict[str, str]]:
    """By instance, why it stays: ``failed``, and ``left``, which does not run."""
    told: dict[str, dict[str, str]] = {"failed": {}, "left": {}}
    for one in plan["stays"]:
        told["failed" if one["is_fault"] else "left"][one["instance"]] = one["why"]
    return told


def _moves_done(
    moves: Sequence[Result], jobs: int, stopped: Collection[str] | None, how: Result
) -> dict[str, dict[str, str]]:
    """Move instances, several at a time. Returns for those that have not moved why not, by the node
    that they were to go to; ``*`` is any.

    :param stopped: the names of those that are stopped for it; None if none may be.
    :param how: further arguments of :func:`_migrate`.
    """
    with concurrent.futures.ThreadPoolExecutor(max(jobs, 1)) as pool:
        begun = {
            one["instance"]: pool.submit(
                contextvars.copy_context().run, _move_done, one, stopped, how
            )
            for one in moves
        }
    return {name: why for name, future in begun.items() if (why := future.result())}


def _move_done(move: Result, stopped: Collection[str] | None, how: Result) -> dict[str, str]:
    name, target = move["instance"], move["target"]
    is_stopped = stopped is not None and name in stopped
    told = _migrate(name, target, is_stopped, **how)
    has_failed = not told["result"] and not told.get("operation")
    # What its own node lets leave live, others may take so.
    if has_failed and stopped is not None and not (is_stopped or _may_leave_live(name, how)):
        told = _migrate(name, target, True, **how)
    if told["result"]:
        return {}
    lines = told.get("obstacles") or [told["comment"]]
    # A plan has no drained target, but in test mode those that are to be filled.
    lines = [_printable(one) for one in lines if one != f"{target}: it is drained"]
    return {"*" if told.get("operation") else target: "; ".join(lines)} if lines else {}


def _may_leave_live(name: str, how: Result) -> bool:
    """Whether its node does not refuse an instance's live move."""
    found = _instance_of(name)
    source, named = found["node"], {"name": found["name"], "cold": False}
    said = _execute("brine.move_offer", [source], [], timeout=how["timeout"], **named)
    answer = said.get(source)
    return not (isinstance(answer, dict) and "obstacles" in answer)


# Nodes that are rebooted.


def _to_reboot(
    nodes: str | list[str] | None, begun: Collection[str]
) -> tuple[list[str], list[str]]:
    """The nodes that a pattern names, and those of them that are left out, as their reboot would
    take away what a person has set.

    :param begun: nodes of a reboot that is pending, which drains them itself.
    """
    if not nodes:
        raise _RefusedError("no reboot is pending: say which nodes, such as 'kvm*'")
    patterns = nodes if isinstance(nodes, list) else str(nodes).split(",")
    known, master = _nodes(), _config(f"/nodes/{_config('/cluster/master_node')}/name")
    drained = {one["name"] for one in _all_nodes() if one.get("drained")} - {*begun}
    found = [
        name
        for name in sorted(known)
        if any(
            fnmatch.fnmatchcase(each.lower(), str(pattern).strip().lower())
            for pattern in patterns
            for each in (name, name.partition(".")[0])
        )
    ]
    chosen = [name for name in found if not known[name] and name not in (master, *drained)]
    if not chosen:
        text = f"{_printable(nodes)} names no node that could be rebooted"
        why = f"the master, {master}, and nodes that are offline or drained are left out"
        raise _RefusedError(f"{text}: {why}")
    return chosen, [name for name in found if name not in chosen]


def _reboot_step(what: str, given: Any = None) -> Result:
    """What brine-cluster decides about a reboot."""
    text = json.dumps(given if given is not None else {})
    told: Result = _brine("node", "reboot-step", what, "--json", stdin=text)
    return told


def _reboot_plan(
    names: Sequence[str], left_out: Sequence[str], batch: int, timeout: int | None
) -> Result:
    rest, batches = [*names], []
    while rest:
        planned = _plan({"verb": "batch", "nodes": rest, "batch": batch}, timeout)
        moved = {one["instance"]: one["target"] for one in planned["moves"]}
        guests = {"moved": moved, **_staying(planned)}
        told = {key: one for key, one in guests.items() if one}
        batches.append({"nodes": planned["nodes"] or rest[:1], **told})
        if not planned["nodes"]:
            comment = f"the guests of {rest[0]} have no place on other nodes"
            return _ended(False, comment, batches=batches, left_out=left_out)
        rest = [name for name in rest if name not in planned["nodes"]]
    count = "1 node" if len(names) == 1 else f"{len(names)} nodes"
    way = "1 batch" if len(batches) == 1 else f"{len(batches)} batches"
    comment = f"{count} would be rebooted, in {way}"
    return _ended(True, comment, batches=batches, left_out=left_out)


def _rebooted(now: Result, known: Result, left_out: Sequence[str]) -> Result:
    """Do what follows, until all nodes are rebooted, or something is in doubt.

    :param known: ``boot_timeout_s``, ``check_timeout_s``, ``timeout`` and ``tell``, of this call.
    """
    carry = {
        "choose": _choose,
        "drain": _drain_batch,
        "upgrade": _upgrade,
        "reboot": _boot,
        "check": _check,
        "fill": _fill_batch,
    }
    wanted = {**now["wanted"], **known}
    while step := now["step"]:
        doubt, found = "", {}
        known["tell"](f"{step['step']}: {', '.join(step['facts']['nodes'])}")
        try:
            found = carry[step["step"]](step["facts"], wanted)
        except _RefusedError as error:
            doubt = str(error)
        answer = {"id": step["id"], "step": step["step"], "progress": 1.0, "found": found}
        answer |= {"state": "failed" if doubt else "done", "error": doubt}
        now = _reboot_step("answer", answer)
        if doubt:
            names = ", ".join(step["facts"]["nodes"])
            comment = f"stopped at the step {step['step']} of {names}: {doubt}"
            hint = "salt-run brine.reboot goes on with this step; abort=True forgets the rest"
            return _ended(False, comment, hint=hint, left=now["left"], left_out=left_out)
    return _ended(True, f"rebooted: {', '.join(wanted['nodes'])}", left_out=left_out)


def _choose(facts: Result, wanted: Result) -> Result:
    question = {"verb": "batch", "nodes": facts["nodes"], "batch": facts["batch"]}
    planned = _plan(question, wanted["timeout"])
    if not planned["nodes"]:
        text = f"the guests of {facts['nodes'][0]} have no place on other nodes"
        raise _RefusedError(_named(_staying(planned)["failed"]) or text)
    return {"nodes": planned["nodes"]}


def _drain_batch(facts: Result, wanted: Result) -> Result:
    names = facts["nodes"]
    question = {"verb": "drain", "nodes": names, "jobs": wanted["jobs"]}
    how = {"test": False, "timeout": wanted["timeout"], "tell": wanted["tell"]}
    told = _drained(question, wanted["cold"], how)
    _expect_no_failures(told)
    # A drained node is no master candidate, so the daemon that candidates have stops there.
    done = _redistributed("brine.confd", names, _nodes(), timeout=wanted["timeout"])
    if wrong := _undone(done):
        raise _RefusedError(_named(wrong))
    states = _execute("brine.node_state", names, [], timeout=wanted["timeout"])
    _expect_objects(names, states, "its state is not known")
    return {"before": {name: states[name] for name in names}}


def _fill_batch(facts: Result, wanted: Result) -> Result:
    question = {"verb": "fill", "nodes": facts["nodes"], "jobs": wanted["jobs"]}
    how = {"test": False, "timeout": wanted["timeout"], "tell": wanted["tell"]}
    told = _filled(question, wanted["cold"], how)
    done = _changes_redistributed(wanted["timeout"]) or {}
    _expect_no_failures(told)
    # A node that is a master candidate again has the daemon of candidates again.
    names = [name for name in facts["nodes"] if name not in done.get("nodes", {})]
    wrong = {name: why for name, why in _undone(done).items() if name in facts["nodes"]}
    if names:
        now = _redistributed("brine.confd", names, _nodes(), timeout=wanted["timeout"])
        wrong = {name: why for name, why in wrong.items() if name not in names} | _undone(now)
    if wrong:
        raise _RefusedError(_named(wrong))
    return {}


def _expect_no_failures(told: Result) -> None:
    if told["failed"]:
        raise _RefusedError(_named(told["failed"]))


def _named(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())


def _upgrade(facts: Result, wanted: Result) -> Result:
    """Upgrade nodes, if that is wanted; then look what their reboot has to bring back."""
    names = facts["nodes"]
    if wanted["upgrade"]:
        named = {
            "refresh": True,
            "dist_upgrade": True,
        }  # the latter is apt's: kernels are new packages
        answers = _execute("pkg.upgrade", names, [], timeout=wanted["timeout"], **named)
        _expect_objects(names, answers, "its upgrade has failed")
    states = _execute("brine.node_state", names, [], timeout=wanted["timeout"])
    _expect_objects(names, states, "its state is not known")
    return {"before": {name: states[name] for name in names}}


def _expect_objects(names: Collection[str], answers: Mapping[str, Any], fault: str) -> None:
    wrong = [
        f"{name}: {fault}: {_printable(answers.get(name, 'it has not answered'))}"
        for name in names
        if not isinstance(answers.get(name), dict)
    ]
    if wrong:
        raise _RefusedError("; ".join(wrong))


def _boot(facts: Result, wanted: Result) -> Result:
    """Reboot nodes on which nothing runs, and wait until all have."""
    until = time.monotonic() + wanted["boot_timeout_s"]
    asked: dict[str, float] = {}
    while True:
        given = {"before": facts["before"], "now": {}, "running": {}}
        given["now"] = _execute("brine.node_state", facts["nodes"], [], timeout=wanted["timeout"])
        for name, rows in _listed(given["now"], None).items():
            if _are_instances(rows):
                names = [one["name"] for one in rows if one.get("oper_state") in _GOING]
                given["running"][name] = names
        verdicts = _reboot_step("look", given)
        left = {name: one for name, one in verdicts.items() if one["act"] != "done"}
        if not left:
            return {}
        doubts = {name: one for name, one in left.items() if one["act"] == "doubt"}
        if doubts or time.monotonic() > until:
            named = doubts or left
            raise _RefusedError("; ".join(f"{name}: {one['why']}" for name, one in named.items()))
        for name, one in left.items():
            # A node that was asked and has not begun to go down may have lost the question.
            if one["act"] == "reboot" and time.monotonic() - asked.get(name, -1e9) > _ASK_AGAIN_S:
                asked[name] = time.monotonic()
                _execute("system.reboot", [name], [], timeout=wanted["timeout"])
        time.sleep(_BOOT_PAUSE_S)


def _check(facts: Result, wanted: Result) -> Result:
    """Wait until nodes are as they have to be after their reboot."""
    names, until = facts["nodes"], time.monotonic() + wanted["check_timeout_s"]
    while True:
        now = _execute("brine.node_state", names, [], timeout=wanted["timeout"])
        looked = _reboot_step("look", {"before": facts["before"], "now": now, "check": True})
        wrong = {name: "; ".join(one["faults"]) for name, one in looked.items() if one["faults"]}
        if not wrong:
            done = _redistributed("brine", names, _nodes(), timeout=wanted["timeout"])
            answers = _execute("brine.health", names, [], timeout=wanted["timeout"])
            serials = {name: _said(answers.get(name), "serial") for name in names}
            wrong = _undone(done) | {
                name: f"serial {serial}; this host has {done['serial']}"
                for name, serial in serials.items()
                if isinstance(serial, int) and serial < done["serial"]
            }
            wrong |= {
                name: f"its health is not known: {_printable(answers.get(name, 'no answer'))}"
                for name in names
                if not isinstance(answers.get(name), dict)
            }
        if not wrong:
            return {}
        if time.monotonic() > until:
            raise _RefusedError(_named(wrong))
        time.sleep(_BOOT_PAUSE_S)


# The processors of the nodes.


def _nodes_of(group: str | None) -> tuple[dict[str, bool], list[str]]:
    """The nodes of a group, and whether each is offline; and those of other groups."""
    nodes = _all_nodes()
    chosen = nodes
    if group is not None:
        names = {uuid: one["name"] for uuid, one in _config("/nodegroups").items()}
        if str(group) not in (*names, *names.values()):
            known = ", ".join(sorted(names.values()))
            raise _RefusedError(f"there is no group {_printable(group)}; known are: {known}")
        chosen = [one for one in nodes if str(group) in (one["group"], names.get(one["group"]))]
    if not chosen:
        raise _RefusedError("there are no nodes")
    others = sorted(one["name"] for one in nodes if one not in chosen)
    return {one["name"]: bool(one.get("offline")) for one in chosen}, others


def _baseline(answers: Mapping[str, Any]) -> Result:
    try:
        text = json.dumps(answers)
    except (TypeError, ValueError, RecursionError) as error:  # Salt also carries bytes and the like
        raise _RefusedError(f"a node's answer is no JSON: {error}") from None
    try:
        found: Result = _brine("config", "cpu-baseline", "-", "--json", stdin=text)
    except _RefusedError:
        if "cluster" not in _brine("--version", "--json")["parts"]:
            raise _RefusedError("this host lacks the package brine-cluster: install it") from None
        raise
    return found


def _cpu_type() -> str:
    """The cluster's default; empty if it has none."""
    hvparams = _config("/cluster").get("hvparams") or {}
    return str((hvparams.get("kvm") or {}).get("cpu_type") or "")


def _with_own_cpu(nodes: Collection[str]) -> list[str]:
    """The instances of nodes that the default does not count for."""
    uuids = {uuid for uuid, one in _config("/nodes").items() if one["name"] in nodes}
    return sorted(
        one["name"]
        for one in _config("/instances").values()
        if one.get("primary_node") in uuids and (one.get("hvparams") or {}).get("cpu_type")
    )


def _refuse_declared_cpu(cpu_type: str) -> None:
    """Refuse a default that the next run of the master's states would replace."""
    name = _config(f"/nodes/{_config('/cluster/master_node')}/name")
    for minion in dict.fromkeys((name, name.partition(".")[0])):
        found = __salt__["pillar.show_pillar"](minion)
        for key in ("brine", "cluster", "hvparams", "kvm", "cpu_type"):
            found = found.get(key) if isinstance(found, dict) else None
        if found not in (None, cpu_type):
            text = f"pillar of {minion} declares brine:cluster:hvparams:kvm:cpu_type; there it has"
            raise _RefusedError(f"{text} to be {cpu_type}")


# What is on the nodes.


def _instances(timeout: int | None) -> dict[str, Any]:
    """The instances of each node; or, of one that has not answered or failed, why."""
    nodes = _nodes()
    answers = _execute("brine.list", nodes, [], timeout=timeout)
    return {name: answers.get(name, "has not answered") for name in sorted(nodes)}


def _listed(nodes: Collection[str], timeout: int | None) -> dict[str, Any]:
    """The instances of each node that answers; a text where one is not known, such as one that runs
    without a spec: the list lacks it, and the command has failed."""
    answers = _execute("brine.ask", nodes, ["instance", "list"], timeout=timeout)
    return {
        name: one.get("refused", one.get("said")) if isinstance(one, dict) else one
        for name, one in answers.items()
    }


def _are_instances(answer: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether an answer is a list of instances, as it should be."""
    return isinstance(answer, list) and all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("name", "status"))
        for one in answer
    )


# The outboxes of the nodes.


def _record(
    names: Collection[str], recorded: dict[str, list[str]], timeout: int | None
) -> dict[str, Result]:
    """Record what the outboxes of nodes tell. A node whose events can't be recorded holds up no
    other, and names that are no node's any more are dropped.

    :param recorded: gains the ids of each node's events that are on record now.
    """
    told = {}
    nodes = {node["name"]: node for node in _all_nodes()}
    candidates = [name for name, node in nodes.items() if node.get("master_candidate")]
    known = [name for name in names if name in nodes]
    answers = _execute("brine.outbox_list", known, [], timeout=timeout)
    for name in known:
        events = answers.get(name, "it has not answered")
        try:
            if not isinstance(events, list):
                raise _RefusedError(f"its outbox is not known: {_printable(events)}")
            results = _written(name, events) if events else []
        except _RefusedError as error:
            log.error("brine.record: %s: %s", name, error)
            told[name] = {"recorded": 0, "refused": [str(error)]}
            continue
        ids = [one["id"] for one in results if one["recorded"]]
        refused = [f"{one['id']}: {one['reason']}" for one in results if not one["recorded"]]
        for line in refused:
            log.warning("brine.record: %s may not say so, or says nothing known: %s", name, line)
        if ids:
            recorded[name] = ids
            _put("redistribute", [name, *candidates])
        told[name] = {"recorded": len(ids), "refused": refused}
    return told


def _written(name: str, events: list[Any]) -> list[Result]:
    """Write the events of a node to this host's configuration; what became of each."""
    try:
        text = json.dumps(events)
    except (TypeError, ValueError, RecursionError) as error:  # Salt also carries bytes and the like
        raise _RefusedError(f"its outbox is no JSON: {error}") from None
    told = _brine("config", "record", "--node", name, "-", "--json", stdin=text)
    return told["events"]  # type: ignore[no-any-return]


def _put(queue: str, names: Collection[str]) -> None:
    """Have nodes wait in a queue, where a kill does not lose them."""
    folder = _folder(queue)
    for name in names:
        with open(os.path.join(folder, f"{urllib.parse.quote(name, safe='')}.waiting"), "w"):
            pass


def _taken(queue: str) -> Iterator[tuple[list[str], list[str]]]:
    """The nodes that wait in a queue, and then those that have come meanwhile; each time with a
    list, which the caller fills with those to be left for the next call. No two processes take any
    at the same time; the later one leaves them to the other."""
    folder = _folder(queue)
    kept: set[str] = set()
    with open(os.path.join(folder, ".lock"), "w") as lock:
        while any(not name.startswith(".") and name not in kept for name in os.listdir(folder)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # the process that has it looks again before it ends
            for name in os.listdir(folder):
                if name.endswith(".waiting"):
                    file = os.path.join(folder, name)
                    os.replace(file, f"{file.removesuffix('.waiting')}.taken")
                    kept.discard(f"{name.removesuffix('.waiting')}.taken")
            taken = {
                urllib.parse.unquote(name.removesuffix(".taken")): name
                for name in sorted(os.listdir(folder))
                if name.endswith(".taken") and name not in kept
            }
            left: list[str] = []
            yield [*taken], left
            kept.update(taken[name] for name in left)
            for name in taken.values():
                if name not in kept:
                    os.unlink(os.path.join(folder, name))
            fcntl.flock(lock, fcntl.LOCK_UN)


def _folder(*below: str) -> str:
    """Where the runner keeps what it has to know in its next call."""
    folder = os.path.join(__opts__["cachedir"], "brine", *below)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def _locked(what: str, *, waits_s: float = 0.0) -> Iterator[None]:
    """Be the only call that does something, for the time of the block.

    :param waits_s: for how long another call that does it is waited for, in seconds.
    :raises BlockingIOError: if it still does it then.
    """
    until = time.monotonic() + waits_s
    with open(os.path.join(_folder(), f"{what}.lock"), "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_LOCK_PAUSE_S)
        yield


# Redistribution.


def _changes_redistributed(timeout: int | None) -> Result | None:
    """Redistribute what has changed since the last time, until nothing has; what became of it. None
    if there was nothing to do, or another call does it."""
    told = None
    while _serial() != _given():
        try:
            with _locked("redistribution"):
                nodes = _nodes()
                # This host's own run may have begun without brine, and so without its pillar.
                is_known = _given() is not None
                names = [name for name in nodes if not (is_known and _is_here(name))]
                told = _redistributed("brine", names, nodes, timeout=timeout)
                _note_given(told["serial"])
        except BlockingIOError:
            break  # the next holder of the lock looks again after that
        for name, reason in _undone(told).items():
            text = "brine.redistribute: %s is not as the configuration says: %s"
            log.error(text, name, _printable(reason))
    return told


def _redistributed(
    state: str,
    names: Collection[str],
    nodes: Mapping[str, bool],
    *,
    test: bool = False,
    timeout: int | None = None,
    busy_s: float | None = None,
) -> Result:
    """Have nodes take over what the external pillar gives them, this host's first.

    :param nodes: those of the configuration, and whether each is offline.
    """
    here = [name for name in names if _is_here(name)]
    answers = _apply(state, here, test=test, timeout=timeout, busy_s=busy_s)
    serial = _serial()  # the others get this one, or a newer one
    others = [name for name in names if name not in here]
    answers.update(_apply(state, others, test=test, timeout=timeout, busy_s=busy_s))
    told = {name: _told(answer) for name, answer in sorted(answers.items())}
    missing = sorted(name for name in names if name not in answers)
    away = [name for name in missing if nodes[name]]
    silent = [name for name in missing if not nodes[name]]
    failed = [name for name, one in told.items() if one["failed"]]
    comment = f"{len(told) - len(failed)} of {len(names)} nodes have the configuration"
    if test:
        comment = f"{len(told) - len(failed)} of {len(names)} nodes would have the configuration"
    is_done = not failed and not silent
    more = {"nodes": told, "not_answered": silent, "offline": away}
    return _ended(is_done, comment, serial=serial, **more)


def _given() -> int | None:
    """The serial of the configuration that was redistributed last, also to nodes that have failed
    or not answered: ``brine.health`` names these."""
    try:
        with open(os.path.join(_folder(), "given"), encoding="ascii") as file:
            return int(file.read())
    except (FileNotFoundError, ValueError):
        return None


def _note_given(serial: int) -> None:
    new = os.path.join(_folder(), "given.new")
    with open(new, "w", encoding="ascii") as file:
        file.write(str(serial))
    os.replace(new, os.path.join(_folder(), "given"))


def _undone(done: Result) -> dict[str, str]:
    """The nodes that a redistribution has failed on or had no answer of, and why."""
    failed = {
        name: "; ".join(line for said in one["failed"] for line in said.splitlines())
        for name, one in done.get("nodes", {}).items()
    }
    silent = dict.fromkeys(done.get("not_answered", []), "it has not answered")
    return {name: reason for name, reason in {**failed, **silent}.items() if reason}


# The steps of a rotation.


def _rotate(timeout: int | None) -> Result:
    away: list[str] = []
    _refuse_declared(_nodes(), _rotation("--dry-run")["keys"])
    now = _rotation()
    while now["step"] != "done":
        nodes = _nodes()  # one may have been added meanwhile
        unconfirmed, away = _confirm(nodes, now["keys"], timeout)
        if unconfirmed:
            names = ", ".join(unconfirmed)
            comment = (
                f"not confirmed by {names}; salt-run brine.rotate_key continues with this step"
            )
            return _ended(False, comment, step=now["step"], not_confirmed=unconfirmed)
        now = _rotation("--confirmed", now["step_id"])
    return _ended(True, "all nodes have the new key, and accept no other", offline=away)


def _rotation(*arguments: str) -> Result:
    """How far the rotation is, which this host has a record of: the step that all nodes have to
    confirm, and the SHA-256 of each key's file."""
    return _brine("config", "rotate-key", *arguments, "--json")  # type: ignore[no-any-return]


def _refuse_declared(nodes: Collection[str], keys: Mapping[str, str] | None) -> None:
    """Refuse to rotate where a node's key comes from pillar's SLS files."""
    ours = {*keys.values()} if keys else set()
    for name in {one for node in nodes for one in (node, node.partition(".")[0])}:
        pillar = __salt__["pillar.show_pillar"](name)
        brine = pillar.get("brine") if isinstance(pillar, dict) else None
        confd = brine.get("confd") if isinstance(brine, dict) else None
        key = confd.get("key") if isinstance(confd, dict) else None
        if key and hashlib.sha256(f"{key}\n".encode()).hexdigest() not in ours:
            text = f"pillar of {name} declares brine:confd:key: replace it there, by the steps of"
            raise _RefusedError(f"{text} brine's docs/operating.md, or remove it from there first")


def _confirm(
    nodes: Mapping[str, bool], keys: Mapping[str, str], timeout: int | None
) -> tuple[dict[str, str], list[str]]:
    """Have all nodes take over the keys. Returns those that have not, and why, and those that are
    offline."""
    answers = _apply("brine.confd", nodes, timeout=timeout)
    away = [name for name in nodes if name not in answers and nodes[name]]
    unconfirmed = {name: "has not answered" for name in nodes if name not in {*answers, *away}}
    files: dict[tuple[str, str], list[str]] = {}
    keyless = []
    for name, answer in answers.items():
        states = {str(one.get("__id__")): one for one in _states(answer)}
        ours = {key: one for key, one in states.items() if key.startswith("brine-confd")}
        failed = [one for one in ours.values() if one["result"] is not True]
        if not states or failed:
            unconfirmed[name] = "; ".join(_told(answer)["failed"]) or "a state has failed"
        elif not states.keys() & {"brine-confd-key", "brine-clean-confd-package"}:
            keyless.append(name)
        for state, key in (
            ("brine-confd-key", "key"),
            ("brine-confd-previous-key", "previous_key"),
        ):
            if state in ours and keys[key] and name not in unconfirmed:
                files.setdefault((str(ours[state]["name"]), key), []).append(name)
    if answers and not unconfirmed and not files:
        text = "no node gets the key: is the external pillar brine in the master's configuration"
        raise _RefusedError(f"{text}, and brine:confd:enabled not false everywhere?")
    text = "gets no key: the log of the master says why, or the node's pillar"
    unconfirmed.update(dict.fromkeys(keyless, text))
    for (path, key), names in files.items():
        found = _execute("file.get_hash", names, [path, "sha256"], timeout=timeout)
        for name in names:
            if found.get(name) != keys[key]:
                unconfirmed[name] = f"{path} is another key; does its pillar declare one?"
    return unconfirmed, away


# Nodes and minions.


def _nodes() -> dict[str, bool]:
    """The nodes of the configuration, and whether each is offline there."""
    return {node["name"]: bool(node.get("offline")) for node in _all_nodes()}


def _all_nodes() -> list[dict[str, Any]]:
    return list(_config("/nodes").values())


def _expect_master() -> None:
    """Refuse to write where the configuration is a copy of another host's."""
    name = _config(f"/nodes/{_config('/cluster/master_node')}/name")
    if not _is_here(name) and not _was_master():
        text = f"the cluster's master, {name}, writes the configuration; this is"
        raise _RefusedError(f"{text} {os.uname().nodename}")


def _serial() -> int:
    """The configuration's, which each change makes a larger one."""
    return int(_config("/cluster/serial_no"))


def _config(pointer: str) -> Any:
    """A part of this host's configuration."""
    return _brine("config", "show", pointer)


def _brine(*command: str, stdin: str = "") -> Any:
    """The output of a command on this host."""
    try:
        run = subprocess.run(
            ["brine", *command],
            input=stdin.encode(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _RefusedError(f"brine can't be run: {error}") from None
    if run.returncode != 0:
        lines = [line.strip() for line in run.stderr.decode(errors="replace").splitlines()]
        said = [one.partition(kind)[2] for one in lines for kind in _SAID if one.startswith(kind)]
        raise _RefusedError("; ".join(said or lines[:1]) or "it failed")
    return json.loads(run.stdout)


def _was_master() -> bool:
    """Whether this host is the master under another name: it was renamed."""
    try:
        return _brine("config", "this-node", "--json")["is_master"] is True
    except _RefusedError:
        return False


def _is_here(node: str) -> bool:
    """Whether a node is this host."""
    return _is_same(node, os.uname().nodename)


def _is_same(node: str, minion: str) -> bool:
    """Whether both name the same node, where either may be the short name. Case does not count."""
    node, minion = node.lower(), minion.lower()
    return minion in (node, node.partition(".")[0]) or minion.partition(".")[0] == node


def _pattern(node: str) -> str:
    """A regular expression of the minion ids that a node may have."""
    short, dot, rest = node.partition(".")
    if dot:
        return rf"{re.escape(short)}(?:{re.escape(dot + rest)})?"
    return rf"{re.escape(short)}(?:\..+)?"


def _apply(
    state: str,
    nodes: Collection[str],
    *,
    test: bool = False,
    timeout: int | None = None,
    busy_s: float | None = None,
) -> dict[str, Any]:
    """Apply a state; returns the answers by node. One that is just applying states is asked again,
    for *busy_s* seconds, or those that a first run takes.

    Salt's own ``queue=True`` is no help: as of 3008.5 the master is told that a job that waits on
    its minion is none.
    """
    answers: dict[str, Any] = {}
    until = time.monotonic() + (_BUSY_TIMEOUT_S if busy_s is None else busy_s)
    busy, pause_s = [*nodes], _FIRST_PAUSE_S
    while True:
        answers.update(_execute("state.apply", busy, [state], timeout=timeout, test=test))
        busy = [name for name in busy if _is_busy(answers.get(name))]
        if not busy or time.monotonic() > until:
            return answers
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _is_busy(answer: Any) -> bool:
    """Whether a minion has refused to apply states because of another job."""
    if isinstance(answer, str):
        return _BUSY_WITH_SEVERAL in answer
    return isinstance(answer, list) and any(_BUSY in str(line) for line in answer)


def _execute(
    function: str,
    nodes: Collection[str],
    arguments: list[Any],
    *,
    timeout: int | None,
    **named: Any,
) -> dict[str, Any]:
    """Call a function on the nodes' minions; returns the answers by node. Where several minions may
    be a node, none of them is believed."""
    if not nodes:
        return {}
    ids = "|".join(map(_pattern, nodes))
    answers = __salt__["salt.execute"](
        f"(?i)(?:{ids})$", function, arguments, timeout=timeout, tgt_type="pcre", kwarg=named
    )
    found: dict[str, Any] = {}
    minions: dict[str, list[str]] = {}
    for minion, answer in sorted(answers.items()):
        for name in nodes:
            if not _is_silent(answer) and _is_same(name, minion):
                found[name] = answer
                minions.setdefault(name, []).append(minion)
    for name, several in minions.items():
        if len(several) > 1:
            text = "answer as the same node: give it its whole name in the configuration"
            found[name] = f"the minions {', '.join(several)} {text}"
    return found


def _is_silent(answer: Any) -> bool:
    """Whether an answer is Salt's own, of a minion that has not answered."""
    return answer is False or str(answer).startswith("Minion did not return")


def _states(answer: Any) -> list[dict[str, Any]]:
    """The results of a state.apply, in their order; none if it was refused as a whole, or this is
    something else."""
    states = [*answer.values()] if isinstance(answer, dict) else []
    keys = {"name", "result", "comment"}
    if not all(isinstance(one, dict) and one.keys() >= keys for one in states):
        return []
    return sorted(states, key=lambda one: str(one.get("__run_num__")).zfill(9))


def _told(answer: Any) -> Result:
    """The changes of a state.apply, and its failures."""
    states = _states(answer)
    if not states:
        lines = answer if isinstance(answer, list) and answer else [answer]
        return {"changed": [], "failed": [" ".join(str(line).split()) for line in lines]}
    # In test mode, what would change may not say more than that its result is none.
    changed = [one["name"] for one in states if one.get("changes") or one["result"] is None]
    wrong = [one for one in states if one["result"] not in (True, None)]
    failed = [f"{one['name']}: {one['comment']}" for one in wrong]
    return {"changed": changed, "failed": failed}


def _printable(value: Any) -> str:
    """Foreign text in one line, which can forge no other line of a log."""
    return repr(str(value))[1:-1][:_LONGEST_SAID]


def _ended(result: bool, comment: str, **more: Any) -> Result:
    """The return value of a function. If it failed, salt-run exits with ``retcode``, and an
    orchestration fails by the context. A master's reactor has one context for all its calls."""
    __context__["retcode"] = 0 if result else 1
    told = {"result": result, "comment": comment, **{key: one for key, one in more.items() if one}}
    return told if result else {**told, "retcode": 1}
