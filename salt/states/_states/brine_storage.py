"""
Storage units, where virtual machines have their disks
======================================================

::

    /srv/vms:
      brine_storage.unit

    /dev/sdb:
      brine_storage.allocatable:
        - allocatable: false

The states need the package brine-storage; see brine-storage(1).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    __opts__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]

_FOLDER, _DEVICE = "file", "lvm-pv"


def unit(name: str) -> Result:
    """
    Ensure a folder is a storage unit. It is made if it is not there.

    Example::

        /srv/vms:
          brine_storage.unit: []

    :param name: an absolute path.
    """
    return _folder(name, is_wanted=True)


def absent(name: str) -> Result:
    """
    Ensure a folder is no storage unit. A folder with files in it is refused.

    Example::

        /srv/vms:
          brine_storage.absent: []

    :param name: an absolute path.
    """
    return _folder(name, is_wanted=False)


def allocatable(name: str, allocatable: bool = True) -> Result:
    """
    Ensure new volumes may take space on a physical volume of LVM, or may not.

    Example::

        /dev/sdb:
          brine_storage.allocatable:
            - allocatable: false

    :param name: of its device, as ``brine storage list`` shows it; or its UUID.
    :param allocatable: whether they may.
    """
    if not isinstance(allocatable, bool):
        return _failure(name, f"allocatable must be true or false, but is {allocatable!r}")
    found, refused = _unit(_DEVICE, name)
    if refused or not found:
        return _failure(name, refused or "there is no such physical volume")
    if found["allocatable"] is allocatable:
        return _result(name, {}, "is as it should be")
    change = {"old": found["allocatable"], "new": allocatable}
    wanted = ("--allocatable", "yes" if allocatable else "no")
    return _changed(name, change, "changed", "modify", _DEVICE, found["name"], *wanted)


def _folder(name: str, *, is_wanted: bool) -> Result:
    found, refused = _unit(_FOLDER, name)
    if refused:
        return _failure(name, refused)
    if is_wanted and not (found and found["status"] != "missing"):
        return _changed(name, {"old": None, "new": _FOLDER}, "made", "create", _FOLDER, name)
    if found and not is_wanted:
        return _changed(name, {"old": _FOLDER, "new": None}, "removed", "remove", _FOLDER, name)
    return _result(name, {}, "is a storage unit" if is_wanted else "is no storage unit")


def _unit(kind: str, name: str) -> tuple[Result | None, str]:
    """The unit of that name, if there is one; or why that is not known."""
    answer = __salt__["brine.ask"]("storage", "list", "--type", kind)
    if refused := answer.get("refused"):
        return None, refused
    # Devices have several names, such as those below /dev/disk.
    names = {name, os.path.realpath(name)} if kind == _DEVICE else {name}
    found = (one for one in answer["said"] if names & {one["name"], one.get("uuid")})
    return next(found, None), ""


def _changed(name: str, change: Result, done: str, *command: str) -> Result:
    changes = {name: change}
    if __opts__["test"]:
        return _result(name, changes, f"would be {done}")
    answer = __salt__["brine.ask"]("storage", *command)
    if refused := answer.get("refused"):
        return _failure(name, refused)
    return _result(name, changes, f"was {done}")


def _failure(name: str, text: str) -> Result:
    return {"name": name, "result": False, "changes": {}, "comment": f"{name}: {text}"}


def _result(name: str, changes: Result, text: str) -> Result:
    result = None if changes and __opts__["test"] else True
    return {"name": name, "result": result, "changes": changes, "comment": f"{name} {text}"}
