"""The examples for Prometheus and Grafana, by Prometheus's own tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from dashboard import DASHBOARD, RULES, expressions
from lab.prometheus import promtool


def test_the_alerts_fire_when_they_should_and_else_do_not(tmp_path: Path) -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)
    shutil.copy(RULES, tmp_path)
    test = Path(__file__).with_name("prometheus-rules-test.yml")
    shutil.copy(test, tmp_path)
    assert "SUCCESS" in promtool("test", "rules", tmp_path / test.name)


def test_each_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(expressions())
    ]
    assert len(rules) > 20
    file = tmp_path / "dashboard.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)


def test_panels_have_their_own_ids_and_places() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
