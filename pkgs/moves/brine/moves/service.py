"""``brine-move@NAME.service``: the process that moves an instance away from this node, or to it.

It does one act after another, as the record and what there is to see decide, until the record has
ended. Killed anywhere, it goes on with what there is to see then.
"""

from __future__ import annotations

import sys

from brine.common.entry_points import EntryPoint
from brine.common.errors import BrineError, die
from brine.instance.messages import log_to_journal
from brine.moves import records
from brine.moves.source import SourceMove

_PROGRAM = "brine-move"


def main() -> None:
    """Do the moves of the instance that is named on the command line, until none is pending."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    log_to_journal(_PROGRAM, at_once=True)
    try:
        while record := records.find(name):
            side = "source" if isinstance(record.move, SourceMove) else "target"
            # Each takes long to load, and few processes need both.
            work = EntryPoint(side, f"brine.moves.{side}_service:work").load()
            with records.working_for(record):
                work(record)
    except BrineError as error:
        die(_PROGRAM, error, 1)


if __name__ == "__main__":
    main()
