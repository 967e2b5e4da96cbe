"""
The nodes of the cluster, from the Salt master
==============================================

::

    salt-run brine.redistribute
    salt-run brine.redistribute test=True
    salt-run brine.rotate_key

These run on the master, whose host has the cluster's configuration. A minion is the node whose name
is its id, where either may be the short one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    __context__: dict[str, Any] = {}
    __salt__: dict[str, Callable[..., Any]] = {}

Result = dict[str, Any]

_KEYS = "/etc/brine/salt/keys.json"
_KEY_FILE = "/etc/brine/hmac.key"
_TIMEOUT_S = 60
# The steps of a rotation, each with what comes after it: the new key is accepted besides the old
# one; the new one signs, and the old one is accepted; the old one goes.
_NEXT = {"accept": "sign", "sign": "drop", "drop": "done"}


class _RefusedError(Exception):
    """What can't be done, in one line."""


def redistribute(test: bool = False, timeout: int | None = None) -> Result:
    """
    Apply the state ``brine.config`` on all nodes of the cluster, this host's first: what the
    external pillar gives them is put in place.

    :param test: only say what would change.
    :param timeout: how long a minion may take to say that it is there, in seconds.

    Returns ``nodes``, for each what changed and what failed, and the names of those that have
    ``not_answered`` and of those that are ``offline`` in the configuration and have not answered.
    The state has these catch up when they return.

    CLI Example::

        salt-run brine.redistribute
    """
    try:
        nodes = _nodes()
        here = [name for name in nodes if _is_same(name, os.uname().nodename)]
        answers = _apply("brine.config", here, test=test, timeout=timeout)
        others = [name for name in nodes if name not in here]
        answers.update(_apply("brine.config", others, test=test, timeout=timeout))
    except _RefusedError as error:
        return _ended(False, str(error))
    told = {name: _told(answer) for name, answer in sorted(answers.items())}
    missing = sorted(nodes.keys() - answers.keys())
    away = [name for name in missing if nodes[name]]
    silent = [name for name in missing if not nodes[name]]
    failed = [name for name, one in told.items() if one["failed"]]
    comment = f"{len(told) - len(failed)} of {len(nodes)} nodes have the configuration"
    if test:
        comment = f"{len(told) - len(failed)} of {len(nodes)} nodes would have the configuration"
    is_done = not failed and not silent
    return _ended(is_done, comment, nodes=told, not_answered=silent, offline=away)


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
        with _alone():
            return _rotate(timeout)
    except _RefusedError as error:
        return _ended(False, str(error))
    except OSError as error:
        return _ended(False, f"{error.filename}: {error.strerror}; nothing more was done")


# The steps of a rotation.


def _rotate(timeout: int | None) -> Result:
    nodes = _nodes()
    keys = _read_keys()
    _refuse_declared(nodes, keys)
    if keys is None:
        keys = _first_keys()
    if keys["step"] == "done":
        keys = {"key": keys["key"], "previous_key": secrets.token_hex(32), "step": "accept"}
    while keys["step"] != "done":
        step = keys["step"]
        _write_keys(keys)
        unconfirmed, away = _confirm(nodes, keys, timeout)
        if unconfirmed:
            names = ", ".join(unconfirmed)
            comment = (
                f"not confirmed by {names}; salt-run brine.rotate_key continues with this step"
            )
            return _ended(False, comment, step=step, not_confirmed=unconfirmed)
        keys = {**keys, "step": _NEXT[step]}
        if step == "accept":
            keys["key"], keys["previous_key"] = keys["previous_key"], keys["key"]
        elif step == "sign":
            keys["previous_key"] = ""
    _write_keys(keys)
    return _ended(True, "all nodes have the new key, and accept no other", offline=away)


def _first_keys() -> dict[str, str]:
    """The key that this host has; or a new one, which only has to be confirmed."""
    try:
        with open(_KEY_FILE, encoding="utf-8") as file:
            key = file.read().removesuffix("\n")
    except FileNotFoundError:
        return {"key": secrets.token_hex(32), "previous_key": "", "step": "drop"}
    except UnicodeDecodeError:
        raise _RefusedError(f"{_KEY_FILE} is no text, and can't be taken over") from None
    if not key.strip():
        raise _RefusedError(f"{_KEY_FILE} is blank: remove it, and a first key is made")
    return {"key": key, "previous_key": "", "step": "done"}


