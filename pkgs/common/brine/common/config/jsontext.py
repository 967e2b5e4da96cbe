"""JSON from bytes, by the letter of RFC 8259."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from brine.common.config.shape import ConfigError, shown

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(data: bytes, *, unique_keys: bool = False) -> Any:
    """What *data* says: UTF-8 only, finite numbers only, and no half of a surrogate pair, which
    could not be written again.

    :param unique_keys: a key that is twice in one object is a mistake; by itself JSON takes the
        last. For what people write.
    :raises ConfigError: that says at which byte it stops being JSON.
    """
    try:
        value = json.loads(
            data.decode(),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique if unique_keys else None,
        )
        if _MAYBE_SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"not valid UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise ConfigError("not usable JSON: half of a surrogate pair is no character") from None
    except json.JSONDecodeError as error:
        offset = len(error.doc[: error.pos].encode())
        hint = "the file is empty" if not data.strip() else None
        text = f"not valid JSON at byte {offset}, line {error.lineno}: {error.msg}"
        raise ConfigError(text, hint=hint) from None
    except RecursionError:
        raise ConfigError("not usable JSON: nested too deep") from None
    except ValueError as error:  # also numbers of thousands of digits
        raise ConfigError(f"not usable JSON: {error}") from None
    return value


def _finite(text: str) -> float:
    number = float(text)
    if -math.inf < number < math.inf:
        return number
    raise ValueError(f"the number {shown(text)} is too large")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} is twice in one object")
            seen.add(key)
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
