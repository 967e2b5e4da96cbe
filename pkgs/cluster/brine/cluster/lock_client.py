"""A client of ``brine-lockd``.

Lines of JSON go both ways. A client sends ``{"claim": [NAME...], "shared": bool, "timeout_s":
number or null, "priority": number, "purpose": text}``, and gets ``{"granted": true}``,
``{"timed_out": true}`` or ``{"error": text, "hint": text}``; while it waits, ``{"waits_for": NAME,
"holders": [...]}`` once. ``{"release": true}`` is answered by ``{"released": true}``, and
``{"list": true}`` by ``{"locks": [...]}``.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from brine.common.errors import install_hint, root_hint
from brine.common.locks import LockError

SOCKET = Path("/run/brine/lockd")

Row = dict[str, Any]


class LockTimeoutError(LockError):
    """A claim that brine-lockd did not grant in time."""


class LockServerGoneError(LockError):
    """``brine-lockd`` has ended, and with it all locks."""


class LockClient:
    """A connection to ``brine-lockd``, which owns what it claims until it is closed.

    :raises LockError: if there is none.
    """

    def __init__(self, path: Path = SOCKET) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._heard = b""
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            hint = root_hint(error) or "systemctl status brine-lockd.socket, on the master"
            if isinstance(error, FileNotFoundError):
                hint = install_hint(apt="brine-cluster", dnf="brine-cluster")
            raise LockError(f"{path}: {error.strerror}", hint=hint) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give all locks back."""
        self._socket.close()

    def fileno(self) -> int:
        """The connection: it is readable when ``brine-lockd`` has ended."""
        return self._socket.fileno()

    def claim(
        self,
        names: Iterable[str],
        *,
        purpose: str,
        shared: bool = False,
        timeout_s: float | None = None,
        priority: int = 0,
        waiting: Callable[[str, list[Row]], object] = lambda _name, _holders: None,
    ) -> None:
        """Wait for several locks together.

        :param names: such as ``instance/web1``. Locks of a level are claimed after those of the
            levels before it: cluster, instance, group, node, storage.
        :param purpose: for others, who see it in ``brine lock list``.
        :param waiting: a function that gets the name of a lock that is held, and its holders.
        :raises LockError: if it has none of them. What it had before, it keeps.
        """
        self._send(
            claim=[*names],
            purpose=purpose,
            shared=shared,
            timeout_s=timeout_s,
            priority=priority,
        )
        while True:
            match self._answer():
                case {"granted": True}:
                    return
                case {"timed_out": True}:
                    raise LockTimeoutError(f"no locks for {purpose} within {timeout_s:g} s")
                case {"waits_for": str(name), "holders": list(holders)}:
                    waiting(name, holders)

    def release(self) -> None:
        """Give all locks back."""
        self._send(release=True)
        self._answer()

    def rows(self) -> list[Row]:
        """All claims: ``pid``, ``purpose``, ``shared``, ``locks`` that it wants, those that it
        ``holds``, the one it ``waits_for`` or None, and since how many ``seconds``."""
        self._send(list=True)
        rows: list[Row] = self._answer()["locks"]
        return rows

    def _send(self, **message: Any) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise _gone() from error

    def _answer(self) -> Row:
        while b"\n" not in self._heard:
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                raise _gone() from error
            if not data:
                raise _gone()
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        message: Row = json.loads(line)
        if "error" in message:
            raise LockError(str(message["error"]), hint=str(message.get("hint") or ""))
        return message


def _gone() -> LockServerGoneError:
    hint = "journalctl -u brine-lockd, on the master"
    return LockServerGoneError("brine-lockd has ended, and with it all locks", hint=hint)
