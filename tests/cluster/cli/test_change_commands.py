"""Commands that change the cluster tell what its answer says about the change."""

from __future__ import annotations

from typing import Any

import pytest

from swell.cluster.api.admin.protocol import (
    Accepted,
    ClusterState,
    CoordinatorState,
    EngineState,
    RescaleState,
)
from swell.cluster.cli import admin_commands
from swell.cluster.cli.main import main


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    "command", [["scale", "1"], ["drain", "0"], ["resume"], ["wake"], ["reset-prefix-cache"]]
)
def test_a_change_that_is_not_stored_is_reported(
    command: list[str],
    stored: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Fake:
        def __init__(self, *_args: object) -> None: ...

        async def post(self, *_args: Any) -> Accepted:
            return Accepted(target=1, stored=stored)

        async def get(self, *_args: object) -> ClusterState:
            return ClusterState(
                epoch=1,
                wave=0,
                state="serving",
                target=1,
                engines=[EngineState(rank=0, state="active", version="1-a")],
                coordinator=CoordinatorState(pid=1),
                rescale=RescaleState(phase="idle"),
            )

    monkeypatch.setattr(admin_commands, "Client", Fake)
    assert main(command) == 0
    assert ("not stored" in capsys.readouterr().err) is not stored
