"""How an application ends, and that `swell serve` leaves nothing on a Ray that is not its own. Ray
and Serve are tables."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import ApplicationStatus

from swell.cluster import app
from swell.cluster.cli import launch
from swell.cluster.control import strays
from swell.cluster.control.actor_names import EngineName
from swell.cluster.control.checkpoint_store import CheckpointStore
from swell.configs.schema import load

ENGINE = str(EngineName("swell-swell", 0, "0" * 12, "1"))


@pytest.mark.parametrize("manager_lives", [True, False])
def test_what_a_dead_manager_has_left_is_ended(monkeypatch, manager_lives) -> None:
    """Serve deletes an application whose manager has just died, and starts no other one."""
    actors, groups = {ENGINE, "coordinator-1"}, {ENGINE, "swell-other-engine-0"}
    notes = {"swell-swell", "swell-other"}

    def delete(_name: str, **_options: Any) -> None:
        if manager_lives:
            actors.clear()
            groups.discard(ENGINE)
            notes.discard("swell-swell")

    async def clear(self: CheckpointStore) -> None:
        notes.discard(self._key.decode())

    def destroy(actor: str | None, group: str | None) -> None:
        actors.discard(actor or "")
        groups.discard(group or "")

    monkeypatch.setattr(serve, "start", lambda **_options: None)
    monkeypatch.setattr(serve, "delete", delete)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr(launch, "_deploy", lambda _config: None)
    monkeypatch.setattr(strays, "actor_names", lambda _namespace: set(actors))
    monkeypatch.setattr(
        strays,
        "group_ids",
        lambda name_filter: {name: [name] for name in groups if name_filter(name)},
    )
    monkeypatch.setattr(strays, "find_actor", lambda name, _namespace: name)
    monkeypatch.setattr(strays, "group", lambda group_id: group_id)
    monkeypatch.setattr(strays, "destroy", destroy)
    monkeypatch.setattr(CheckpointStore, "clear", clear)
    with launch._application(load({"model": {"path": "m"}}), own_ray=False):
        pass
    assert (actors, groups, notes) == (set(), {"swell-other-engine-0"}, {"swell-other"})


@pytest.mark.parametrize(
    ("status", "ends"), [(ApplicationStatus.RUNNING, False), (ApplicationStatus.DELETING, True)]
)
def test_a_manager_waits_for_a_controller_that_has_just_died(monkeypatch, status, ends) -> None:
    """What it does not know is no reason to end all engines."""
    answers = [RuntimeError("the controller is being restarted")] * 2

    def said() -> Any:
        if answers:
            raise answers.pop()
        return SimpleNamespace(applications={"swell": SimpleNamespace(status=status)})

    monkeypatch.setattr(serve, "status", said)
    monkeypatch.setattr(app, "_STATUS_POLL_S", 0.0, raising=False)
    assert asyncio.run(app._is_deleting("swell")) is ends
