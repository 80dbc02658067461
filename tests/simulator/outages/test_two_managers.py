"""A manager that was stopped while it started takes over from its successor late, and
terminates."""

from __future__ import annotations

from functools import partial

import pytest

from tests.simulator.actors import SimManager
from tests.simulator.control_plane import ControlPlane
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Request, Scenario

_AT_S = 4.0


def _run(seed: int) -> Run:
    requests = tuple(Request(3.5 + i, i % 2, (1, 2, 3), 24, i) for i in range(8))
    run = Run(Scenario(seed, 2, 2, False, requests, ()))
    plane = run.plane
    at = partial(plane.kernel.at, owner=WORLD)

    def freeze(plane: ControlPlane) -> None:
        frozen = plane._new_manager()
        at(_AT_S + 0.002 * (seed % 10), call=frozen.process.stop)
        at(_AT_S + 1.0, call=partial(replace, plane))
        at(_AT_S + 4.0, call=frozen.process.resume)
        at(_AT_S + 4.2 + 0.1 * seed, call=frozen.process.kill)

    def replace(plane: ControlPlane) -> None:
        earlier, plane.manager = plane.manager, plane._new_manager()
        earlier.process.kill()

    at(_AT_S, call=partial(freeze, plane))
    at(_AT_S + 8.0, call=lambda: plane.living_engines[0].process.kill())
    return run


def test_serve_replaces_the_outdated_manager() -> None:
    for seed in range(12):
        assert _run(seed).judge().broken == []


def test_an_outdated_manager_leads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimManager, "_on_deposed", lambda manager: None)
    assert any(_run(seed).judge().broken for seed in range(12))
