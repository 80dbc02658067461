"""How long Ray Serve waits for a replica: longer than a network outage, and never for a hanging
replica, which its watchdog kills."""

from __future__ import annotations

from typing import Any

import pytest

from swell.cluster import app
from swell.cluster.cli.start import ray_settings
from swell.configs.schema import Config, load

LONGEST_OUTAGE_S = 40.0
NAME = "RAY_grpc_keepalive_timeout_ms"
CONFIG = {"model": {"path": "nowhere"}}


def options(config: Config) -> dict[str, Any]:
    """Returns deployment name -> deployment."""
    ingress = app.application(config)._bound_deployment
    bound = [getattr(argument, "_bound_deployment", None) for argument in ingress.init_args]
    return {deployment.name: deployment for deployment in (ingress, *bound) if deployment}


@pytest.mark.parametrize("stall_timeout_s", [3, 30, 300])
def test_an_outage_stops_no_replica(
    stall_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    config = load({**CONFIG, "cluster": {"stall_timeout_s": stall_timeout_s}})
    deployments = options(config)
    assert set(deployments) == {"Ingress", "Manager", "Store"}
    for deployment in deployments.values():
        settings = deployment._deployment_config
        # TCP retransmits within twice the duration of an outage.
        assert 3 * settings.health_check_timeout_s > 2 * LONGEST_OUTAGE_S
        assert settings.health_check_period_s <= 10, "one that has ended is found soon"
        environment = deployment.ray_actor_options["runtime_env"]["env_vars"]
        assert int(environment[NAME]) / 1000 > 2 * LONGEST_OUTAGE_S


def test_a_ray_that_outlasts_outages_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, ray_settings._SETTINGS[NAME])
    for deployment in options(load(CONFIG)).values():
        assert not deployment.ray_actor_options.get("runtime_env")
