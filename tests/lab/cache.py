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
        finally:
            _remove(unfinished)
        for old in cache_root().glob(f"{name}-" + "?" * 12):
            if old != entry:
                _remove_unless_used(old)
    return entry


@contextmanager
def in_use(entry: Path) -> Iterator[None]:
    """Keep a cache entry from being dropped while a node runs on it."""
    folder = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)
        yield
    finally:
        os.close(folder)


def clean() -> None:
    """Remove every entry of the cache that nothing runs on."""
    for entry in cache_root().glob("*"):
        if entry.is_dir() and not entry.name.startswith("."):
            _remove_unless_used(entry)


def _remove_unless_used(entry: Path) -> None:
    folder = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"{entry} is in use: kept")
    else:
        _remove(entry)
    finally:
        os.close(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path`; it ends with the process, however that ends."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove(tree: Path) -> None:
    if tree.exists():
        shutil.rmtree(tree)
