"""
Instances: the virtual machines of this node
============================================

What each should be, with the keys of brine-spec(5), and whether it should run::

    web1:
      brine_instance.defined:
        - spec:
            memory_mib: 2048
            disks:
              - path: /dev/vg0/web1
            nics:
              - link: br0

    web1-runs:
      brine_instance.running:
        - name: web1
        - require:
          - brine_instance: web1

    db1:
      brine_instance.stopped: []

    old1:
      brine_instance.absent: []

    instances-of-the-cluster:
      brine_instance.from_config: []

The state ``brine.instance`` makes these of pillar. An instance that its user has shut down stays
down: ``running`` leaves it alone, and says so. It also leaves the watcher its work: it starts
nothing while the watcher is paused, and no instance that the watcher has given up.

In a run of Salt one process looks at all instances and tries all declared specs. So it finds that
nothing is to be done for however many instances. One that is to be changed is looked at anew.

All of them talk to the ``brine`` command only, by the execution module ``brine``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    __context__: dict[str, Any] = {}
    __opts__: dict[str, Any] = {}
    __pillar__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]

# All states of a run, and what has become of them by now; Salt replaces both.
__lowstate__: Sequence[Mapping[str, Any]] = ()
__running__: Mapping[str, Mapping[str, Any]] = {}

_OWNERS = "/run/brine/lifecycle"
_UNIT_FILE = "/usr/lib/systemd/system/brine-instance@.service"
_SPEC_FILE = "/var/lib/brine/instances/{}.json"
_START = ["start", "--keep-tries"]
_GOING = ("running", "starting", "stopping")
_DEVICES = ("attached", "detached")
_FOUND, _SEEN, _TRIED = "brine_instance", "seen", "tried"


def mod_init(low: Mapping[str, Any]) -> bool:
    """Begin anew: Salt calls this before the first of these states in a run, and ``__context__``
    may still have what another run found."""
    __context__.pop(_FOUND, None)
    return True


def defined(name: str, spec: Mapping[str, Any] | None = None) -> Result:
    """Ensure an instance is defined with this spec, as ``brine instance define --live`` does. The
    state starts and stops no instance.

    A running instance gets its NICs and disks at once where possible: ``changes`` lists those
    ``attached`` and ``detached``. NICs and disks that an administrator has added by hand stay, and
    are no change. The comment names the changes that need a reboot. After a shutdown by the user,
    an ``admin_state`` of ``up`` or ``down`` does not replace the user's decision; ``offline`` does.

    Example::

        web1:
          brine_instance.defined:
            - spec:
                memory_mib: 2048
                disks:
                  - path: /dev/vg0/web1
                nics:
                  - link: br0

    :param name: of the instance.
    :param spec: the keys of brine-spec(5); what it leaves out has its default, but that UUIDs, MAC
        addresses and the admin_state stay as they are.
    """
    if not isinstance(spec := {} if spec is None else spec, dict):
        hint = "; in pillar, absent: true undefines it" if not spec else ""
        return _failure(name, f"{name}: its spec must be a mapping, but is {spec!r}{hint}")
    if spec.get("name", name) != name:
        return _failure(name, f"{name}: its spec is that of {spec['name']}")
    if (early := _not_installed(name)) is not None:
        return early
    wanted = _wanted(name, spec)
    after = _trial(wanted)
    if after is None or (_has_changed(after) and not __opts__["test"]):
        options = ["--dry-run"] if __opts__["test"] else []
        answer = _define(wanted, *options)
        if "said" not in answer:
            if _waits_for_unit(spec):
                coming = {name: {"old": None, "new": "defined"}}
                text = "would be defined once its storage unit is there; as yet"
                return _success(name, coming, f"{text}: {answer['refused']}")
            return _failure(name, answer["refused"])
        after = answer["said"]
        _forget(name)
    changes: Result = {key: after[key] for key in _DEVICES if after[key]}
    changes |= _of_volumes(after)
    if after["before"] is None:
        changes[name] = {"old": None, "new": "defined"}
    else:
        changes |= _difference(after["before"], after["spec"])
    is_users = spec.get("admin_state") and after["spec"]["admin_state_source"] == "user"
    notes = ["its user has shut it down, and that stays"] if is_users else []
    notes += _pending(after["restart_pending"])
    if after["live_errors"]:
        comment = "\n".join([*after["live_errors"], *notes])
        return {"name": name, "result": False, "changes": changes, "comment": comment}
    if not changes:
        return _success(name, {}, "is as declared", *notes)
    return _success(name, changes, "would be defined" if __opts__["test"] else "defined", *notes)


def running(name: str) -> Result:
    """Ensure an instance runs, as ``brine instance start`` does, unless its user has shut it down.

    An instance that its user has shut down is left alone, unless its spec says ``user_shutdown:
    restart``; so is one that is just being stopped, or that the watcher has given up. While the
    watcher is paused, nothing is started. The watcher's tries stay as they are.

    Example::

        web1-runs:
          brine_instance.running:
            - name: web1
            - require:
              - brine_instance: web1

    :param name: of the instance; it must be defined.
    """
    if (early := _not_there_yet(name, "would be started once it is defined")) is not None:
        return early
    seen, refused = _info(name, lambda seen: bool(_why_left(seen)))
    if refused:
        return _failure(name, refused)
    if why := _why_left(seen):
        return _success(name, {}, why, *_pending(seen["restart_pending"]))
    return _act(name, [*_START, name], seen["status"], "running", "started")


def stopped(name: str, force: bool = False, timeout: float | None = None) -> Result:
    """Ensure an instance does not run, as ``brine instance stop`` does: its guest is asked.

    An instance that is not defined does not run. With ``parallel: true`` several stop side by side.

    Example::

        db1:
          brine_instance.stopped:
            - timeout: 300
            - force: true

    :param name: of the instance.
    :param force: whether to end it if its guest does not shut down in time. If not, it runs on, and
        the state fails.
    :param timeout: how long the guest may take, in seconds; None is what its spec says.
    """
    if (early := _not_there_yet(name, "is not defined", result=True)) is not None:
        return early
    seen, refused = _info(name, _is_stopped)
    if refused:
        return _failure(name, refused)
    if _is_stopped(seen):
        return _success(name, {}, "does not run")
    options = ["--force"] if force else []
    options += [] if timeout is None else ["--timeout", str(timeout)]
    return _act(name, ["stop", name, *options], seen["status"], "stopped", "stopped")


def absent(name: str) -> Result:
    """Ensure an instance is not defined, as ``brine instance undefine`` does.

    A running instance is not touched, and the state fails. Its disks are never touched.

    Example::

        old1:
          brine_instance.absent: []

    :param name: of the instance.
    """
    if (early := _not_there_yet(name, "is not defined", result=True)) is not None:
        return early
    if __opts__["test"]:
        # A damaged spec can be forgotten as well.
        seen, _ = _info(name, lambda seen: seen["oper_state"] not in _GOING)
        if seen.get("oper_state") in _GOING:
            return _failure(name, f"{name} is {seen['oper_state']}, and would not be undefined")
    return _act(name, ["undefine", name], "defined", None, "undefined")


def elsewhere(name: str, node: str) -> Result:
    """Ensure an instance that another node has by now does not start here: it is ``offline``, or
    set aside by a claim of that node.

    A running instance is not touched, and the state fails. ``brine instance undefine`` forgets it.

    Example::

        web1:
          brine_instance.elsewhere:
            - node: node2.example.com

    :param name: of the instance.
    :param node: whose it is.
    """
    if (early := _not_there_yet(name, f"is {node}'s", result=True)) is not None:
        return early
    comment = f"is {node}'s, and offline here"
    seen, refused = _info(name, lambda seen: _is_offline(seen) or _is_elsewhere(seen))
    if refused:
        return _failure(name, refused)
    if seen["oper_state"] in _GOING:
        hint = f"brine instance stop {name}, before {node} starts it"
        return _failure(name, f"{name} is {node}'s, but is {seen['oper_state']} here; {hint}")
    if _is_elsewhere(seen):
        return _success(name, {}, f"is {node}'s, and set aside here")
    if _is_offline(seen):
        return _success(name, {}, comment)
    changes = {"admin_state": {"old": seen["admin_state"], "new": "offline"}}
    if not __opts__["test"]:
        answer = _define(_wanted(name, {**seen["spec"], "admin_state": "offline"}))
        if "said" not in answer:
            return _failure(name, answer["refused"])
        _forget(name)
    return _success(name, changes, comment)


def none_running(name: str, owned: bool = False) -> Result:
    """Ensure no instance runs. It fails otherwise: the states that require this one would remove
    the programs that look after a running instance.

    Example::

        nothing-runs:
          brine_instance.none_running: []

        brine-kvmd:
          pkg.removed:
            - require:
              - brine_instance: nothing-runs

    :param name: for people; nothing depends on it.
    :param owned: whether only instances with an owner matter.
    """
    states = "--state=active,activating,deactivating,reloading"
    listing = ["systemctl", "list-units", "--plain", "--no-legend", "--full", states]
    run = __salt__["cmd.run_all"]([*listing, "brine-instance@*.service"], python_shell=False)
    if run["retcode"] != 0:
        return _failure(name, run["stderr"] or run["stdout"])
    units = [line.split()[0] for line in run["stdout"].splitlines() if line.strip()]
    names = [unit.partition("@")[2].removesuffix(".service") for unit in units]
    what = "instances"
    if owned:
        what = "instances with an owner"
        names = [one for one in names if __salt__["file.directory_exists"](f"{_OWNERS}/{one}")]
    if not names:
        return {"name": name, "result": True, "changes": {}, "comment": "no instance runs"}
    hint = "brine instance stop NAME has a guest shut down"
    return _failure(name, f"nothing is removed, as {what} run: {', '.join(names)}; {hint}")


def from_config(
    name: str,
    config: str = "/var/lib/brine/config.data",
    node: str = "",
    declared: Sequence[str] = (),
) -> Result:
    """Ensure this node's instances are as the cluster's configuration says: defined, with NICs and
    disks changed live, and up or down. NICs and disks that were added by hand stay.

    What holds ``running`` back holds here, too. Stops come first, side by side, then starts. An
    instance that is another node's by now becomes ``offline`` here, or fails if it runs. One that
    the cluster has removed, and that is ``offline`` or another node's here, is undefined. The fault
    of one instance holds up no other.

    Example::

        instances-of-the-cluster:
          brine_instance.from_config:
            - declared: [web1]

    :param name: for people; nothing depends on it.
    :param config: the configuration; empty is what the external pillar ``brine`` gives.
    :param node: this node's name there; empty is the host's.
    :param declared: instances that pillar declares by itself. One that is the cluster's, too, is
        left alone, and the state fails.
    """
    if (early := _not_installed(name)) is not None:
        return early
    brine = __pillar__.get("brine") or {}
    given = brine.get("distributed") or {}
    command = ["instance", "define", "--from-config", "--live"]
    command += ["--node", node] if node else []
    if config and __opts__["test"]:
        if not __salt__["file.file_exists"](config):
            return _later(name, "instances would be defined once there is a configuration")
        if _would_change(config):
            return _later(name, "instances would be as the configuration says that is to come")
    source, stdin = ([], "") if config else (["--config", "-"], given["configuration"])
    answer = __salt__["brine.ask"](*command, *source, "--dry-run", stdin=stdin)
    if "said" not in answer:
        return _failure(name, answer["refused"])
    twice = sorted({one["name"] for one in answer["said"]["instances"]}.intersection(declared))
    source += [f"--but={one}" for one in twice]
    rows = [one for one in answer["said"]["instances"] if one["name"] not in twice]
    seen, refused = _states(rows), ""
    if not __opts__["test"] and (any(map(_row_changes, rows)) or answer["said"].get("removed")):
        answer = __salt__["brine.ask"](*command, *source, stdin=stdin)
        if "said" not in answer:
            return _failure(name, answer["refused"])
        rows = answer["said"]["instances"]
        for row in rows:
            _forget(row["name"])
        listed = __salt__["brine.ask"]("instance", "list")
        seen = {one["name"]: one for one in listed.get("said", ())}
        refused = "" if "said" in listed else listed["refused"]
    changes = {row["name"]: found for row in rows if (found := _row_changes(row))}
    both = "both in brine:instance:instances and in the cluster's configuration"
    problems = [f"{', '.join(twice)}: declared {both}; remove one of the two"] if twice else []
    problems += [row["error"] for row in rows if "error" in row]
    problems += [error for row in rows for error in row.get("live_errors", ())]
    problems += filter(None, [refused])
    waiting = [(row["name"], _pending(row.get("restart_pending"))) for row in rows]
    notes = [f"{instance} {line}" for instance, lines in waiting for line in lines]
    specs = {row["name"]: row["spec"] for row in rows if "spec" in row}
    _bring_to_state(specs, seen, changes, problems, notes)
    for one in answer["said"].get("elsewhere", ()):
        moved = elsewhere(one["name"], one["node"])
        if moved["result"] is False:
            problems.append(moved["comment"])
        elif moved["changes"]:
            changes[one["name"]] = moved["changes"]
    for one in answer["said"].get("removed", ()):
        changes[one] = {"spec": {"old": "defined", "new": None}}
    done = "would change" if __opts__["test"] else "changed"
    comment = f"instances that {done}: {len(changes)} of {len(rows)}"
    if not changes:
        comment = f"instances of the cluster on this node: {len(rows)}"
    text = "\n".join([*problems, comment, *notes])
    if problems:
        return {**_failure(name, text), "changes": changes}
    result = None if changes and __opts__["test"] else True
    return {"name": name, "result": result, "changes": changes, "comment": text}


def _later(name: str, comment: str) -> Result:
    """The return value of a state in test mode that can't know its changes yet."""
    return {"name": name, "result": None, "changes": {}, "comment": comment}


