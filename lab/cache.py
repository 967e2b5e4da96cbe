"""The machine-wide cache of what takes long to make and is needed again: trees, kernels, wheels.

An entry is a folder `<name>-<hash>`. The hash is of everything that went into making it, so that a
changed recipe makes a new entry, and the old ones of that name are dropped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.errors import LabError
from lab.lock import folder_lock
from lab.progress import say, step


def cache_root() -> Path:
    """Where the cache is: `$BRINE_CACHE`, or root's /var/cache/brine-lab, or the user's own."""
    if chosen := os.environ.get("BRINE_CACHE"):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/var/cache/brine-lab")
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "brine-lab"


def cached(name: str, ingredients: object, build: Callable[[Path], None], *, what: str) -> Path:
    """The folder of the cache entry `name`, made by `build(folder)` if it is not there.

    `ingredients` is whatever decides the result, in JSON's types; `what` is what a person is told.
    The folder gets its name when it is complete; a build that fails leaves nothing. Two processes
    never build the same entry at once: the second waits and finds it made.
    """
    recipe = json.dumps(ingredients, sort_keys=True).encode()
    entry = cache_root() / f"{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    if entry.is_dir():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _locked(cache_root() / f".{name}.lock"):
        if entry.is_dir():
            return entry
        unfinished = cache_root() / f".unfinished-{name}"
        _remove(unfinished)
        unfinished.mkdir()
        try:
            with step(f"making {what} (kept in {cache_root()})"):
                build(unfinished)
            unfinished.rename(entry)
        except BaseException:
            try:
                _remove(unfinished)
            except LabError as error:
                say(str(error))  # what made the build fail is told by the caller
            raise
        for old in cache_root().glob(f"{name}-" + "?" * 12):
            if old != entry:
                _remove_unless_used(old)
    return entry


@contextmanager
def in_use(entry: Path) -> Iterator[None]:
    """Keep a cache entry from being dropped while a node runs on it."""
    with folder_lock(entry, fcntl.LOCK_SH):
        yield


def clean() -> None:
    """Remove all of the cache but the entries that something runs on, or that are being made."""
    for entry in cache_root().glob("*"):
        if entry.is_dir() and not entry.name.startswith("."):
            _remove_unless_used(entry)
    for unfinished in cache_root().glob(".unfinished-*"):
        name = unfinished.name.removeprefix(".unfinished-")
        (cache_root() / f".{name}.lock").touch()
    for lock in cache_root().glob(".*.lock"):
        try:
            with _locked(lock, wait=False):
                name = lock.name.removeprefix(".").removesuffix(".lock")
                _remove(cache_root() / f".unfinished-{name}")
                lock.unlink()
        except BlockingIOError:
            say(f"{lock} is held, something is being made: kept")


def _remove_unless_used(entry: Path) -> None:
    try:
        with folder_lock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _remove(entry)
    except BlockingIOError:
        say(f"{entry} is in use: kept")


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock at `path`; it ends with the process, however that ends.

    Raises BlockingIOError when it is held, unless it is to `wait`.
    """
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held it may have removed the file: others then lock a new one.
            if path.exists() and path.samefile(f"/proc/self/fd/{lock.fileno()}"):
                yield
                return


def _remove(tree: Path) -> None:
    try:
        if tree.exists():
            shutil.rmtree(tree)
    except OSError as error:
        raise LabError(
            f"cannot remove {error.filename}: {error.strerror}",
            hint="if something is mounted there, unmount it: findmnt | grep brine",
        ) from None
