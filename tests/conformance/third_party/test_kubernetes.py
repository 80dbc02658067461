"""Kubernetes' own schemas accept what is deployed, without unknown fields."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

pytestmark = pytest.mark.slow

FILE = Path(__file__).parents[3] / "configs" / "k8s" / "rayservice.yaml"
VERSIONS = ("1.29", "1.37")
"""The oldest one of the Helm chart, and the newest one that has schemas."""
DOCUMENTS: list[dict[str, Any]] = [*yaml.safe_load_all(FILE.read_text())]
RAY = DOCUMENTS[0]["spec"]["rayClusterConfig"]
PODS = [RAY["headGroupSpec"]["template"], *(one["template"] for one in RAY["workerGroupSpecs"])]


def pod(template: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **template}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("found", [*map(pod, PODS), *DOCUMENTS[1:]], ids=lambda one: one["kind"])
def test_kubernetes_accepts_what_is_deployed(found: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_refuses_an_unknown_field(version: str) -> None:
    wrong = copy.deepcopy(pod(PODS[-1]))
    wrong["spec"]["containers"][0]["readinessProbes"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)