def _would_change(config: str) -> bool:
    """Whether a state of this run, which is in test mode, would change the configuration."""
    return any(
        made == config or (state, function) == ("brine_config", "applied")
        for state, made, function in _coming()
    )


def _waits_for_unit(spec: Mapping[str, Any]) -> bool:
    """Whether a spec has disks by size in units that this run, which is in test mode, would make;
    or in the default unit, which it would set."""
    of_storage = [one for one in _coming() if one[0] == "brine_storage"]
    made = {name for _, name, function in of_storage if function == "unit"}
    if any(function == "default" for *_, function in of_storage) or _default_units() & made:
        made.add("")  # of a disk that names none
    disks = [one for one in spec.get("disks") or [] if isinstance(one, Mapping)]
    return any(one.get("size_mib") and (one.get("unit") or "") in made for one in disks)


def _default_units() -> set[str]:
    """The unit of disks that name none, as a state of this run declares it."""
    states = [low for low in __lowstate__ if low["state"] == "brine_storage"]
    return {low["name"] for low in states if low["fun"] == "default"}


def _coming() -> Iterator[tuple[str, str, str]]:
    """The states of this run that would change something in test mode: module, name, function."""
    for tag, ended in __running__.items():
        state, *_, name, function = tag.split("_|-")
        if ended["result"] is None:
            yield state, name, function


