"""Changes that are stored, or that could not be stored: the answer to a change says which."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

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


def test_the_number_of_emptied_prefix_caches_outlives_the_manager() -> None:
    """Otherwise requests would get a salt again that has blocks."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        for count in (1, 2, 3):
            result = await deployed(harness).reset_prefix_cache()
            assert result.refusal is None and result.is_stored
            await harness.settle()
            assert harness.coordinator.kept.desired.cache_generation == count
            assert (await harness.manager.describe())["cache_generation"] == count
            await harness.lose_manager()
            await harness.start()

    run(scenario)


def test_a_change_that_reaches_the_coordinator_before_the_next_manager_claims_is_kept() -> None:
    """The manager before it could not store the change."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.lose_manager()
        claim, kept = harness.checkpoints.claim, harness.coordinator.kept

        async def claim_after_the_change(owner: str, known_term: int) -> int:
            changed = replace(kept.desired, target=2, number=kept.desired.number + 1)
            harness.coordinator.save_manager_state(replace(kept, desired=changed))
            return await claim(owner, known_term)

        harness.checkpoints.claim = claim_after_the_change  # type: ignore[method-assign]
        await harness.start()
        assert harness.manager.target == 2 and harness.active == [0, 1]

    run(scenario)
