"""`swell upgrade` exits when its version serves, or when it cannot, and reports which."""

from __future__ import annotations

from typing import Any

import pytest

from swell.cluster.api.admin.protocol import (
    Accepted,
    ClusterState,
    CoordinatorState,
    EngineState,
    RescaleState,
    UpgradeState,
)
from swell.cluster.cli import admin_commands
from swell.cluster.cli.main import main

OLD, NEW, OTHER = "1-a", "2-b", "3-c"


def run(monkeypatch: pytest.MonkeyPatch, version: str, *states: UpgradeState) -> int:
    """Runs the command against a server that accepts this version and reports these states. Returns
    the exit code."""
    left = list(states)

    class Fake:
        def __init__(self, *_args: object) -> None: ...

        async def post(self, *_args: Any) -> Accepted:
            return Accepted(target=1, version=version)

        async def get(self, *_args: object) -> ClusterState:
            assert left, "it asks on"
            return ClusterState(
                epoch=1,
                wave=0,
                state="serving",
                target=1,
                engines=[EngineState(rank=0, state="active", version=version)],
                coordinator=CoordinatorState(pid=1),
                rescale=RescaleState(phase="idle"),
                upgrade=left.pop(0),
            )

    monkeypatch.setattr(admin_commands, "Client", Fake)
    monkeypatch.setattr(admin_commands, "_POLL_S", 0.0)
    code = main(["upgrade", "configs/models/nano"])
    assert not left, "it has asked until the end"
    return code


def state(phase: str, version: str, previous: str | None, error: str | None = None) -> UpgradeState:
    return UpgradeState(phase=phase, version=version, previous=previous, error=error)


def test_upgrade_ends_when_all_engines_have_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, NEW, state("in progress", NEW, OLD), state("idle", NEW, None)) == 0


def test_a_command_that_cancels_an_upgrade_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, OLD, state("cancelling", OLD, NEW), state("cancelled", OLD, NEW)) == 0


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ([("rolling back", OLD), ("failed", OLD)], "the upgrade failed: no such file"),
        ([("cancelling", OLD), ("cancelled", OLD)], "the upgrade was cancelled"),
        ([("in progress", OTHER)], f"replaced by another one, to version {OTHER}"),
        ([("idle", OTHER)], f"replaced by another one, to version {OTHER}"),
    ],
)
def test_upgrade_fails_when_another_version_becomes_the_target(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    states: list[tuple[str, str]],
    says: str,
) -> None:
    found = [
        state(phase, version, OLD if version == OTHER else NEW, "no such file")
        for phase, version in states
    ]
    assert run(monkeypatch, NEW, state("in progress", NEW, OLD), *found) == 1
    assert says in capsys.readouterr().err