def _row_changes(row: Result) -> Result:
    """The changes that a definition made to an instance, or would make."""
    changes: Result = {key: row[key] for key in _DEVICES if row.get(key)}
    changes |= _of_volumes(row)
    if row.get("changed") and row["before"] is None:
        changes |= {"spec": {"old": None, "new": "defined"}}
    elif row.get("changed"):
        changes |= _difference(row["before"], row["spec"])
    return changes


def _bring_to_state(
    specs: Mapping[str, Result],
    seen: Mapping[str, Result],
    changes: Result,
    problems: list[str],
    notes: list[str],
) -> None:
    """Stop and start instances as their specs say; adds to what is to be told.

    :param seen: the instances as they were seen last.
    """
    stops, starts = [], []
    for name in sorted(specs, key=lambda one: (specs[one]["start_order"], one)):
        here = seen.get(name)
        if here is None:  # it would be defined first, or can't be looked at
            starts += [name] if __opts__["test"] and specs[name]["admin_state"] == "up" else []
        elif specs[name]["admin_state"] != "up":
            stops += [] if _is_stopped(here) else [name]
        elif not (why := _why_left({**here, "spec": specs[name]})):
            starts.append(name)
        elif why != "runs":
            notes.append(f"{name} {why}")
    for names, command, now in ((stops, ["stop"], "stopped"), (starts, _START, "running")):
        if not names:
            continue
        failed: dict[str, str] = {}
        if not __opts__["test"]:
            answer = __salt__["brine.ask"]("instance", *command, *names)
            said = answer.get("said", {}).get("instances", [])
            failed = {one["name"]: one["error"] for one in said if "error" in one}
            if "refused" in answer and not failed:
                failed = dict.fromkeys(names, "") | {names[0]: answer["refused"]}
            problems += filter(None, failed.values())
        for name in names:
            _forget(name)
            if name not in failed:
                status = {"old": seen.get(name, {}).get("status"), "new": now}
                changes.setdefault(name, {})["status"] = status


