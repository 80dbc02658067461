"""A real Prometheus scrapes the cluster: it accepts the rules, and every panel of the dashboard has
data."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import httpx
import pytest
import yaml

from swell.coordinator.transport.ports import free_port
from tests.configs.test_alerts import FOLDER, RULES
from tests.configs.test_dashboard import QUERIES, with_variables
from tests.e2e.cluster import Cluster
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

PROMETHEUS = shutil.which("prometheus")


class Prometheus:
    """A Prometheus with the project's configuration, that scrapes one cluster each second."""

    def __init__(self, cluster: Cluster, folder: Path, port: int) -> None:
        config = yaml.safe_load((FOLDER / "scrape.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FOLDER / "alerts.yaml")]
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": [urlparse(cluster.url).netloc]}]
        file = folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "log").open("w"),
        )

    def get(self, path: str, **params: str) -> dict:
        answer = httpx.get(f"{self._url}/api/v1/{path}", params=params, timeout=HANG_S)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def query(self, expr: str) -> list[dict]:
        return self.get("query", query=expr)["result"]

    def wait_for(self, expr: str) -> list[dict]:
        """Waits until a query has a result, and returns it."""
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None
            try:
                if found := self.query(expr):
                    return found
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        pytest.fail(f"{expr} has no result after {HANG_S} s")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(HANG_S)


@pytest.fixture
def prometheus(cluster: Cluster, tmp_path: Path) -> Iterator[Prometheus]:
    if PROMETHEUS is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    running = Prometheus(cluster, tmp_path, free_port("127.0.0.1"))
    yield running
    running.stop()


def test_prometheus_has_data_for_every_panel_and_evaluates_every_rule(
    cluster: Cluster, prometheus: Prometheus
) -> None:
    prometheus.wait_for('up{job="swell"} == 1')
    answer = cluster.post("/v1/completions", {"prompt": "a", "max_tokens": 5, "temperature": 0})
    assert answer.json()["usage"]["completion_tokens"] > 0
    # Rates need two samples within their range.
    prometheus.wait_for("count_over_time(swell_engine_steps_total[1m]) >= 3")
    prometheus.wait_for("increase(swell_generation_tokens_total[5m]) > 0")
    empty = [query.expr for query in QUERIES if not prometheus.query(with_variables(query.expr))]
    assert not empty
    prometheus.wait_for("swell_request_success_total")
    (group,) = prometheus.get("rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in RULES]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert not [rule["name"] for rule in group["rules"] if rule["state"] == "firing"]
