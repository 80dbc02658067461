"""Grafana's own types read the dashboard, and lose no typed part of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

pytestmark = pytest.mark.slow

DASHBOARD = Path(__file__).parents[3] / "configs" / "grafana" / "swell.json"
NOT_TYPED = ["/annotations/list/0/titleFormat"]
"""Grafana's data source for Prometheus reads this option, and the types of dashboards lack it."""


def lost(given: Any, read: Any, path: str = "") -> list[str]:
    """Returns the paths of values that `read` lacks or has with another value. Values that
    Grafana adds are its defaults."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [
            each
            for key, value in given.items()
            for each in lost(value, read.get(key), f"{path}/{key}")
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        pairs = enumerate(zip(given, read, strict=True))
        return [each for number, pair in pairs for each in lost(*pair, f"{path}/{number}")]
    return [] if given == read else [path]


def test_the_types_of_grafana_hold_the_dashboard() -> None:
    register_default_plugins()
    given = json.loads(DASHBOARD.read_text())
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    assert lost(given, read) == NOT_TYPED