def _wanted(name: str, spec: Mapping[str, Any]) -> str:
    """The JSON of a spec."""
    return json.dumps({**spec, "name": name}, default=_plain, sort_keys=True)


def _plain(value: Any) -> Any:
    """The types that JSON lacks: Salt's immutable dictionaries and lists, and dates."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else str(value)


def _is_stopped(seen: Result) -> bool:
    return seen["oper_state"] not in _GOING and seen["admin_state"] != "up"


def _is_elsewhere(seen: Result) -> bool:
    """Whether a claim of another node keeps an instance from starting here."""
    return bool(seen.get("status") == "elsewhere")


def _is_offline(seen: Result) -> bool:
    return seen["oper_state"] not in _GOING and seen["admin_state"] == "offline"


def _why_left(seen: Result) -> str:
    """Why an instance is not to be started now; empty if it is."""
    if seen["status"] in ("running", "starting"):
        return "runs"
    if seen["status"] == "ERROR_halted":
        return f"left alone: {seen['why']}"
    if seen["oper_state"] == "stopping":
        return "is just being stopped, and left alone"
    is_off = seen["oper_state"] == "S" and seen["spec"]["user_shutdown"] != "restart"
    if is_off or seen["admin_state_source"] == "user":
        return f"left alone: {seen['why'] or 'it was shut down by its user'}"
    return f"left alone: {seen['held_back']}" if seen["held_back"] else ""


def _has_changed(after: Result) -> bool:
    """Whether a definition changes something, or can't change all that it should."""
    return any(after[key] for key in ("changed", *_DEVICES, "live_errors"))


