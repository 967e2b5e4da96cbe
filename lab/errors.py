"""The errors of the lab."""

from __future__ import annotations


class LabError(Exception):
    """The lab could not do what was asked.

    `hint` says what to do about it; it is part of the text.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}\n  hint: {hint}" if hint else message)
        self.message = message
        self.hint = hint
