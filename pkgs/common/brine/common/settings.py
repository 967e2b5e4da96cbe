"""Settings of daemons: a TOML file into a frozen dataclass, every key typed, every mistake named.

A daemon declares its settings as :mod:`brine.common.schema` has it; all have defaults.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

from brine.common import schema
from brine.common.errors import BrineError

S = TypeVar("S")

setting = schema.key
"""A setting, with its default and its limits."""


class SettingsError(BrineError):
    """A settings file, or a key of it, that can't be used."""

    def __init__(
        self, file: Path, message: str, *, key: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(f"{file}: {key}: {message}" if key else f"{file}: {message}", hint=hint)


def load(kind: type[S], file: Path, *, required: bool = False) -> S:
    """Read *file* into an instance of the dataclass *kind*; all defaults for an absent one.

    :param required: a person named the file, so that it must exist.
    :raises SettingsError: if the file, or a key in it, is not good.
    """
    try:
        return schema.parse(kind, tomllib.loads(file.read_bytes().decode()), noun="setting")
    except FileNotFoundError:
        if required:
            raise SettingsError(file, "there is no such file") from None
        return kind()
    except UnicodeDecodeError as error:
        raise SettingsError(file, f"not valid UTF-8: byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        hint = 'a line is KEY = VALUE, and strings need quotes, as in log_level = "info"'
        raise SettingsError(file, f"not valid TOML: {error}", hint=hint) from error
    except OSError as error:
        raise SettingsError(file, f"can't be read: {error.strerror}") from error
    except schema.SchemaError as error:
        key = error.where.removeprefix("/")
        raise SettingsError(file, error.text, key=key, hint=error.hint) from None