def _of_volumes(after: Result) -> Result:
    """What is done with volumes, under one key; nothing if nothing is."""
    done = {key: rows for key, rows in after.get("volumes", {}).items() if rows}
    return {"volumes": done} if done else {}


def _pending(keys: Sequence[str] | None) -> list[str]:
    """A line on the changes that wait for a reboot of a running instance, if there are any."""
    return [f"needs a reboot: {', '.join(keys)}"] if keys else []


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Result:
    """The keys of a spec that another one has other values for."""
    return {
        key: {"old": before.get(key), "new": value}
        for key, value in after.items()
        if value != before.get(key)
    }


def _act(name: str, command: list[str], old: str, new: str | None, done: str) -> Result:
    """Change something by the command; in test mode only say so."""
    changes = {name: {"old": old, "new": new}}
    if __opts__["test"]:
        return _success(name, changes, f"would be {done}")
    answer = __salt__["brine.ask"]("instance", *command)
    _forget(name)
    if "refused" in answer:
        return _failure(name, answer["refused"])
    return _success(name, changes, done)


def _not_installed(name: str) -> Result | None:
    """The return value of a state in test mode if the package would be installed first."""
    if not __opts__["test"] or __salt__["file.file_exists"](_UNIT_FILE):
        return None
    return _later(name, "brine-instance would be installed first")


