"""Ask with Ganeti's client library. Run by the system's Python, with that library in its path.

Takes the questions and writes the answers as JSON; see lab.ganeti.ask_with_client.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ganeti import constants  # type: ignore[import-not-found]
from ganeti.confd import client as confd  # type: ignore[import-not-found]


def main() -> None:
    """Ask one question after the other."""
    orders = json.load(sys.stdin)
    heard: dict[str, dict[str, Any]] = {}

    def note(upcall: Any) -> None:
        if upcall.type == confd.UPCALL_REPLY:
            reply = upcall.server_reply
            heard[upcall.salt] = {
                "salt": upcall.salt,
                "status": reply.status,
                "answer": reply.answer,
                "serial": reply.serial,
            }

    client = confd.ConfdClient(
        orders["key"], orders["peers"], confd.ConfdFilterCallback(note), port=orders["port"]
    )
    answers = []
    for number, query in orders["questions"]:
        if number not in constants.CONFD_REQS:
            raise SystemExit(f"Ganeti's client does not know requests of type {number}")
        request = confd.ConfdClientRequest(type=number, query=query)
        client.SendRequest(request, async_=False)
        client.WaitForReply(request.rsalt)
        answers.append(heard.get(request.rsalt))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
