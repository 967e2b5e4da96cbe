"""
Storage units, where virtual machines have their disks
======================================================

::

    /srv/vms:
      brine_storage.unit

    vg1:
      brine_storage.default

    /dev/sdb:
      brine_storage.allocatable:
        - allocatable: false

The state ``brine.storage`` makes these of pillar. They need the package brine-storage, see
brine-storage(1); in test mode a node may lack it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    __context__: dict[str, Any] = {}
    __opts__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]

_FOLDER, _DEVICE = "file", "lvm-pv"
_FOUND = "brine_storage"


def mod_init(low: Mapping[str, Any]) -> bool:
    """Begin anew: Salt calls this before the first of these states in a run, and ``__context__``
    may still have what another run found."""
    __context__.pop(_FOUND, None)
    return True


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


def default(name: str) -> Result:
    """
    Ensure a unit is the one of new disks that name none.

    Example::

        vg1:
          brine_storage.default: []

    :param name: a volume group, or a folder that is a unit.
    """
    before, refused = _default()
    if refused:
        return _failure(name, refused)
    if before == name:
        return _result(name, {}, "is the default unit")
    change = {"old": before or None, "new": name}
    return _changed(name, change, "made the default unit", "default", name)


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
    wanted = ("--allocatable", "yes" if allocatable else "no")
    if _is_to_be_installed():
        change = {"old": None, "new": allocatable}
        return _changed(name, change, "changed", "modify", _DEVICE, name, *wanted)
    if refused or not found:
        return _failure(name, refused or "there is no such physical volume")
    if found["allocatable"] is allocatable:
        return _result(name, {}, "is as it should be")
    change = {"old": found["allocatable"], "new": allocatable}
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
    units, refused = _asked("list", "--type", kind)
    # Devices have several names, such as those below /dev/disk.
    names = {name, os.path.realpath(name)} if kind == _DEVICE else {name}
    found = (one for one in units or () if names & {one["name"], one.get("uuid")})
    return next(found, None), refused


def _default() -> tuple[str, str]:
    """The default unit, or an empty text; or why that is not known."""
    said, refused = _asked("default")
    return (said or {}).get("default_unit", ""), refused


def _asked(*command: str) -> tuple[Any, str]:
    """What ``brine storage`` prints; or why it prints nothing. A run asks once, until something
    changes."""
    if _is_to_be_installed():
        return None, ""
    found = __context__.setdefault(_FOUND, {})
    if command not in found:
        found[command] = __salt__["brine.ask"]("storage", *command)
    answer = found[command]
    return (None, refused) if (refused := answer.get("refused")) else (answer["said"], "")


def _is_to_be_installed() -> bool:
    """Whether this is a trial on a node that lacks the command."""
    return bool(__opts__["test"]) and not __salt__["pkg.version"]("brine-storage")


def _changed(name: str, change: Result, done: str, *command: str) -> Result:
    changes = {name: change}
    if __opts__["test"]:
        return _result(name, changes, f"would be {done}")
    answer = __salt__["brine.ask"]("storage", *command)
    __context__.pop(_FOUND, None)
    if refused := answer.get("refused"):
        return _failure(name, refused)
    return _result(name, changes, f"was {done}")


def _failure(name: str, text: str) -> Result:
    return {"name": name, "result": False, "changes": {}, "comment": f"{name}: {text}"}


def _result(name: str, changes: Result, text: str) -> Result:
    result = None if changes and __opts__["test"] else True
    return {"name": name, "result": result, "changes": changes, "comment": f"{name} {text}"}