def _not_there_yet(name: str, comment: str, *, result: bool | None = None) -> Result | None:
    """The return value of a state whose instance is not defined; None if it is.

    :param result: None: it would be defined, so that is all there is to say in test mode, and a
        mistake otherwise.
    """
    if (early := _not_installed(name)) is not None:
        return early
    if __salt__["file.file_exists"](_SPEC_FILE.format(name)):
        return None
    if result is None and not __opts__["test"]:
        return None  # the command has more to say of it
    return {"name": name, "result": result, "changes": {}, "comment": f"{name} {comment}"}


# What is known of the instances.


def _define(wanted: str, *options: str) -> Result:
    """Have ``brine`` define instances, with the JSON of specs."""
    command = ["instance", "define", "-", "--live", "--keep-user-state", *options]
    answer: Result = __salt__["brine.ask"](*command, stdin=wanted)
    return answer


def _info(name: str, suffices: Callable[[Result], bool]) -> tuple[Result, str]:
    """The facts about an instance, and the error; one of them is empty.

    :param suffices: whether what the look at all has found will do. Where something is to be done
        it does not: the instance may have changed since.
    """
    seen = _found()[_SEEN].get(name)
    if seen and suffices(seen):
        return seen, ""
    answer = __salt__["brine.ask"]("instance", "info", name)
    return ({}, answer["refused"]) if "refused" in answer else (answer["said"], "")


def _trial(wanted: str) -> Result | None:
    """The changes that a definition would make, by the trial of all that are declared. None if the
    trial does not know them, or if it failed."""
    found = _found()[_TRIED].get(wanted, {})
    return found if "changed" in found else None


def _found() -> dict[str, dict[str, Result]]:
    """The look at all instances in this run: their states by name, and the changes that the
    definition of each declared spec would make. It is empty where a state runs alone."""
    if not __lowstate__:
        return {_SEEN: {}, _TRIED: {}}
    if _FOUND not in __context__:
        tried = {}
        if declared := list(_declared()):
            answer = _define(f"[{','.join(declared)}]", "--dry-run")
            results = answer.get("said", {}).get("instances", [])
            tried = dict(zip(declared, results, strict=False))
            seen = _states(results)
        else:
            # One with a fault is not in the list. It is asked for by its name.
            listed = __salt__["brine.ask"]("instance", "list").get("said", [])
            seen = {one["name"]: one for one in listed}
        __context__[_FOUND] = {_SEEN: seen, _TRIED: tried}
    found: dict[str, dict[str, Result]] = __context__[_FOUND]
    return found


def _states(rows: Sequence[Result]) -> dict[str, Result]:
    """The states of instances in a trial, by name, as ``brine instance info`` has them."""
    known = [one for one in rows if one.get("before") and one.get("state")]
    return {one["name"]: {**one["before"], **one, **one["state"]} for one in known}


def _declared() -> Iterator[str]:
    """The specs of all such states in this run."""
    for low in __lowstate__:
        if (low["state"], low["fun"]) == ("brine_instance", "defined"):
            name, spec = low["name"], low.get("spec") or {}
            if isinstance(spec, Mapping) and spec.get("name", name) == name:
                yield _wanted(name, spec)


def _forget(name: str) -> None:
    """Forget the look at an instance that has changed, so that the next state looks anew."""
    __context__.get(_FOUND, {}).get(_SEEN, {}).pop(name, None)


def _failure(name: str, comment: str) -> Result:
    return {"name": name, "result": False, "changes": {}, "comment": comment}


def _success(name: str, changes: Result, comment: str, *notes: str) -> Result:
    result = None if changes and __opts__["test"] else True
    text = "\n".join([f"{name} {comment}", *notes])
    return {"name": name, "result": result, "changes": changes, "comment": text}
