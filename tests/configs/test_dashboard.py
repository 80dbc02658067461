"""The Grafana dashboard: its file is up to date, its metrics exist, it shows every metric, and
`promtool`, if installed, accepts its queries."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from tests.configs.dashboard import DASHBOARD, dashboard, meanings, metrics_of, panels, text
from tests.configs.test_alerts import samples

QUERIES = [query for panel in panels() for query in panel.queries]
BY = re.compile(r"by \((\w+)\) \((?:rate|increase)?\(?(swell_\w+)")


def with_variables(expr: str) -> str:
    """Returns a query with values in place of the variables of Grafana."""
    return expr.replace("$job", "swell").replace("$__rate_interval", "1m")


def test_the_file_is_up_to_date() -> None:
    assert DASHBOARD.read_text() == text(), "run `python -m tests.configs.dashboard`"


def test_each_metric_is_shown() -> None:
    shown = {name for query in QUERIES for name in metrics_of(query.expr)}
    assert shown == meanings().keys()


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.expr)
def test_metrics_and_labels_of_a_query_exist(query) -> None:
    exported = samples()
    assert set(re.findall(r"swell_\w+", query.expr)) <= exported.keys()
    for label, metric in BY.findall(query.expr):
        assert all(label in labels for labels in exported[metric])
    labels = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
    assert labels <= {label for label, _ in BY.findall(query.expr)}


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    for place in places:
        assert place["x"] + place["w"] <= 24
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below


def test_prometheus_accepts_each_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    rules = [
        {"record": f"panel:{number}", "expr": with_variables(query.expr)}
        for number, query in enumerate(QUERIES)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
