"""A real Prometheus, from Debian's package, unpacked and not installed: it reads a text again and
again, as it would ask a node for it, and answers queries."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab import peer_packages
from lab.command import run_command
from lab.waiting import wait_for

_PACKAGE = "prometheus"
_ANSWER_S = 60


def promtool(*arguments: str | Path) -> str:
    """Run promtool, and return what it prints. Raises a CommandError if it finds a fault."""
    program = peer_packages.unpacked(_PACKAGE, "usr/bin/promtool") / "usr/bin/promtool"
    return run_command([program, *arguments]).stdout


class Prometheus:
    """One that reads a text once a second.

    :param url: of its own pages.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[Any]:
        """The series that an expression selects now. A ValueError says why it is none."""
        found: list[Any] = self._asked("query", query=expression)["result"]
        return found

    def targets_are_up(self) -> bool:
        return any(float(one["value"][1]) == 1 for one in self.query("up"))

    def faults(self) -> list[str]:
        """Why it could not read the text."""
        targets = self._asked("targets")["activeTargets"]
        return [one["lastError"] for one in targets if one["lastError"]]

    def alerts(self) -> set[str]:
        """The names of the alerts that fire, or are about to."""
        return {one["labels"]["alertname"] for one in self._asked("alerts")["alerts"]}

    def _asked(self, what: str, **words: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(words)}"
        try:
            with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode(errors="replace")) from error


class _Pages(http.server.BaseHTTPRequestHandler):
    """The page /metrics, whose text is the server's."""

    def do_GET(self) -> None:
        data = self.server.text.encode()  # type: ignore[attr-defined]
        self.send_response(200)
        kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def prometheus(text: str, folder: Path, rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """One that has read a text.

    :param folder: for its files.
    :param rules: files of alerts.
    """
    program = peer_packages.unpacked(_PACKAGE, "usr/bin/prometheus") / "usr/bin/prometheus"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages) as pages:
        pages.text = text  # type: ignore[attr-defined]
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        target = f"127.0.0.1:{pages.server_port}"
        jobs = [{"job_name": "brine", "static_configs": [{"targets": [target]}]}]
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings = {"global": every, "scrape_configs": jobs, "rule_files": [*map(str, rules)]}
        (folder / "prometheus.yml").write_text(json.dumps(settings))  # YAML's JSON form
        url = f"http://127.0.0.1:{_free_port()}"
        command = [
            str(program),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={url.removeprefix('http://')}",
        ]
        environment = {**os.environ, "GOMAXPROCS": "1"}
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
        ):
            try:
                server = Prometheus(url)
                wait_for("Prometheus to read the text", lambda: _has_read(server), timeout_s=300)
                yield server
            finally:
                process.terminate()
                pages.shutdown()


def _has_read(server: Prometheus) -> bool:
    try:
        assert server.faults() == []
        return server.targets_are_up()
    except (OSError, ValueError):  # it does not listen yet
        return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
