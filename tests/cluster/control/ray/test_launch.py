"""How an application stops. `swell serve` leaves nothing on a Ray cluster that is not its own. Ray
and Serve are tables here."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import ApplicationStatus

from swell.cluster import serve_status
from swell.cluster.cli.start import application
from swell.cluster.control.engines.actor_names import EngineName
from swell.cluster.control.ray import ray_cluster
from swell.configs.schema import load
from tests.cluster.control.ray.fake_ray import FakeRay

ENGINE = str(EngineName("swell-swell", 0, "0" * 12, "1"))


@pytest.mark.parametrize("manager_lives", [True, False])
def test_leftovers_of_a_dead_manager_are_removed(monkeypatch, manager_lives) -> None:
    """If the manager has just died, Serve deletes the application without starting another manager,
    so `swell serve` removes what is left."""
    ray = FakeRay()
    ray.actors = dict.fromkeys([ENGINE, "coordinator-1"])
    ray.reserved = [ENGINE, "swell-other-engine-0"]
    ray.kv = {b"swell-swell:note": b"1", b"swell-other:note": b"2"}

    def delete(_name: str, **_options: Any) -> None:
        if manager_lives:
            ray.actors.clear()
            ray.reserved.remove(ENGINE)
            del ray.kv[b"swell-swell:note"]

    monkeypatch.setattr(serve, "start", lambda **_options: None)
    monkeypatch.setattr(serve, "delete", delete)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr(application, "_deploy", lambda *_: None)
    monkeypatch.setattr(ray_cluster, "RayCluster", lambda: ray)
    config, lines = load({"model": {"path": "m"}}), list[str]()
    with application.application(config, lines.append, threading.Event(), own_ray=False):
        pass
    ended = [] if manager_lives else ["coordinator-1", ENGINE, ENGINE]  # an actor and a group
    assert bool(lines) is not manager_lives
    assert (ray.ended, list(ray.kv)) == (ended, [b"swell-other:note"])


@pytest.mark.parametrize(
    ("status", "ends"), [(ApplicationStatus.RUNNING, False), (ApplicationStatus.DELETING, True)]
)
def test_a_manager_waits_for_a_controller_that_has_just_died(monkeypatch, status, ends) -> None:
    """An unknown state does not justify stopping all engines."""
    answers = [RuntimeError("the controller is being restarted")] * 2

    def find_status() -> Any:
        if answers:
            raise answers.pop()
        return SimpleNamespace(applications={"swell": SimpleNamespace(status=status)})

    monkeypatch.setattr(serve, "status", find_status)
    monkeypatch.setattr(serve_status, "_POLL_S", 0.0)
    assert asyncio.run(serve_status.is_deleting("swell")) is ends
