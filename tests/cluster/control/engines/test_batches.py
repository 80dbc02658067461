"""Jobs that run in parallel, and when their results are taken."""

from __future__ import annotations

import asyncio

from swell.cluster.control.engines.concurrent_tasks import in_batches
from tests.cluster.control.fake_manager import VirtualTimeLoop


async def _job(seconds: float, fails: bool = False) -> None:
    await asyncio.sleep(seconds)
    if fails:
        raise ValueError("it fails")


def _batches(**jobs: tuple[float, bool]) -> list[tuple[float, dict[str, bool]]]:
    """Returns the time of each batch, and job -> whether it succeeded."""

    async def collect() -> list[tuple[float, dict[str, bool]]]:
        now = asyncio.get_running_loop().time
        work = {key: _job(*job) for key, job in jobs.items()}
        return [
            (round(now(), 3), {key: error is None for key, error in batch.items()})
            async for batch in in_batches(work)
        ]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(collect())


def test_jobs_of_similar_duration_form_one_batch() -> None:
    assert _batches(b=(10.0, False), a=(15.0, False)) == [(15.0, {"b": True, "a": True})]


def test_slower_jobs_form_a_later_batch() -> None:
    found = _batches(slow=(500.0, False), a=(10.0, False), b=(19.0, False), late=(499.0, False))
    assert found == [(20.0, {"a": True, "b": True}), (500.0, {"slow": True, "late": True})]


def test_a_failed_job_does_not_end_the_wait_for_others() -> None:
    assert _batches(a=(1.0, True), b=(10.0, False), c=(50.0, True)) == [
        (20.0, {"a": False, "b": True}),
        (50.0, {"c": False}),
    ]


def test_an_idle_job_does_not_delay_a_batch() -> None:
    """A job that is still idle when the others are done does not delay their batch."""

    async def collect() -> list[tuple[float, list[str]]]:
        now = asyncio.get_running_loop().time
        work = {"a": _job(10.0), "b": _job(12.0), "idle": _job(500.0)}
        batches = in_batches(work, lambda key: key == "idle")
        return [(now(), list(batch)) async for batch in batches]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(collect()) == [(12.0, ["a", "b"]), (500.0, ["idle"])]


def test_remaining_jobs_are_cancelled() -> None:
    ended: list[str] = []

    async def job(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)

    async def scenario() -> None:
        batches = in_batches({"a": job("a", 1.0), "b": job("b", 99.0)})
        await anext(batches)
        await batches.aclose()
        await asyncio.sleep(0.0)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())
    assert ended == ["a", "b"]
