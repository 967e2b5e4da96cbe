"""
The cluster's configuration, declared in pillar
===============================================

On the host where the configuration is made, usually the master::

    cluster-configuration:
      brine_config.applied:
        - pillar: brine

    /var/lib/brine/ssconf:
      brine_config.ssconf_exported: []

On the other nodes of the cluster, to which the external pillar ``brine`` gives what they need::

    /var/lib/brine/config.data:
      brine_config.copied: []

    /var/lib/brine/ssconf:
      brine_config.ssconf_copied: []

    cluster-files:
      brine_config.files_copied: []

When ``applied`` has changed something, the minion sends the event ``brine/config/changed``, and so
does ``announced``. The reactor ``brine/reactor/changed.sls`` then has the master bring it to the
other nodes.

All of them talk to the ``brine`` command only, by the execution module ``brine``.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import grp
import os
import pwd
import stat
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    __opts__: dict[str, Any] = {}
    __pillar__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]

CREATED = "/var/lib/brine/salt-files"
"""Names the files that ``files_copied`` has created, each with a NUL after it. A purge of the
packages removes these files, too."""

_ETC = "/etc/brine"
_MOST_LINKS = 40  # as the kernel's own limit

# What map.py has defaults of is for the states of this formula. "brine config apply" gets all
# else, and refuses what it does not know.
_OTHERS: tuple[str, ...] = ("version", "repository", "config", "kvmd", "confd")
_OTHERS += (
    "hotplug",
    "network",
    "storage",
    "instance",
    "lifecycle",
    "watcher",
    "moves",
    "master",
    "distributed",
)


def applied(name: str, pillar: str = "brine", prune: bool = False) -> Result:
    """Ensure the configuration has all that pillar declares, as ``brine config apply`` does.

    Example::

        cluster-configuration:
          brine_config.applied:
            - pillar: brine
            - prune: true

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
    done = _run(name, "config", "apply", "-", *options, stdin=declared)
    if "result" in done:
        return done
    changes = {one["pointer"]: _change(one) for one in done["said"]["changes"]}
    before, after = done["said"]["old_serial"], done["said"]["new_serial"]
    if not changes:
        comment = f"the configuration is as declared: serial {before}"
    elif __opts__["test"]:
        comment = f"would be changed in {len(changes)} place{'s' * (len(changes) != 1)}"
    else:
        many = f"{len(changes)} place{'s' * (len(changes) != 1)}"
        comment = f"changed in {many}: serial {after}"
        _ring()
    return _result(name, changes, "\n".join([comment, *done["said"]["notes"]]))


def announced(name: str) -> Result:
    """Ensure the master knows that the configuration exists. While this node had no ``brine``,
    pillar of the other nodes was rendered without their parts.

    Example::

        cluster-known-to-the-master:
          brine_config.announced:
            - onchanges:
              - pkg: brine-common

    :param name: for people; nothing depends on it.
    """
    if not __opts__["test"]:
        _ring()
    return _result(name, {}, "the master looks whether the other nodes have the configuration")


def _ring() -> None:
    """Send the event, which is no more than a bell: any minion may send it, so the master looks for
    itself."""
    if __opts__["file_client"] != "local":
        __salt__["event.fire_master"]({}, "brine/config/changed")


