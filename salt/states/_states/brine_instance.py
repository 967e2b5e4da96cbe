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

The state ``brine.instance`` makes these of pillar. An instance that its user has shut down stays
down: ``running`` leaves it alone, and says so. It also leaves the watcher its work: it starts
nothing while the watcher is paused, and no instance that the watcher has given up.

All of them talk to the ``brine`` command only: Salt's own packages have a Python that does not see
the distribution's modules.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    __opts__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]

_OWNERS = "/run/brine/lifecycle"
_WATCHER = "/usr/lib/systemd/system/brine-watcher.service"
_UNIT_FILE = "/usr/lib/systemd/system/brine-instance@.service"
_SPEC_FILE = "/var/lib/brine/instances/{}.json"
_GOING = ("running", "starting", "stopping")
_WILL = ("admin_state", "admin_state_source")


def defined(name: str, spec: Mapping[str, Any] | None = None) -> Result:
    """Have an instance be defined so, as ``brine instance define`` does. It starts and stops none.

    One that runs has what is new from its next start on. An ``admin_state`` of ``up`` or ``down``
    does not replace what its user has said by shutting it down; ``offline`` does.

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
    wanted, notes = {**spec, "name": name}, []
    before, refused = _look(name)
    if refused:
        return _failure(name, refused)
    if before and before["admin_state_source"] == "user" and spec.get("admin_state") != "offline":
        wanted = {key: value for key, value in wanted.items() if key not in _WILL}
        notes = ["its user has shut it down, and that stays"] if "admin_state" in spec else []
    dry_run = ["--dry-run"] if __opts__["test"] else []
    stdin = json.dumps(wanted, default=str)
    after, refused = _brine_json("instance", "define", "-", "--json", *dry_run, stdin=stdin)
    if refused:
        return _failure(name, refused)
    if not after["changed"]:
        return _success(name, {}, "is as declared", *notes, *_pending(before))
    if before is None:
        changes: Result = {name: {"old": None, "new": "defined"}}
    else:
        changes = _difference(before["spec"], after["spec"])
        if before["oper_state"] in _GOING and not changes.keys() <= set(_WILL):
            notes += _what_waits(name)
    return _success(name, changes, "would be defined" if dry_run else "defined", *notes)


def running(name: str) -> Result:
    """Start an instance that is down, as ``brine instance start`` does, but not against its user's
    will.

    An instance that its user has shut down is left alone, unless its spec says ``user_shutdown:
    restart``; so is one that is just being stopped, or that the watcher has given up. While the
    watcher is paused, nothing is started. The watcher's tries stay as they are.

    :param name: of the instance; it must be defined.
    """
    if (early := _not_there_yet(name, "would be started once it is defined")) is not None:
        return early
    seen, refused = _info(name)
    if refused:
        return _failure(name, refused)
    if seen["status"] in ("running", "starting"):
        return _success(name, {}, "runs", *_pending(seen))
    if seen["oper_state"] == "stopping":
        return _success(name, {}, "is just being stopped, and left alone")
    if _is_off_by_its_user(seen):
        return _success(name, {}, f"left alone: {seen['why'] or 'it was shut down by its user'}")
    why, refused = _held_back(name)
    if refused:
        return _failure(name, refused)
    if why:
        return _success(name, {}, f"left alone: {why}")
    return _act(name, ["start", "--keep-tries", name], seen["status"], "running", "started")


def stopped(name: str, force: bool = False, timeout: float | None = None) -> Result:
    """Have an instance not run, as ``brine instance stop`` does: its guest is asked.

    One that is not defined is none that runs.

    :param name: of the instance.
    :param force: whether to end it if its guest does not shut down in time. If not, it runs on, and
        the state fails.
    :param timeout: how long the guest may take, in seconds; None is what its spec says.
    """
    if (early := _not_there_yet(name, "is not defined", result=True)) is not None:
        return early
    seen, refused = _info(name)
    if refused:
        return _failure(name, refused)
    if seen["oper_state"] not in _GOING and seen["admin_state"] != "up":
        return _success(name, {}, "does not run")
    options = ["--force"] if force else []
    options += [] if timeout is None else ["--timeout", str(timeout)]
    return _act(name, ["stop", name, *options], seen["status"], "stopped", "stopped")


def absent(name: str) -> Result:
    """Have an instance not be defined, as ``brine instance undefine`` does.

    One that runs is not touched, and the state fails. Its disks are never touched.

    :param name: of the instance.
    """
    if (early := _not_there_yet(name, "is not defined", result=True)) is not None:
        return early
    if __opts__["test"]:
        seen, _ = _info(name)  # which a damaged spec has not; it can be forgotten as well
        if seen.get("oper_state") in _GOING:
            return _failure(name, f"{name} is {seen['oper_state']}, and would not be undefined")
    return _act(name, ["undefine", name], "defined", None, "undefined")


def elsewhere(name: str, node: str) -> Result:
    """Have an instance not start here, as it is another node's by now: it is ``offline``.

    One that runs is not touched, and the state fails. ``brine instance undefine`` forgets it.

    :param name: of the instance.
    :param node: whose it is.
    """
    if (early := _not_there_yet(name, f"is {node}'s", result=True)) is not None:
        return early
    seen, refused = _info(name)
    if refused:
        return _failure(name, refused)
    if seen["oper_state"] in _GOING:
        hint = f"brine instance stop {name}, before {node} starts it"
        return _failure(name, f"{name} is {node}'s, but is {seen['oper_state']} here; {hint}")
    if seen["admin_state"] == "offline":
        return _success(name, {}, f"is {node}'s, and offline here")
    spec = {**seen["spec"], "admin_state": "offline"}
    changes = {"admin_state": {"old": seen["admin_state"], "new": "offline"}}
    if not __opts__["test"]:
        _, refused = _brine("instance", "define", "-", stdin=json.dumps(spec))
        if refused:
            return _failure(name, refused)
    return _success(name, changes, f"is {node}'s, and offline here")


def none_running(name: str, owned: bool = False) -> Result:
    """Fail if an instance runs: what is to follow would take away what looks after it.

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


