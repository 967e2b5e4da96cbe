"""
The cluster's configuration, declared in pillar
===============================================

On the node where the configuration is made, usually the master::

    cluster-configuration:
      brine_config.applied:
        - pillar: brine

    /var/lib/brine/ssconf:
      brine_config.ssconf_exported: []

Both talk to the ``brine`` command only, by the execution module ``brine``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    __opts__: dict[str, Any] = {}
    __pillar__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]

# What defaults.yaml has is for the states of this formula. "brine config apply" gets all else, and
# refuses what it does not know.
_OTHERS: tuple[str, ...] = ("version", "repository", "config", "kvmd", "confd")
_OTHERS += ("hotplug", "instance", "lifecycle", "watcher")


def applied(name: str, pillar: str = "brine", prune: bool = False) -> Result:
    """Merge what pillar declares into the configuration, as ``brine config apply`` does.

    :param name: for people; nothing depends on it.
    :param pillar: the key of pillar under which the sections are (cluster, nodes, instances, ...).
        A section that is not known is refused.
    :param prune: whether objects that a declared section does not name are removed. A section that
        is empty removes none.
    """
    # Not pillar.get, which hides values from states, as of Salt 3008.
    inside = __pillar__.get(pillar) or {}
    if not isinstance(inside, dict):
        return _failure(name, f"pillar {pillar} must be a mapping")
    declared = {key: inside[key] for key in inside if key not in _OTHERS}
    options = ["--prune"] if prune else []
    done = _run(name, "config", "apply", "-", *options, stdin=json.dumps(declared))
    if "result" in done:
        return done
    changes = {one["pointer"]: _change(one) for one in done["said"]["changes"]}
    before, after = done["said"]["old_serial"], done["said"]["new_serial"]
    if not changes:
        comment = f"the configuration is as declared: serial {before}"
    elif __opts__["test"]:
        comment = f"would be changed in {len(changes)} places"
    else:
        comment = f"changed in {len(changes)} places: serial {after}"
    return _result(name, changes, "\n".join([comment, *done["said"]["notes"]]))


def ssconf_exported(name: str, config: str = "/var/lib/brine/config.data") -> Result:
    """Write what every node should know of the cluster, as ``brine config export-ssconf`` does.

    :param name: the folder.
    :param config: the configuration; where there is none, nothing is done.
    """
    if not __salt__["file.file_exists"](config):
        return _result(name, {}, f"there is no {config} to export from")
    done = _run(name, "config", "--config", config, "export-ssconf", name)
    if "result" in done:
        return done
    changes = {f"ssconf_{key}": "written" for key in done["said"]["written"]}
    changes |= {f"ssconf_{key}": "removed" for key in done["said"]["removed"]}
    if not changes:
        comment = "all values are as the configuration has them"
    else:
        done_word = "would change" if __opts__["test"] else "changed"
        comment = f"{len(changes)} values {done_word}"
    return _result(name, changes, comment)


def _change(one: dict[str, Any]) -> dict[str, Any]:
    """A change as Salt shows it: that of an object as a whole has no values of its own."""
    old, new = one["old"], one["new"]
    if old is None and new is None and one["change"] in ("added", "removed"):
        new = f"{one['change']}: {one['note']}" if one.get("note") else one["change"]
    return {"old": old, "new": new}


def _run(name: str, *command: str, stdin: str = "") -> Result:
    """What a command printed, as ``said``; or what the state is to return, if that is an error."""
    if __opts__["test"]:
        command = (*command, "--dry-run")
        if not __salt__["cmd.which"]("brine"):
            return {**_result(name, {}, "brine would be installed first"), "result": None}
    answer = __salt__["brine.ask"](*command, stdin=stdin)
    return _failure(name, answer["refused"]) if "refused" in answer else answer


def _failure(name: str, comment: str) -> Result:
    return {"name": name, "result": False, "changes": {}, "comment": comment}


def _result(name: str, changes: Result, comment: str) -> Result:
    result = None if changes and __opts__["test"] else True
    return {"name": name, "result": result, "changes": changes, "comment": comment}
