"""What an administrator can set in ``/etc/brine/confd.toml``; see brine-confd.toml(5)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from brine.common import paths
from brine.common.journal import LEVELS
from brine.common.settings import SettingsError, load, setting
from brine.confd import protocol


@dataclass(frozen=True)
class ConfdSettings:
    """Settings of brine-confd, as brine-confd.toml(5) explains them."""

    bind: str = "::"
    port: int = setting(protocol.PORT, minimum=1, maximum=65535)
    workers: int = setting(1, minimum=1, maximum=64)
    config_file: Path = paths.CONFIG_FILE
    key_file: Path = paths.KEY_FILE
    previous_key_file: Path = paths.PREVIOUS_KEY_FILE
    max_clock_skew_s: float = setting(float(protocol.MAX_CLOCK_SKEW_S), minimum=1, maximum=86400)
    reveal_secrets: bool = False
    memory_lock: bool = False
    log_level: str = setting("info", choices=tuple(LEVELS))

    def addresses(self) -> list[str]:
        """The addresses of *bind*, each once."""
        return list(dict.fromkeys(self.bind.split()))


def load_settings(file: Path, *, required: bool = False) -> ConfdSettings:
    """Read the daemon's settings.

    :param required: whether the file must exist.
    :raises SettingsError: if they can't be used.
    """
    settings = load(ConfdSettings, file, required=required)
    if not settings.addresses():
        hint = 'bind = "::" listens on every address'
        raise SettingsError(file, "names no address", key="bind", hint=hint)
    for address in settings.addresses():
        try:
            ipaddress.ip_address(address)
        except ValueError:
            text = f"must be IP addresses separated by blanks, but has {address!r}"
            raise SettingsError(file, text, key="bind") from None
    return settings