def ssconf_exported(name: str, config: str = "/var/lib/brine/config.data") -> Result:
    """Ensure a folder has the values that every node of the cluster knows, as ``brine config
    export-ssconf`` writes them.

    Example::

        /var/lib/brine/ssconf:
          brine_config.ssconf_exported: []

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
        comment = f"values that {done_word}: {len(changes)}"
    return _result(name, changes, comment)


def copied(name: str = "/var/lib/brine/config.data") -> Result:
    """Ensure a master candidate has the configuration that the external pillar gives it.

    One that is damaged, or older than the node's, replaces nothing. A node that is no candidate
    has no configuration: one that it had is kept aside as ``config.data.former-TIME``, so that no
    daemon answers with it.

    Example::

        /var/lib/brine/config.data:
          brine_config.copied: []

    :param name: the configuration.
    """
    given = _distributed()
    if not given:
        return _result(name, {}, "the external pillar brine gives this node nothing")
    try:
        if not given["candidate"]:
            return _kept_aside(name)
        return _replaced(name, given["configuration"], given["serial"])
    except (OSError, LookupError) as error:
        return _failure(name, f"{name} can't be written: {error}")


def _kept_aside(name: str) -> Result:
    """Keep the configuration of a node that is no candidate aside."""
    if not os.path.lexists(name):
        return _result(name, {}, "this node is no master candidate, and has no configuration")
    aside = f"{name}.former-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    if not __opts__["test"]:
        os.rename(name, aside)
    kept = "would be kept" if __opts__["test"] else "is kept"
    comment = f"this node is no master candidate: its configuration {kept} as {aside}"
    return _result(name, {name: {"old": name, "new": aside}}, comment)


def _replaced(name: str, configuration: str, serial: int) -> Result:
    """Replace a candidate's configuration by the master's, unless ``brine`` refuses that."""
    before, data = _content(name), configuration.encode()
    if before == data:
        return _result(name, {}, f"the configuration is as on the master: serial {serial}")
    changes = {name: {"old": "another version" if before else None, "new": f"serial {serial}"}}
    if __opts__["test"] and not __salt__["cmd.which"]("brine"):
        return _result(name, changes, "would be replaced by the master's, if brine accepts it")
    answer = __salt__["brine.ask"]("config", "check-copy", "-", stdin=configuration)
    if "refused" in answer:
        return _failure(name, f"the master's configuration is refused: {answer['refused']}")
    if __opts__["test"]:
        return _result(name, changes, "would be replaced by the master's")
    owner = {"user": "root", "group": "brine", "mode": "0640"}
    os.rename(_written(name, data, owner), name)
    return _result(name, changes, f"replaced by the master's: serial {serial}")


def ssconf_copied(name: str = "/var/lib/brine/ssconf") -> Result:
    """Ensure a folder has the values for every node that the external pillar gives.

    Example::

        /var/lib/brine/ssconf:
          brine_config.ssconf_copied: []

    :param name: the folder.
    """
    values = _distributed().get("ssconf", {})
    files = {f"{name}/{key}": f"{value}\n" if value else "" for key, value in values.items()}
    owner = {"user": "root", "group": "root", "mode": "0644"}
    changes = {}
    try:
        for file, text in files.items():
            if changed := _put(file, text.encode(), owner):
                changes[os.path.basename(file)] = changed
        there = os.listdir(name) if files and os.path.isdir(name) else []
        for key in sorted(one for one in there if one.startswith("ssconf_") and one not in values):
            changes[key] = "removed"
            if not __opts__["test"]:
                os.unlink(f"{name}/{key}")
    except (OSError, LookupError) as error:
        return {**_failure(name, f"{name} can't be written: {error}"), "changes": changes}
    done = "would change" if __opts__["test"] else "changed"
    comment = (
        f"values that {done}: {len(changes)}" if changes else "all values are as on the master"
    )
    return _result(name, changes, comment)


def files_copied(name: str) -> Result:
    """Ensure the files that the external pillar gives, such as VNC passwords, exist with their
    owners and modes. The output shows no content.

    A file that this state has created is removed when the external pillar no longer has it. It
    stays if the master only could not read it. A file in a folder that others than root can write,
    or that they can replace, is refused.

    Example::

        cluster-files:
          brine_config.files_copied: []

    :param name: for people; nothing depends on it.
    """
    if not (distributed := _distributed()):
        return _result(name, {}, "the external pillar brine gives this node nothing")
    wanted, unread = distributed.get("files", {}), distributed.get("unread", ())
    before = _created()
    created = before | {file for file in wanted if not os.path.lexists(file)}
    unneeded = created - wanted.keys()
    unneeded -= {file for file in unneeded if any(_is_below(file, path) for path in unread)}
    changes: Result = {}
    problems: list[str] = []
    try:
        _note_created(created, before)  # first: a run that is killed forgets none
        removed = {file for file in sorted(unneeded) if _is_removed(file, changes, problems)}
        _note_created(created - removed, created)
    except OSError as error:
        problems.append(f"{error.filename}: {error.strerror}")
    for file, given in wanted.items():
        try:
            if changed := _put(file, base64.b64decode(given["contents"]), given):
                changes[file] = changed
        except (OSError, LookupError) as error:
            problems.append(f"{file} can't be written: {error}")
    done = "would change" if __opts__["test"] else "changed"
    comment = f"files that {done}: {len(changes)}" if changes else "all files are as on the master"
    if problems:
        return {**_failure(name, "\n".join([*problems, comment])), "changes": changes}
    return _result(name, changes, comment)


def _is_removed(file: str, changes: Result, problems: list[str]) -> bool:
    """Remove a file, unless the run is a test; whether that went well. It is noted either way."""
    try:
        if os.path.lexists(file):
            _refuse_others(file)
            if not __opts__["test"]:
                os.unlink(file)
            changes[file] = "removed"
    except OSError as error:
        problems.append(f"{file} can't be removed: {error.filename}: {error.strerror}")
        return False
    return True


def files_removed(name: str) -> Result:
    """Ensure no file that ``files_copied`` has created here remains, nor a folder below
    ``/etc/brine`` that is empty then.

    Example::

        cluster-files:
          brine_config.files_removed: []

    :param name: for people; nothing depends on it.
    """
    changes: Result = {}
    problems: list[str] = []
    for file in sorted(_created()):
        folder = os.path.dirname(file)
        is_gone = _is_removed(file, changes, problems)
        if is_gone and not __opts__["test"] and folder.startswith(f"{_ETC}/"):
            with contextlib.suppress(OSError):  # others have files there
                os.rmdir(folder)
    if problems:
        return {**_failure(name, "\n".join(problems)), "changes": changes}
    if not __opts__["test"] and os.path.lexists(CREATED):
        os.unlink(CREATED)
    done = "files that would be removed" if __opts__["test"] else "files removed"
    return _result(name, changes, f"{done}: {len(changes)}" if changes else "there are none")


def _created() -> set[str]:
    """The files that runs of this state have created here."""
    return {os.fsdecode(one) for one in (_content(CREATED) or b"").split(b"\0") if one}


def _note_created(files: set[str], before: set[str]) -> None:
    """Note them, if they are others than before."""
    if files != before and not __opts__["test"]:
        owner = {"user": "0", "group": "0", "mode": "0600"}
        data = b"".join(os.fsencode(file) + b"\0" for file in sorted(files))
        os.rename(_written(CREATED, data, owner), CREATED)


def _is_below(file: str, path: str) -> bool:
    """Whether a file is this one, or below this folder."""
    return file == path or file.startswith(f"{path}/")


def _distributed() -> Result:
    """This node's part from the external pillar; empty if there is none, or it is not known."""
    inside = __pillar__.get("brine")
    given = inside.get("distributed") if isinstance(inside, dict) else None
    return given if isinstance(given, dict) and "fault" not in given else {}


