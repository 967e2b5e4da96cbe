"""``brine-lifecycle-fence.service``: ends all owned instances when the handler can't be brought
back.

The handler notes both its clocks each second. When that note does not change for a limit of time,
the handler no longer looks after owners. Source: "Virtual Machine Lifecycle Management Guarantees"
in the design of the coupling of VM lifecycles.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from brine.common import paths
from brine.common.cli import Parser
from brine.common.errors import BrineError
from brine.common.journal import LEVELS, setup
from brine.common.settings import SettingsError, load
from brine.common.systemd import ServiceManager
from brine.instance.observe import look_at_all
from brine.instance.owner import CLOCK, folder_of
from brine.instance.stop import stop_instance
from brine.instance.store import InstanceError
from brine.lifecycle.owner_watch import EndReason
from brine.lifecycle.settings import LifecycleSettings
from brine.vm.spec import Source

_PROGRAM = "brine-lifecycle-fence"
_LOOK_S = 2.0
_AT_ONCE = 64


def main() -> int:
    """Watch the handler until told to end."""
    parser = Parser(prog=_PROGRAM, allow_abbrev=False)
    parser.add_argument("--reboot", action="store_true", help="reboot the node instead")
    parsed = parser.parse_args()
    setup(_PROGRAM, LEVELS["info"])
    try:
        settings = load(LifecycleSettings, paths.settings_file("lifecycle"))
    except SettingsError as error:
        # Without a fence, VMs could outlive their owners.
        _say(f"bad settings, the defaults are in use: {error}")
        settings = LifecycleSettings()
    limit_s = settings.fence_after_s
    service = ServiceManager()
    service.ready(f"watching the handler: {limit_s:g} s without a sign of life end all owned VMs")
    watch(CLOCK, limit_s, service, reboot=parsed.reboot)
    return 0


def watch(clock: Path, limit_s: float, service: ServiceManager, *, reboot: bool) -> None:
    """Act whenever the handler's note has not changed for *limit_s* seconds while owned instances
    run; at half of that, start the handler again."""
    said, changed_s, is_helped = "", time.monotonic(), False
    looked_s = changed_s
    while True:
        service.alive()
        now_s, text = time.monotonic(), _text(clock)
        # A fence that did not run itself knows nothing of the time between.
        if text != said or now_s - looked_s > 2 * _LOOK_S + 1:
            said, changed_s, is_helped = text, now_s, False
        silent_s = now_s - changed_s
        names = _owned() if silent_s > limit_s / 2 else []
        if silent_s > limit_s / 2 and names == []:
            changed_s = now_s  # without an owned instance there need be no handler
        elif names != [] and not is_helped:
            is_helped = True
            _systemctl("reset-failed", "brine-lifecycle.service")
            _systemctl("restart", "--no-block", "brine-lifecycle.service")
        elif silent_s > limit_s:
            many = "unknown" if names is None else len(names)
            _say(f"the handler gives no sign of life for {silent_s:.0f} s; VMs with owners: {many}")
            if reboot:
                _say("the node reboots")
                _systemctl("reboot", "--force")
            else:
                _end_all(names or [], service)
            changed_s, is_helped = time.monotonic(), False
        looked_s = time.monotonic()
        time.sleep(_LOOK_S)


def _owned() -> list[str] | None:
    """The instances with an owner that run; None if that can't be known."""
    try:
        return list(_running())
    except (BrineError, OSError) as error:
        _say(str(error))
        return None


def _running() -> Iterator[str]:
    for seen in look_at_all():
        if isinstance(seen, InstanceError):
            if folder_of(seen.name).is_dir():
                yield seen.name
        elif seen.spec.owner and (seen.is_going or (seen.domain and seen.domain.lives())):
            yield seen.name


def _end_all(names: list[str], service: ServiceManager) -> None:
    def end(name: str) -> None:
        try:
            stop_instance(name, force=True, by=Source.OWNER, cause=EndReason.GONE)
            _say(f"{name}: was ended, as no handler looks after its owner")
        except (BrineError, OSError) as error:
            _say(f"{name}: was not ended: {error}")

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        ends = {pool.submit(end, name) for name in names}
        while ends:
            service.alive()
            _, ends = wait(ends, timeout=_LOOK_S)


def _systemctl(*words: str) -> None:
    done = subprocess.run(["systemctl", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        _say(f"systemctl {words[0]}: {done.stderr.strip()}")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
