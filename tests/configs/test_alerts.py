"""The alert rules: every metric and label value in them exists, every alert is explained, and
`promtool`, if installed, checks with Prometheus itself when they fire."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from swell.cluster.client.metrics import PrometheusStats
from swell.coordinator.metrics import ViewCollector
from swell.coordinator.roster import Roster
from swell.coordinator.wire import ClusterReports, ClusterView, EngineReport
from tests.test_layers import ROOT

FOLDER = ROOT / "configs" / "prometheus"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
OF_PROMETHEUS = {"up"}
FIRING = ROOT / "tests" / "data" / "alerts_test.yaml"
NAME = re.compile(r"\b(?:swell_\w+|up)\b")
SELECTOR = re.compile(r'(swell_\w+)\{(\w+)=~?"([^"]+)"\}')


def samples() -> dict[str, list[dict[str, str]]]:
    """Returns the labels of each sample of `GET /metrics`, by its name."""
    stats = PrometheusStats()
    stats.set_other_counts({})
    stats.registry.register(
        ViewCollector(lambda: ClusterView(Roster(), ClusterReports(engines=[EngineReport(0)])))
    )
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(stats.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_the_metrics_of_a_rule_exist(rule: dict) -> None:
    exported = samples()
    names = set(NAME.findall(rule["expr"]))
    assert names
    assert names - OF_PROMETHEUS <= exported.keys()
    for name, label, pattern in SELECTOR.findall(rule["expr"]):
        values = {labels[label] for labels in exported[name]}
        assert set(pattern.split("|")) <= values


def test_the_monitoring_page_lists_exactly_the_alerts() -> None:
    page = (ROOT / "docs" / "operate" / "monitoring.md").read_text()
    named = re.findall(r"^### (Swell\w+)$", page, re.MULTILINE)
    assert named == [rule["alert"] for rule in RULES]


def test_each_alert_links_to_its_section() -> None:
    for rule in RULES:
        link = f"docs/operate/monitoring.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == link


def test_prometheus_accepts_the_files_and_each_rule_fires() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    fired = {
        case["alertname"]
        for group in yaml.safe_load(FIRING.read_text())["tests"]
        for case in group["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in RULES}
    for command in (
        ("check", "config", str(FOLDER / "scrape.yaml")),
        ("test", "rules", str(FIRING)),
    ):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
