"""The answer to a change says whether the change is stored."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.app import ManagerDeployment
from swell.configs.runtime.log import StructuredLogger
from tests.cluster.control.fake_manager import ManagerHarness, run


def deployed(harness: ManagerHarness) -> ManagerDeployment:
    """Returns the deployment of the harness's manager, without Serve."""
    deployment = object.__new__(ManagerDeployment)
    deployment._manager = harness.manager
    deployment._log = StructuredLogger("test")
    return deployment


@pytest.mark.parametrize("failure", ["", "away", "hangs"])
def test_a_change_is_stored_or_its_answer_marks_it_as_not_stored(failure: str) -> None:
    """The change takes effect in any case, and is stored when the store answers."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        if failure:
            setattr(harness.checkpoints, failure, True)
        result = await deployed(harness).scale(2, None)
        assert result.refusal is None and result.target == 2
        assert result.is_stored is not bool(failure)
        if result.is_stored:
            assert harness.checkpoints.page[0].desired.target == 2
        elif failure == "away":
            assert harness.checkpoints.page[0].desired.target == 1
        await harness.settle()
        assert harness.active == [0, 1]
        harness.checkpoints.away = harness.checkpoints.hangs = False
        await asyncio.sleep(60)
        assert harness.checkpoints.page[0].desired.target == 2

    run(scenario)
