"""The examples for Prometheus and Grafana, and the queries in them."""

from __future__ import annotations

import json
import re

from lab.tree import TREE

_EXAMPLES = TREE / "pkgs/common/system/examples"
RULES = _EXAMPLES / "prometheus-rules.yml"
DASHBOARD = _EXAMPLES / "grafana-dashboard.json"
_NAME = re.compile(r"\bbrine_\w+")


def expressions() -> list[str]:
    """The queries of the dashboard, where all jobs and nodes are chosen."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [one.replace("$job", ".*").replace("$node", ".*") for one in found]


def metrics_in(text: str) -> set[str]:
    """The names of Brine's metrics in queries."""
    return set(_NAME.findall(text))
