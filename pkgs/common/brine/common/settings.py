"""Settings of daemons: a TOML file into a frozen dataclass, every key typed, every mistake named.

A daemon declares its settings as a frozen dataclass whose fields all have defaults. The types
that a field may have are ``bool``, ``int``, ``float``, ``str`` and :class:`~pathlib.Path`; limits
go into the field's metadata, through :func:`setting`.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from brine.common.errors import BrineError, nearest

S = TypeVar("S")

_NOUNS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "an absolute path",
}


class SettingsError(BrineError):
    """A settings file that can't be used.

    :param file: the file.
    :param key: the key at fault, or None if the file as a whole is.
    """

    def __init__(
        self, file: Path, message: str, *, key: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(f"{file}: {key}: {message}" if key else f"{file}: {message}", hint=hint)
        self.file = file
        self.key = key


def setting(
    default: Any,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field of a settings class, with its limits (both inclusive) or its allowed values."""
    return dataclasses.field(
        default=default, metadata={"minimum": minimum, "maximum": maximum, "choices": choices}
    )


def load(kind: type[S], file: Path, *, required: bool = False) -> S:
    """Read *file* into an instance of the dataclass *kind*.

    :param required: False makes an absent file mean all defaults; True is for a file that a
        person named.
    :raises SettingsError: if the file can't be read or parsed, or a key in it is not known, has
        the wrong type, or lies outside its limits.
    """
    try:
        with file.open("rb") as stream:
            table = tomllib.load(stream)
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
    return parse(kind, table, file)


def parse(kind: type[S], table: Mapping[str, Any], file: Path) -> S:
    """Check *table*, as parsed from *file*, and make an instance of *kind* of it."""
    assert dataclasses.is_dataclass(kind)
    types = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in fields:
            raise SettingsError(
                file, "there is no such setting", key=key, hint=nearest(key, fields)
            )
        values[key] = _checked(file, key, value, types[key], fields[key].metadata)
    return kind(**values)


def _checked(file: Path, key: str, value: Any, kind: type, limits: Mapping[str, Any]) -> Any:
    wrong = SettingsError(file, f"must be {_NOUNS[kind]}, but is {value!r}", key=key)
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise SettingsError(file, "is too large a number", key=key) from None
    if kind is Path and type(value) is str:
        value = Path(value)
        if not value.is_absolute() or "\0" in str(value):
            raise wrong
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise wrong
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong
    minimum, maximum = limits.get("minimum"), limits.get("maximum")
    if minimum is not None and value < minimum:
        raise SettingsError(file, f"must be at least {minimum}, but is {value!r}", key=key)
    if maximum is not None and value > maximum:
        raise SettingsError(file, f"must be at most {maximum}, but is {value!r}", key=key)
    choices: tuple[str, ...] = limits.get("choices", ())
    if choices and value not in choices:
        hint = nearest(str(value), choices)
        raise SettingsError(
            file, f"must be one of {', '.join(choices)}, but is {value!r}", key=key, hint=hint
        )
    return value