def _refuse_declared(nodes: Collection[str], keys: Mapping[str, str] | None) -> None:
    """Refuse to rotate where a node's key comes from pillar's SLS files."""
    ours = {keys["key"], keys["previous_key"]} if keys else set()
    for name in {one for node in nodes for one in (node, node.partition(".")[0])}:
        pillar = __salt__["pillar.show_pillar"](name)
        brine = pillar.get("brine") if isinstance(pillar, dict) else None
        confd = brine.get("confd") if isinstance(brine, dict) else None
        key = confd.get("key") if isinstance(confd, dict) else None
        if key and key not in ours:
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
    for name, answer in answers.items():
        states = {one.get("__id__"): one for one in _states(answer)}
        ours = {key: one for key, one in states.items() if str(key).startswith("brine-confd")}
        failed = [one for one in ours.values() if one["result"] is not True]
        if not states or failed:
            unconfirmed[name] = "; ".join(_told(answer)["failed"]) or "a state has failed"
        for state, key in (
            ("brine-confd-key", "key"),
            ("brine-confd-previous-key", "previous_key"),
        ):
            if state in ours and keys[key] and name not in unconfirmed:
                files.setdefault((ours[state]["name"], key), []).append(name)
    if answers and not unconfirmed and not files:
        text = "no node gets the key: is the external pillar brine in the master's configuration"
        raise _RefusedError(f"{text}, and brine:confd:enabled not false everywhere?")
    for (path, key), names in files.items():
        digest = hashlib.sha256(f"{keys[key]}\n".encode()).hexdigest()
        found = _execute("file.get_hash", names, [path, "sha256"], timeout=timeout)
        for name in names:
            if found.get(name) != digest:
                unconfirmed[name] = f"{path} is another key; does its pillar declare one?"
    return unconfirmed, away


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Be the only rotation for the time of the block."""
    folder = os.path.dirname(_KEYS)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _RefusedError("another brine.rotate_key is at work") from None
        yield


def _read_keys() -> dict[str, str] | None:
    try:
        with open(_KEYS, encoding="ascii") as file:
            keys = json.load(file)
        made = {name: str(keys[name]) for name in ("key", "previous_key", "step")}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise _RefusedError(f"{_KEYS} is damaged: {error!r}") from None
    if not made["key"] or made["step"] not in (*_NEXT, "done"):
        raise _RefusedError(f"{_KEYS} is damaged: it has no key, or an unknown step")
    return made


def _write_keys(keys: Mapping[str, str]) -> None:
    """Replace the file as a whole; it survives a power cut from when this returns."""
    folder = os.path.dirname(_KEYS)
    new = f"{_KEYS}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # of one that was killed
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(keys, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(new, _KEYS)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Nodes and minions.


def _nodes() -> dict[str, bool]:
    """The nodes of the configuration, and whether each is offline there."""
    command = ["brine", "config", "show", "/nodes"]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _RefusedError(f"brine can't be run: {error}") from None
    if run.returncode != 0:
        said = run.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
        raise _RefusedError(said[0])
    return {node["name"]: bool(node.get("offline")) for node in json.loads(run.stdout).values()}


def _is_same(node: str, minion: str) -> bool:
    """Whether both name the same node, where either may be the short name."""
    return minion in (node, node.partition(".")[0]) or minion.partition(".")[0] == node


def _pattern(node: str) -> str:
    """A regular expression of the minion ids that a node may have."""
    short, dot, rest = node.partition(".")
    if dot:
        return rf"{re.escape(short)}(?:{re.escape(dot + rest)})?"
    return rf"{re.escape(short)}(?:\..+)?"


def _apply(
    state: str, nodes: Collection[str], *, test: bool = False, timeout: int | None = None
) -> dict[str, Any]:
    """Apply a state; returns the answers by node."""
    # One that applies other states just now takes these afterwards.
    return _execute("state.apply", nodes, [state], timeout=timeout, test=test, queue=True)


def _execute(
    function: str,
    nodes: Collection[str],
    arguments: list[Any],
    *,
    timeout: int | None,
    **named: Any,
) -> dict[str, Any]:
    """Call a function on the nodes' minions; returns the answers by node."""
    if not nodes:
        return {}
    ids = "|".join(map(_pattern, nodes))
    answers = __salt__["salt.execute"](
        f"(?:{ids})$", function, arguments, timeout=timeout, tgt_type="pcre", kwarg=named
    )
    found = {}
    for minion, answer in answers.items():
        is_silent = answer is False or str(answer).startswith("Minion did not return")
        for name in nodes:
            if not is_silent and _is_same(name, minion):
                found[name] = answer
    return found


def _states(answer: Any) -> list[dict[str, Any]]:
    """The results of a state.apply, in their order; none if it was refused as a whole."""
    if not isinstance(answer, dict):
        return []
    return sorted(answer.values(), key=lambda one: int(one.get("__run_num__", 0)))


def _told(answer: Any) -> Result:
    """What a state.apply changed, and what failed."""
    if not isinstance(answer, dict):
        lines = answer if isinstance(answer, list) else [answer]
        return {"changed": [], "failed": [" ".join(str(line).split()) for line in lines]}
    states = _states(answer)
    changed = [one["name"] for one in states if one.get("changes")]
    failed = [f"{one['name']}: {one['comment']}" for one in states if one["result"] is False]
    return {"changed": changed, "failed": failed}


def _ended(result: bool, comment: str, **more: Any) -> Result:
    """What a function returns; salt-run fails if it has not succeeded."""
    if not result:
        __context__["retcode"] = 1
    return {"result": result, "comment": comment, **{key: one for key, one in more.items() if one}}