def _is_off_by_its_user(seen: Result) -> bool:
    """Whether an instance is down by its user's will, and that is to be followed."""
    if seen["admin_state_source"] == "user":
        return True
    return bool(seen["oper_state"] == "S" and seen["spec"]["user_shutdown"] != "restart")


def _held_back(name: str) -> tuple[str, str]:
    """Why the watcher would not have an instance started now, and why that can't be found out;
    both are empty if nothing is against it."""
    if not __salt__["file.file_exists"](_WATCHER):
        return "", ""
    status, refused = _brine_json("watcher", "status", "--json")
    if refused:
        return "", refused
    if until := status["paused_until"]:
        text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(until))
        return f"the watcher is paused until {text}; brine watcher resume ends the pause", ""
    tries = status["tries"].get(name, {})
    if tries.get("given_up"):
        hint = f"brine instance start {name} starts it, and has the watcher begin anew"
        return f"the watcher has given it up after {tries['count']} tries; {hint}", ""
    return "", ""


def _what_waits(name: str) -> list[str]:
    """What is to be said of an instance that runs, and was defined anew just now."""
    later = "it runs, and has this from its next start on"
    if __opts__["test"]:
        return [later]
    seen, _ = _info(name)
    # A Brine that does not say what waits has all wait.
    return [later, *_pending(seen)] if seen.get("restart_pending") != [] else []


def _pending(seen: Mapping[str, Any] | None) -> list[str]:
    """What of a running instance waits for a restart, as a line if there is something."""
    keys = (seen or {}).get("restart_pending")
    return [f"restart pending: {', '.join(keys)}"] if keys else []


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Result:
    """The keys of a spec that another one has other values for."""
    return {
        key: {"old": before.get(key), "new": value}
        for key, value in after.items()
        if value != before.get(key)
    }


def _act(name: str, command: list[str], old: str, new: str | None, done: str) -> Result:
    """Have the command change something; in test mode only say so."""
    changes = {name: {"old": old, "new": new}}
    if __opts__["test"]:
        return _success(name, changes, f"would be {done}")
    _, refused = _brine("instance", *command)
    return _failure(name, refused) if refused else _success(name, changes, done)


def _not_installed(name: str) -> Result | None:
    """What a state returns in test mode where the package would be installed first."""
    if not __opts__["test"] or __salt__["file.file_exists"](_UNIT_FILE):
        return None
    comment = "brine-instance would be installed first"
    return {"name": name, "result": None, "changes": {}, "comment": comment}


def _not_there_yet(name: str, comment: str, *, result: bool | None = None) -> Result | None:
    """What a state returns of an instance that is not defined; None if it is.

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


def _look(name: str) -> tuple[Result | None, str]:
    """What there is of an instance, and why that can't be found out; None if there is none, or its
    spec is no JSON any more. What its user wants is not known then."""
    file = _SPEC_FILE.format(name)
    if not __salt__["file.file_exists"](file):
        return None, ""
    seen, refused = _info(name)
    if refused:
        try:
            json.loads(__salt__["file.read"](file))
        except ValueError:
            return None, ""
    return seen, refused


def _info(name: str) -> tuple[Result, str]:
    """What is said of an instance, and what was said against it; one of them is empty."""
    return _brine_json("instance", "info", name, "--json")


def _brine_json(*arguments: str, stdin: str = "") -> tuple[Result, str]:
    """The object that ``brine`` printed, and what it said if it failed; one of them is empty."""
    text, refused = _brine(*arguments, stdin=stdin)
    if refused:
        return {}, refused
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        return {}, f"brine {' '.join(arguments)} succeeded, but did not print JSON"
    return said, ""


def _brine(*arguments: str, stdin: str = "") -> tuple[str, str]:
    """What ``brine`` printed, and what it said if it failed; one of them is empty."""
    command = ["brine", *arguments]
    # Quiet: a failure is told by the state, once.
    try:
        run = __salt__["cmd.run_all"](
            command, stdin=stdin, python_shell=False, output_loglevel="quiet", ignore_retcode=True
        )
    except Exception as error:
        # Salt's error also has the input and the environment.
        _, is_given, reason = str(error).rpartition(", reason: ")
        return "", f"brine can't be run: {reason if is_given else type(error).__name__}"
    if run["retcode"] != 0:
        return "", run["stderr"] or run["stdout"] or f"failed with status {run['retcode']}"
    return str(run["stdout"]), ""


def _failure(name: str, comment: str) -> Result:
    return {"name": name, "result": False, "changes": {}, "comment": comment}


def _success(name: str, changes: Result, comment: str, *notes: str) -> Result:
    result = None if changes and __opts__["test"] else True
    text = "\n".join([f"{name} {comment}", *notes])
    return {"name": name, "result": result, "changes": changes, "comment": text}
