"""The Helm chart is up to date, and `helm`, if installed, makes of it what is deployed without
it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.configs.chart import CHART, SOURCE, VALUES, files
from tests.support.deadlines import HANG_S
from tests.test_layers import ROOT

HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")
PLACES = {
    "image": "image",
    "model": "config",
    "engines": "parallel.data",
    "ingresses": "num_replicas",
    "startTimeoutSeconds": "cluster.start_timeout_s",
    "replicas": "replicas",
    "minReplicas": "minReplicas",
    "maxReplicas": "maxReplicas",
}
"""Value of the chart -> the key that it sets in what is deployed."""


def helm(*arguments: str) -> str:
    assert HELM is not None
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def substituted(values: dict[str, object], release: str) -> str:
    """Returns what helm makes of a template that only names values and the release."""
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | values
    (template,) = (CHART / "templates").iterdir()
    text = template.read_text().replace("{{ .Release.Name }}", release)
    text = re.sub(r"\{\{ \.Values\.(\w+) \}\}", lambda found: str(values[found[1]]), text)
    assert "{{" not in text
    return text


def with_helm(values: dict[str, object], release: str) -> str:
    sets = [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
    return helm("template", release, str(CHART), *sets)


@pytest.fixture(params=[substituted, pytest.param(with_helm, marks=needs_helm)])
def render(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Returns a function that returns what the chart deploys, by kind."""

    def deployed(release: str = "swell", **values: object) -> dict[str, Any]:
        return by_kind(request.param(values, release))

    return deployed


def by_kind(text: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def leaves(part: Any, place: tuple[object, ...] = ()) -> dict[tuple[object, ...], object]:
    """Returns the values of a tree by their keys. The application is a tree in a text."""
    if place and place[-1] == "serveConfigV2":
        part = yaml.safe_load(part)
    if not isinstance(part, dict | list):
        return {place: part}
    items = part.items() if isinstance(part, dict) else enumerate(part)
    found: dict[tuple[object, ...], object] = {}
    for key, inner in items:
        found |= leaves(inner, (*place, key))
    return found


def test_the_files_of_the_chart_are_up_to_date() -> None:
    for path, text in files().items():
        assert path.read_text() == text, "run `python -m tests.configs.chart`"
    found = {path for path in CHART.rglob("*") if path.is_file()}
    assert found == {*files(), CHART / "Chart.yaml"}


def test_the_chart_has_the_version_of_swell() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["name"], chart["appVersion"]) == (project["name"], project["version"])


@needs_helm
def test_helm_accepts_the_chart() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_the_chart_deploys_the_file_for_kuberay(render: Callable[..., dict[str, Any]]) -> None:
    assert render() == by_kind(SOURCE.read_text())


@pytest.mark.parametrize("name", [value.name for value in VALUES])
def test_each_value_sets_its_own_key(render: Callable[..., dict[str, Any]], name: str) -> None:
    own = f"other/{name}" if name in ("image", "model") else 77
    before, after = leaves(render()), leaves(render(**{name: own}))
    changed = {place: value for place, value in after.items() if before[place] != value}
    assert {place[-1] for place in changed} == {PLACES[name]}
    assert set(changed.values()) == {own}
    assert len(changed) == sum(place[-1] == PLACES[name] for place in after)


def test_releases_are_kept_apart(render: Callable[..., dict[str, Any]]) -> None:
    found = render("other")
    names = {kind: each["metadata"]["name"] for kind, each in found.items()}
    assert names == {
        "RayService": "other",
        "Service": "other-http",
        "PodDisruptionBudget": "other-http",
    }
    labels = {"app.kubernetes.io/instance": "other"}
    (workers,) = found["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["template"]["metadata"]["labels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
