"""Owners and the handler die at random: a program that runs on a node, and prints what it saw.

    python3 lifecycle_chaos.py VMS SECONDS TIMEOUT

The instances ``chaos000`` and so on are defined. Each has an owner, a shell that
touches its watchdog. It prints one line of JSON, with the moments at which each end was seen, so
that the journal tells what took long.
"""

import json
import random
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

FOLDERS = Path("/run/brine/lifecycle")
INTERVAL_S = 1.0
HANDLER_LIVES_S = (3.0, 15.0)
OWNER_LIVES_S = 1.0  # of any of them
AT_ONCE = 2


def begin_owner(name: str) -> "subprocess.Popen[bytes]":
    """An owner, as a process."""
    watchdog = FOLDERS / name / "watchdog"
    watchdog.unlink(missing_ok=True)
    watchdog.touch()
    loop = f"while :; do touch {watchdog}; sleep {INTERVAL_S:g}; done"
    return subprocess.Popen(["sh", "-c", loop], stdout=subprocess.DEVNULL)


def pid_file(name: str) -> Path:
    """It has the process's number and its start time, and stays until its unit has cleared up."""
    return FOLDERS / name / "pid"


def runs(name: str) -> bool:
    """Whether the instance's process lives."""
    try:
        process, started = pid_file(name).read_text().split()[:2]
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return False
    return stat[0] != "Z" and stat[19] == started


def start(name: str) -> bool:
    """Start an instance; returns whether that worked."""
    done = subprocess.run(["brine", "instance", "start", name], capture_output=True, check=False)
    return done.returncode == 0


def main() -> None:
    vms, seconds, timeout_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    names = [f"chaos{number:03}" for number in range(vms)]
    owners = {name: begin_owner(name) for name in names}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        not_started = list(pool.map(start, names)).count(False)
        starting: dict[str, Future[bool]] = {}
        ending: set[str] = set()
        killed: dict[str, float] = {}
        outlived: list[tuple[float, str, float]] = []
        ended_with_owner, handler_deaths = [], 0
        until = time.monotonic() + seconds
        next_owner_s = next_handler_s = time.monotonic()
        while time.monotonic() < until or killed or ending or starting:
            now = time.monotonic()
            for name in [one for one, started in starting.items() if started.done()]:
                not_started += not starting.pop(name).result()
            if next_owner_s <= now < until:
                next_owner_s = now + OWNER_LIVES_S
                name = random.choice(names)
                if not any(name in some for some in (killed, ending, starting)):
                    owners[name].kill()
                    owners[name].wait()
                    killed[name] = time.monotonic()
            if next_handler_s <= now < until:
                next_handler_s = now + random.uniform(*HANDLER_LIVES_S)
                kill = ["systemctl", "kill", "--signal=KILL", "brine-lifecycle.service"]
                subprocess.run(kill, check=False)
                handler_deaths += 1
            for name in [one for one in ending if not pid_file(one).exists()]:
                ending.remove(name)
                owners[name] = begin_owner(name)
                starting[name] = pool.submit(start, name)
            for name in names:
                if name in ending or name in starting or runs(name):
                    continue
                if name in killed:
                    seconds_over = time.monotonic() - killed.pop(name) - timeout_s
                    outlived.append((round(seconds_over, 2), name, time.time()))
                else:
                    ended_with_owner.append((name, time.time()))
                ending.add(name)
            time.sleep(0.1)
    for owner in owners.values():
        owner.kill()
    seen = {
        "owners_killed": len(outlived),
        "handler_killed": handler_deaths,
        "longest": sorted(outlived)[-5:],
        "median_s": sorted(outlived)[len(outlived) // 2][0],
        "ended_though_owned": ended_with_owner,
        "not_started": not_started,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
