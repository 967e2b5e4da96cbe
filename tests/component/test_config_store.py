"""The configuration store under kills, rivals, a full disk, and ten thousand instances."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from brine.common.locks import LockedError
from brine.config.apply import apply
from brine.config.model import Configuration
from brine.config.schema import ConfigError
from brine.config.store import ConfigStore
from brine.config.verify import find_mistakes
from lab.ganeti_config import ganeti_config, instance_name
from lab.waiting import wait_for

# Applies in a loop: each round another tag, and the serial on stdout.
WRITER = """
import sys
from pathlib import Path
from brine.config.apply import apply
from brine.config.store import ConfigStore

store = ConfigStore(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    with store.writing(60) as writer:
        tags = {"cluster": {"tags": [f"{sys.argv[2]}-{number}"]}}
        new = writer.write(apply(writer.current, tags).new)
    print(new.serial_no, flush=True)
"""

# Holds the lock until it is told to go.
HOLDER = """
import sys
from pathlib import Path
from brine.config.store import ConfigStore

with ConfigStore(Path(sys.argv[1])).writing():
    print("held", flush=True)
    sys.stdin.read()
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of ours that runs *script*."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def store(tmp_path: Path) -> ConfigStore:
    """A store of 200 instances: writing it takes a while."""
    store = ConfigStore(tmp_path / "store" / "config.data")
    store.path.parent.mkdir()
    with store.writing() as writer:
        writer.write(Configuration.from_json(ganeti_config(instances=200)))
    return store


def test_a_kill_at_any_moment_leaves_the_old_or_the_new(store: ConfigStore) -> None:
    chance = random.Random(7)
    highest = 42
    for _ in range(25):
        with start(WRITER, store.path, "x", 1_000_000) as writer:
            assert writer.stdout
            highest = max(highest, int(writer.stdout.readline()))
            # Not a wait for something: any moment will do, and each round has another.
            try:
                writer.wait(chance.uniform(0, 0.03))
            except subprocess.TimeoutExpired:
                writer.send_signal(signal.SIGKILL)
            told = [int(line) for line in writer.stdout.read().split("\n") if line.isdigit()]
        highest = max([highest, *told])
        current = store.read()
        assert current.serial_no >= highest
        assert current.cluster.serial_no - 1 == current.serial_no - 42
        highest = current.serial_no
        for version in store.versions():
            assert store.read_version(version.serial_no).serial_no == version.serial_no
            assert version.serial_no < current.serial_no
    # The next writer cleans up.
    with store.writing() as last:
        last.write(apply(last.current, {"cluster": {"tags": ["end"]}}).new)
    left = {file.name for file in store.path.parent.iterdir()}
    assert left == {"config.data", ".config.data.lock", "config.versions"}


def test_two_writers_take_turns(store: ConfigStore) -> None:
    with start(WRITER, store.path, "a", 40) as one, start(WRITER, store.path, "b", 40) as two:
        outputs = [process.communicate(timeout=120)[0].split() for process in (one, two)]
    serials = sorted(int(serial) for output in outputs for serial in output)
    assert serials == list(range(43, 43 + 80))
    assert store.read().serial_no == 42 + 80


def test_a_second_writer_gives_up_in_time_and_says_who_is_first(store: ConfigStore) -> None:
    with start(HOLDER, store.path) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=f"locked by process {holder.pid} "):
            with store.writing(timeout_s=0.1):
                pytest.fail("two writers")
        holder.kill()
    with store.writing(timeout_s=0):  # the kernel ends a lock with its process
        pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that has room for one configuration of a few instances, and hardly more."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_leaves_all_as_it_was(small_disk: Path) -> None:
    store = ConfigStore(small_disk / "config.data")
    with store.writing() as writer:
        writer.write(Configuration.from_json(ganeti_config(instances=20)))
    before = store.path.read_bytes()
    with pytest.raises(ConfigError, match="can't be written: No space left on device") as caught:
        with store.writing() as writer:
            writer.write(apply(writer.current, {"cluster": {"tags": ["x" * 40_000]}}).new)
    assert caught.value.hint == "the configuration is as it was"
    assert store.path.read_bytes() == before
    assert store.versions() == []
    assert {file.name for file in small_disk.iterdir()} <= {
        "config.data",
        ".config.data.lock",
        "config.versions",
    }


def test_ten_thousand_instances(tmp_path: Path) -> None:
    store = ConfigStore(tmp_path / "config.data")
    data = ganeti_config(nodes=20, instances=10_000)
    with store.writing() as writer:
        writer.write(apply(None, data).new)
    assert json.loads(store.path.read_bytes()) == data
    change = {"instances": {instance_name(n): {"beparams": {"vcpus": 2}} for n in range(1, 10_001)}}
    with store.writing() as writer:
        writer.write(apply(writer.current, change).new)
    config = store.read()
    assert config.serial_no == 43
    assert {instance.beparams["vcpus"] for instance in config.instances.values()} == {2}
    assert {instance.serial_no for instance in config.instances.values()} == {2}
    assert {disk.serial_no for disk in config.disks.values()} == {1}
    # A tenth of them have DRBD disks.
    assert {mistake.kind for mistake in find_mistakes(config)} == {"unsupported"}


def test_a_waiting_writer_goes_on_when_the_lock_is_free(store: ConfigStore) -> None:
    with start(HOLDER, store.path) as holder:
        assert holder.stdout
        assert holder.stdin
        assert holder.stdout.readline() == "held\n"
        with start(WRITER, store.path, "x", 1) as waiting:
            lock = store.path.with_name(".config.data.lock")
            wait_for("it to open the lock", lambda: _has_open(waiting.pid, lock))
            holder.stdin.close()
            assert waiting.stdout
            assert waiting.stdout.readline() == "43\n"


def _has_open(process: int, file: Path) -> bool:
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:
        return False
    return str(file) in links
