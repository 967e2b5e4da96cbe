"""Where Brine's files are. The design's table of files is the source."""

from __future__ import annotations

from pathlib import Path

ETC_DIR = Path("/etc/brine")
CONTROL_DIR = Path("/run/brine/ctrl")
MARKS_DIR = Path("/run/brine/marks")
TAPS_DIR = Path("/run/brine/taps")
HOTPLUG_DIR = Path("/run/brine/hotplug")  # of Brine 0.2
LIFECYCLE_DIR = Path("/run/brine/lifecycle")
ENDED_DIR = Path("/run/brine/ended")
CONTROL_GROUP = "brine-ctrl"
CONSOLE_DIR = Path("/run/brine/console")
CONSOLE_LOG_DIR = Path("/var/log/brine/console")
LOCK_DIR = Path("/run/lock/brine")
STATE_DIR = Path("/var/lib/brine")
CONFIG_FILE = STATE_DIR / "config.data"
CONFIG_LOCK = LOCK_DIR / "config.lock"
RUNTIME_DIR = STATE_DIR / "runtime"
SPECS_DIR = STATE_DIR / "instances"
OPERATIONS_DIR = STATE_DIR / "operations"
VOLATILE_OPERATIONS_DIR = Path("/run/brine/operations")
OUTBOX_DIR = STATE_DIR / "outbox"
UEFI_DIR = STATE_DIR / "uefi"
SSCONF_DIR = STATE_DIR / "ssconf"
SPEC_CACHE_FILE = Path("/run/brine/specs.cache")
QEMU_VERSIONS_FILE = Path("/run/brine/qemu-versions.json")
PROCESSOR_FILE = Path("/run/brine/processor.json")
KVMD_DIR = Path("/run/brine-kvmd")
CONFD_DIR = Path("/run/brine-confd")
WATCHER_FIGURES_FILE = Path("/run/brine/watcher-figures.json")
NODE_FILE = STATE_DIR / "node.json"
STORAGE_DIRECTORIES_FILE = STATE_DIR / "storage-directories.json"
CLAIMS_DIR = STATE_DIR / "claims"
MOVES_DIR = STATE_DIR / "moves"
MOVES_STATUS_DIR = Path("/run/brine/moves")
UNASKED_FILE = Path("/run/brine/unasked")
FSTAB_FILE = Path("/etc/fstab")
SYSTEMD_DIR = Path("/etc/systemd/system")
NIC_SCRIPTS_DIR = ETC_DIR / "nic.d"
EVENT_PROGRAMS_DIR = ETC_DIR / "events.d"
EVENTS_DIR = Path("/run/brine/events")
EVENTS_CURSOR_FILE = STATE_DIR / "events.cursor"
KEY_FILE = ETC_DIR / "hmac.key"
PREVIOUS_KEY_FILE = ETC_DIR / "hmac.key.previous"
SALT_KEYS_FILE = ETC_DIR / "salt/keys.json"


def settings_file(daemon: str) -> Path:
    """The settings of one daemon, e.g. ``/etc/brine/kvmd.toml`` for ``kvmd``; may be absent."""
    return ETC_DIR / f"{daemon}.toml"
