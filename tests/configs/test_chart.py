"""The Helm chart is up to date, and `helm`, if installed, makes of it what is deployed without
it."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.configs.chart import CHART, SOURCE, VALUES, files
from tests.test_layers import ROOT

HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")


def helm(*arguments: str) -> str:
    assert HELM is not None
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def by_kind(text: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def rendered(*arguments: str, release: str = "swell") -> dict[str, Any]:
    """Returns what the chart deploys, by kind."""
    return by_kind(helm("template", release, str(CHART), *arguments))


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


@needs_helm
def test_the_chart_deploys_the_file_for_kuberay() -> None:
    assert rendered() == by_kind(SOURCE.read_text())


@needs_helm
def test_each_value_changes_what_is_deployed(tmp_path: Path) -> None:
    before = rendered()
    changed = {"image": "other/image:2", "model": "other/model"}
    for value in VALUES:
        own = changed.get(value.name, 77)
        file = tmp_path / f"{value.name}.yaml"
        file.write_text(yaml.safe_dump({value.name: own}))
        after = rendered("--values", str(file))
        assert after != before and str(own) in str(after), value.name


@needs_helm
def test_releases_are_kept_apart() -> None:
    found = rendered(release="other")
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