def _put(path: str, data: bytes, owner: Result) -> str:
    """Write a file whole, if it differs; returns the change in words, without content.

    :param owner: the names of its ``user`` and ``group``, and its ``mode``, in octal.
    :raises LookupError: if this node has no such user or group.
    """
    _refuse_others(path)
    before = _content(path)
    changed = "" if before == data else "written" if before is None else "replaced"
    if not changed:
        status = os.stat(path)
        mode = stat.S_IMODE(status.st_mode)
        try:
            is_so = [status.st_uid, status.st_gid, mode] == [*_ids(owner), int(owner["mode"], 8)]
        except LookupError:
            if not __opts__["test"]:  # where packages may be installed first
                raise
            is_so = False
        changed = "" if is_so else "owner or mode changed"
    if changed and not __opts__["test"]:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        _refuse_others(path)  # in a shared folder, another user may have made one meanwhile
        os.rename(_written(path, data, owner), path)
    return changed


def _refuse_others(path: str) -> None:
    """Refuse a file if others than root can decide where its path leads.

    :raises OSError: which folder or link they can replace, or write.
    """
    folder, links = "/", 0
    names = [one for one in os.path.dirname(path).split("/")[::-1] if one not in ("", ".")]
    while names:
        folder = os.path.normpath(os.path.join(folder, names.pop()))
        try:
            status = os.lstat(folder)
        except FileNotFoundError:
            return  # root makes it, in a folder of its own
        # In a sticky folder, others can't replace what is root's. But they can make new names.
        is_shared = status.st_mode & 0o022 and not (status.st_mode & stat.S_ISVTX and names)
        is_link = stat.S_ISLNK(status.st_mode)
        links += is_link
        if status.st_uid not in (0, os.geteuid()) or (is_shared and not is_link):
            raise PermissionError(errno.EPERM, "others than root can change it", folder)
        if is_link:
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            leads_to = os.readlink(folder)
            names += [one for one in leads_to.split("/")[::-1] if one not in ("", ".")]
            folder = "/" if leads_to.startswith("/") else os.path.dirname(folder)


def _written(path: str, data: bytes, owner: Result) -> str:
    """Write a file, to be renamed to *path*; returns its path. No other user can read it meanwhile.

    Its name is always the same: one that is left by a run that was killed is replaced."""
    user, group = _ids(owner)
    new = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.salt-new")
    if os.path.lexists(new):
        os.unlink(new)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        os.fchown(file.fileno(), user, group)
        os.fchmod(file.fileno(), int(owner["mode"], 8))
        file.flush()
        os.fsync(file.fileno())
    return new


def _ids(owner: Result) -> tuple[int, int]:
    """The numbers of a user and a group, which may be given as numbers."""
    user, group = owner["user"], owner["group"]
    try:
        uid = int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid
        gid = int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise LookupError(f"this node has no user {user}, or no group {group}") from None
    return uid, gid


def _content(path: str) -> bytes | None:
    """The content of a file; None if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _change(one: dict[str, Any]) -> dict[str, Any]:
    """A change as Salt shows it: that of an object as a whole has no values of its own."""
    old, new = one["old"], one["new"]
    if old is None and new is None and one["change"] in ("added", "removed"):
        new = f"{one['change']}: {one['note']}" if one.get("note") else one["change"]
    return {"old": old, "new": new}


def _run(name: str, *command: str, stdin: str | Result = "") -> Result:
    """The output of a command, as ``said``; or the state's return value, if that is an error."""
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
