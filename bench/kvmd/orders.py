"""What the load generator is asked and what it answers, as JSON lines over pipes."""

import json
from dataclasses import asdict, dataclass
from typing import IO


@dataclass(frozen=True)
class Appear:
    """Make `count` new VMs. With `serve`, also wait until all are connected (see Serve)."""

    count: int
    serve: bool


@dataclass(frozen=True)
class Serve:
    """Answer clients until every VM is connected, or none has connected for `patience_s`."""

    patience_s: float


@dataclass(frozen=True)
class EndEach:
    """`samples` times: end one VM, see its verdict, put a new one in its place."""

    samples: int


@dataclass(frozen=True)
class EndTogether:
    """End `count` VMs at once, see their verdicts, put new ones in their place."""

    count: int


Order = Appear | Serve | EndEach | EndTogether


@dataclass(frozen=True)
class Connected:
    """How many VMs are connected, were at most, and should be.

    The monotonic times are those of the first socket that was made and of the last connection.
    """

    connected: int
    most: int
    asked: int
    first_at: float
    last_at: float


@dataclass(frozen=True)
class Verdicts:
    """Seconds from event to file: of one VM each, or of all that ended together.

    `missed` files never came, and `lost` of the VMs that took the places were never connected to.
    """

    seconds: list[float]
    missed: int
    lost: int


Reply = Connected | Verdicts

_KINDS: dict[str, type[Order] | type[Reply]] = {
    kind.__name__: kind for kind in (Appear, Serve, EndEach, EndTogether, Connected, Verdicts)
}


def write(stream: IO[str], message: Order | Reply) -> None:
    """Send one message."""
    print(json.dumps([type(message).__name__, asdict(message)]), file=stream, flush=True)


def read(stream: IO[str]) -> Order | Reply | None:
    """Receive one message; None when the other side has closed."""
    line = stream.readline()
    if not line:
        return None
    name, fields = json.loads(line)
    return _KINDS[name](**fields)
