"""Settings with which `swell serve` starts Ray."""

from __future__ import annotations

import os

import pytest

from swell.cluster.cli.start import ray_settings


def test_a_value_of_the_users_stays(monkeypatch: pytest.MonkeyPatch):
    environment = {"RAY_event_stats": "1"}
    monkeypatch.setattr(os, "environ", environment)
    ray_settings.set_defaults(60.0)
    assert environment["RAY_event_stats"] == "1"
    assert environment["RAY_enable_metrics_collection"] == "0"
