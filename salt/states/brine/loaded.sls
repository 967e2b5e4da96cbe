#!py
"""What Salt loads on a minion of this formula's own: brine*.py in the folders beside this one.

Applying one formula does not sync them, as applying all does. They come from the environment of
this file, or else from base. Salt's own sync would remove the modules of other environments.

Test mode needs modules, too, but leaves the minion's beacons as they are.
"""

from __future__ import annotations

import re
from typing import Any

OURS = re.compile(r"_((?:modules|states|grains|beacons)/brine\w*\.py)")


def run() -> dict[str, Any]:
    """The state after which they are loaded."""
    parent = "".join(f"{folder}/" for folder in __sls__.split(".")[:-2])
    environment_of: dict[str, str] = {}
    # salt-ssh brings the modules itself, and has the options of the master besides the node's.
    is_ssh = "__master_opts__" in __opts__
    for environment in () if is_ssh else dict.fromkeys(["base", __env__]):
        files = __salt__["cp.list_master"](environment, f"{parent}_")
        environment_of.update(dict.fromkeys(files, environment))
    synced, test = False, __opts__["test"]
    for file, environment in sorted(environment_of.items()):
        ours = OURS.fullmatch(file, len(parent))
        if ours and not (test and ours[1].startswith("beacons/")):
            synced = _sync(file, ours[1], environment) or synced
    # The reload is of this run, and of a minion that runs. Not of its beacons, before Salt 3008.
    if synced and not test and __opts__["file_client"] != "local":
        __salt__["saltutil.refresh_beacons"]()
    reload = [{"reload_grains": synced}, {"force_reload_modules": synced}]
    loaded = {"test.nop": reload}
    return {"brine-states-loaded": loaded}


def _sync(file: str, place: str, environment: str) -> bool:
    """Copy a file to where Salt's loader looks, unless it is there; returns whether it was copied."""
    copy = f"{__opts__['extension_modules']}/{place}"
    newest = __salt__["cp.cache_file"](f"salt://{file}", environment)
    is_there = __salt__["file.file_exists"](copy)
    if not newest or (is_there and _hash(copy) == _hash(newest)):
        return False
    return bool(__salt__["cp.get_file"](f"salt://{file}", copy, saltenv=environment, makedirs=True))


def _hash(file: str) -> str:
    return __salt__["file.get_hash"](file)
