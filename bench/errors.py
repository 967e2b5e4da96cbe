"""How a benchmark fails in front of a person."""


class BenchError(Exception):
    """What went wrong, and a hint at what to do about it."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint
