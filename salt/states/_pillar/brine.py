"""
What each node of the cluster gets of its configuration
=======================================================

An external pillar. On the Salt master, whose host has the cluster's configuration
(``brine:config:apply`` in its pillar)::

    ext_pillar:
      - brine:
          files:
            - /etc/brine/users

A minion whose id is the name of a node, where either may be the short one, gets, under
``brine:distributed``, what the state ``brine.config`` puts in place there: the configuration if it
is a master candidate, else an excerpt; ssconf's values; and files: VNC passwords and the like that
the cluster or an instance of that node names, and all of ``files``, each with its owner, its group
and its mode. A folder counts as all files below it; ``unread`` names what can't be read. If
``brine.rotate_key`` keeps the cluster's key, it gets that, too. Other minions get nothing.

The master must be able to read these files. If it does not run as root (Salt's packages have it run
as ``salt``), set ``user: root`` in its configuration.
"""

from __future__ import annotations

import base64
import contextlib
import grp
import json
import logging
import os
import pwd
import stat
import subprocess
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    __opts__: dict[str, Any] = {}

_KEYS = "/etc/brine/salt/keys.json"
_LARGEST_FILE = 1024 * 1024
_MOST_FILES = 1000
_TIMEOUT_S = 60

log = logging.getLogger(__name__)


def ext_pillar(
    minion_id: str, pillar: Mapping[str, Any], *more: Any, files: Iterable[str] = ()
) -> dict[str, Any]:
    """A minion's part of the configuration, which is empty if the minion is no node of it. If the
    part can't be found out, it is a ``fault``, and the minion's states fail. So they do with
    ``brine_fault``, if Salt would not merge the part with the minion's pillar.

    :param more: nothing; Salt gives it what else stands in the master's configuration.
    :param files: paths of further files that each node gets, and of folders of them.
    """
    try:
        listed = isinstance(files, (list, tuple)) and all(map(_is_below_root, files))
        if more or not listed:
            raise ValueError("ext_pillar: give brine {} or {files: [/PATH, ...]}")
        exported = _exported(minion_id)
        if exported is None or not _is_node(exported["node"], minion_id):
            return {}
        if fault := _merging_fault(pillar):
            return {"brine_fault": fault}
        inside = pillar.get("brine")
        inside = inside if isinstance(inside, dict) else {}
        by_hand, passwords = _password_files(inside)
        contents, unread = _read_all([*exported.pop("files"), *passwords, *files])
        given = {**exported, "files": contents, "unread": [*unread, *by_hand]}
        found: dict[str, Any] = {"distributed": given}
        if keys := _keys(inside):
            found["confd"] = keys
    except FileNotFoundError as error:  # the master has no brine yet
        _forget_given()
        log.error("brine: no pillar for %s: %s", minion_id, _one_line(error))
        return {}
    except Exception as error:  # any that rises would leave the minion without its pillar
        log.error("brine: no pillar for %s: %s", minion_id, _one_line(error))
        return {"brine": {"distributed": {"fault": "the log of the Salt master says why"}}}
    return {"brine": found}


def _merging_fault(pillar: Mapping[str, Any]) -> str:
    """Why Salt would not merge this pillar into the minion's own ``brine``; empty if it does."""
    strategy = __opts__.get("pillar_source_merging_strategy", "smart")
    renderer = str(__opts__.get("renderer", ""))
    keeps_one = strategy in ("aggregate", "list", "overwrite")
    keeps_one = keeps_one or (strategy == "smart" and "yamlex" in renderer)
    # With ext_pillar_first, the minion's own comes later.
    if not keeps_one or not ("brine" in pillar or __opts__.get("ext_pillar_first")):
        return ""
    option = f"pillar_source_merging_strategy: {strategy}"
    text = "does not merge the external pillar brine with the rest of pillar brine"
    return f"{option}, in the configuration of the Salt master, {text}: use recurse"


def _forget_given() -> None:
    """Have the runner's next ``brine.redistribute`` go to all nodes: this one, which may be one of
    them, gets nothing, although the configuration that was given last may come back as it was."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(__opts__["cachedir"], "brine", "given"))


def _is_below_root(path: Any) -> bool:
    return isinstance(path, str) and os.path.isabs(path) and os.path.normpath(path).strip("/") != ""


def _exported(minion_id: str) -> dict[str, Any] | None:
    """The node's part, as ``brine`` exports it; None if the minion is no node."""
    command = ["brine", "config", "export-node", minion_id, "--json"]
    run = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
    )
    if run.returncode != 0:
        said = run.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
        # The first run of the states on the writer makes the configuration.
        if said[0].endswith("there is no configuration"):
            _forget_given()
        elif "there is no node" not in said[0]:
            raise RuntimeError(said[0])
        log.debug("brine: %s is no node: %s", minion_id, said[0])
        return None
    exported: dict[str, Any] = json.loads(run.stdout)
    return exported


