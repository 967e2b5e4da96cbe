"""Watching a directory on a real file system, through all that can happen to it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyinotify
import pytest

from brine.common.inotify import DirectoryWatch


class Seen:
    """The events that a watch has told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rescans = 0

    def rescan(self) -> None:
        self.rescans += 1


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[tuple[DirectoryWatch, Seen]]:
    seen = Seen()
    watch = DirectoryWatch(path, appeared=seen.names.append, rescan=seen.rescan)
    watch.start()
    try:
        yield watch, seen
    finally:
        watch.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def descriptors() -> set[str]:
    """Those that are open now; one of the names listed was that of the listing."""
    return {file.name for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_names_that_appear_are_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with watching(tmp_path) as (_, seen):
            assert seen.rescans == 1
            (tmp_path / "made").touch()
            (tmp_path / "made").rename(tmp_path / "moved")
            await until(lambda: "moved" in seen.names)
            seen.names.clear()
            (tmp_path / "moved").chmod(0o600)
            await until(lambda: seen.names == ["moved"])
            assert seen.rescans == 1

    run(story())


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"a b\n", "ü".encode(), b"x" * 255])
def test_odd_names_are_told_and_lose_nothing(tmp_path: Path, raw: bytes) -> None:
    async def story() -> None:
        async with watching(tmp_path) as (_, seen):
            Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + raw)).touch()
            (tmp_path / "after").touch()
            await until(lambda: "after" in seen.names)
            assert os.fsdecode(raw) in seen.names

    run(story())


def test_a_directory_may_come_later(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "c"

    async def story() -> None:
        async with watching(target) as (_, seen):
            target.mkdir(parents=True)
            await until(lambda: seen.rescans >= 2)
            await asyncio.sleep(0.05)
            (target / "x").touch()
            await until(lambda: "x" in seen.names)

    run(story())


@pytest.mark.parametrize("parent", [False, True], ids=["itself", "its parent"])
@pytest.mark.parametrize("remove", ["delete", "rename"])
def test_a_directory_may_be_replaced(tmp_path: Path, parent: bool, remove: str) -> None:
    target = tmp_path / "a" / "b"
    victim = target.parent if parent else target
    target.mkdir(parents=True)

    async def story() -> None:
        async with watching(target) as (_, seen):
            # Who has the directory open keeps its inode, and delays the kernel's word of its end.
            held = os.open(target, os.O_RDONLY)
            if remove == "delete":
                shutil.rmtree(victim)
            else:
                victim.rename(tmp_path / "elsewhere")
            target.mkdir(parents=True)
            await until(lambda: seen.rescans >= 2)
            await asyncio.sleep(0.05)
            (target / "x").touch()
            await until(lambda: "x" in seen.names)
            os.close(held)

    run(story())


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    async def story() -> None:
        async with watching(tmp_path / "link") as (_, seen):
            (tmp_path / "real" / "x").touch()
            await until(lambda: "x" in seen.names)

    run(story())


def test_a_full_queue_means_a_rescan(tmp_path: Path) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())

    async def story() -> None:
        async with watching(tmp_path) as (_, seen):
            for number in range(limit + 10):  # while the loop can't read
                file = tmp_path / str(number % 2)
                file.touch()
                file.unlink()
            await until(lambda: seen.rescans >= 2)
            (tmp_path / "after").touch()
            await until(lambda: "after" in seen.names or seen.rescans >= 3)

    run(story())


def test_a_refresh_finds_what_no_event_told(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.mkdir()

    async def story() -> None:
        async with watching(target) as (watch, seen):
            watch.refresh()
            assert seen.rescans == 1
            (target / "x").touch()
            await until(lambda: "x" in seen.names)

    run(story())


def test_nothing_is_left_open(tmp_path: Path) -> None:
    async def story() -> None:
        before = descriptors()
        async with watching(tmp_path):
            assert descriptors() != before
        assert descriptors() == before

    run(story())


def test_where_the_kernel_refuses_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        # A limit on watches is the whole machine's: too dear to reach for a test.
        kernel = pyinotify.INotifyWrapper.create()
        monkeypatch.setattr(kernel, "inotify_add_watch", lambda *_: -1)
        monkeypatch.setattr(kernel, "get_errno", lambda: 28)
        monkeypatch.setattr(pyinotify.INotifyWrapper, "create", lambda: kernel)
        async with watching(tmp_path) as (watch, seen):
            watch.refresh()
            assert seen.rescans == 2

    run(story())
    assert [r.getMessage() for r in caplog.records if "can't be watched" in r.getMessage()] == [
        "/ can't be watched: No space left on device; looking at intervals"
    ]