def _is_node(node: str, minion_id: str) -> bool:
    """Whether a minion is the node whose name or short name it has: not if another minion has the
    whole name.

    :raises ValueError: if that is not known.
    """
    accepted = []
    with contextlib.suppress(FileNotFoundError):  # without a master
        accepted = os.listdir(os.path.join(__opts__["pki_dir"], "minions"))
    if minion_id == node or not _is_same(node, minion_id):
        return minion_id == node
    wholes = [one for one in accepted if one.lower() == node.lower()]
    is_whole = minion_id.lower() == node.lower()
    if node in wholes or (wholes and not is_whole):
        return False
    rivals = [one for one in (wholes if is_whole else accepted) if _is_same(node, one)]
    others = ", ".join(sorted(one for one in rivals if one != minion_id))
    if others:
        raise ValueError(f"{others} may be {node}, too: give the node its whole name")
    return True


def _is_same(node: str, minion_id: str) -> bool:
    """Whether both name the same node; case does not count. ``brine`` also knows it by its UUID."""
    node, minion_id = node.lower(), minion_id.lower()
    return minion_id in (node, node.partition(".")[0]) or minion_id.partition(".")[0] == node


def _password_files(inside: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """VNC password files that specs in the node's own pillar name: those that the master does not
    have, and those that it has."""
    instance = inside.get("instance")
    specs = instance.get("instances") if isinstance(instance, dict) else None
    specs = specs.values() if isinstance(specs, dict) else ()
    paths = [spec.get("vnc_password_file") for spec in specs if isinstance(spec, dict)]
    named = [path for path in paths if isinstance(path, str)]
    there = [path for path in named if os.path.isfile(path)]
    return [path for path in named if path not in there], there


def _read_all(paths: Iterable[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Each file, and each file below a folder, with what the state needs to write it; and those
    that can't be read, which are logged.

    :raises ValueError: if there are too many.
    """
    found: dict[str, dict[str, Any]] = {}
    unread: list[str] = []
    sorted_paths = sorted({os.path.normpath(path) for path in paths if os.path.isabs(path)})
    for count, file in enumerate(chain.from_iterable(map(_below, sorted_paths))):
        if count == _MOST_FILES:
            raise ValueError(f"there are more than {_MOST_FILES} files")
        try:
            found[file] = _read(file)
        except (OSError, ValueError) as error:
            log.error("brine: %s is given to no node: %s", file, _one_line(error))
            unread.append(file)
    return found, unread


def _below(path: str) -> Iterator[str]:
    """The files below a folder; what is no folder, or can't be looked into, counts as a file."""
    unread: list[OSError] = []
    for folder, _, names in os.walk(path, onerror=unread.append):
        for name in sorted(names):
            yield os.path.join(folder, name)
    yield from (str(error.filename) for error in unread)


def _read(path: str) -> dict[str, Any]:
    # A pipe would have us wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise ValueError(f"it is larger than {_LARGEST_FILE} bytes")
    return {
        "contents": base64.b64encode(data).decode(),
        "user": _name(pwd.getpwuid, status.st_uid),
        "group": _name(grp.getgrgid, status.st_gid),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
    }


def _name(lookup: Any, number: int) -> str:
    """The name of a user or a group, by which other nodes know it; else its number."""
    try:
        return str(lookup(number)[0])
    except KeyError:
        return str(number)


def _keys(inside: Mapping[str, Any]) -> dict[str, str]:
    """The cluster's keys, if the runner keeps them; a key that pillar declares counts more."""
    try:
        with open(_KEYS, encoding="ascii") as file:
            keys = json.load(file)
    except FileNotFoundError:
        return {}
    confd = inside.get("confd")
    if isinstance(confd, dict) and confd.get("key"):
        log.warning("brine: pillar brine:confd:key is used, and not %s", _KEYS)
        return {}
    return {"key": keys["key"], "previous_key": keys.get("previous_key", "")}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
