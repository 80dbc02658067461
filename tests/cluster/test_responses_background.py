"""Responses in the background: how far they are, who ends them, and what becomes of them where an
ingress, a manager or all engines are gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from swell.cluster import background
from swell.cluster.stored import LEASE_S, Begin, Kept, Read, Store
from tests.cluster.fake_cluster import until
from tests.cluster.responses_house import House, checked, eventually


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEAT_S", 0.01)


def test_in_the_background(tmp_path: Path) -> None:
    async def story() -> None:
        async with House(tmp_path, "the fox").open(steps=1) as house:
            responses = house.client.responses
            begun = checked(await house.ask(background=True))
            assert (begun.status, begun.background) == ("queued", True)
            assert checked(await responses.retrieve(begun.id)).status == "in_progress"
            with pytest.raises(openai.BadRequestError, match="in_progress"):
                await house.ask(previous_response_id=begun.id)
            house.engine.allow()
            done = await eventually(
                lambda: responses.retrieve(begun.id), lambda found: found.status != "in_progress"
            )
            assert checked(done).status == "completed" and done.output_text == "the fox"
            assert (await responses.cancel(begun.id)).status == "completed"
            assert len(house.keeper.of(Begin)) == len(house.keeper.of(Store)) == 1

    asyncio.run(story())


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_what_nobody_wants_is_computed_no_longer(tmp_path: Path, how: str) -> None:
    """Whoever says so says it to the manager; the ingress that computes hears it at its beat."""

    async def story() -> None:
        async with House(tmp_path, "the fox").open(steps=1) as house:
            responses = house.client.responses
            begun = await house.ask(background=True)
            await until(lambda: house.engine.requests)
            if how == "cancel":
                assert checked(await responses.cancel(begun.id)).status == "cancelled"
            else:
                await responses.delete(begun.id)
            await until(lambda: house.engine.aborted)
            assert not house.engine.requests
            if how == "cancel":
                assert (await responses.retrieve(begun.id)).status == "cancelled"
            else:
                with pytest.raises(openai.NotFoundError):
                    await responses.retrieve(begun.id)
            assert house.keeper.of(Store) == []

    asyncio.run(story())


def test_what_is_not_in_the_background_cannot_be_cancelled(tmp_path: Path) -> None:
    async def story() -> None:
        async with House(tmp_path, "x").open() as house:
            answer = await house.ask()
            with pytest.raises(openai.BadRequestError) as caught:
                await house.client.responses.cancel(answer.id)
            assert caught.value.code == "not_in_background"

    asyncio.run(story())


def test_what_a_dead_ingress_computed_has_failed(tmp_path: Path) -> None:
    async def story() -> None:
        async with House(tmp_path, "x").open(steps=0) as house:
            retrieve = house.client.responses.retrieve
            begun = await house.ask(background=True)
            (begin,) = house.keeper.of(Begin)
            body = begin.kept.body.replace(begun.id.encode(), b"resp_dead")
            kept = Kept(body, begin.kept.items, background=True)
            assert house.keeper.store.handle(Begin("resp_dead", kept, "gone"), 0.0)
            assert (await retrieve("resp_dead")).status == "in_progress"
            beats = len(house.keeper.wishes)
            house.keeper.now_s = LEASE_S
            await until(lambda: len(house.keeper.wishes) > beats + 1)
            house.keeper.now_s = LEASE_S + 1
            dead = checked(await retrieve("resp_dead"))
            assert (dead.status, dead.error.code) == ("failed", "server_error")
            assert "gone" in dead.error.message
            assert (await retrieve(begun.id)).status == "in_progress"

    asyncio.run(story())


def test_a_new_manager_learns_what_runs(tmp_path: Path) -> None:
    async def story() -> None:
        async with House(tmp_path, "the fox").open(steps=1) as house:
            responses = house.client.responses
            begun = await house.ask(background=True)
            house.keeper.away = True
            house.keeper.forget()
            house.keeper.away = False
            await until(lambda: house.keeper.store.handle(Read(begun.id), 0.0))
            assert (await responses.retrieve(begun.id)).status == "in_progress"
            house.keeper.away = True
            house.engine.allow()
            await until(lambda: any(isinstance(wish, Store) for wish in house.keeper.missed))
            house.keeper.away = False
            done = await eventually(
                lambda: responses.retrieve(begun.id), lambda found: found.status == "completed"
            )
            assert done.output_text == "the fox"

    asyncio.run(story())


def test_a_background_answer_that_no_engine_gives_has_failed(tmp_path: Path) -> None:
    async def story() -> None:
        settings = {"serve.no_engine_timeout_s": 0.05, "cluster.start_timeout_s": 0.05}
        async with House(tmp_path, "the fox", **settings).open(steps=0) as house:
            begun = await house.ask(background=True)
            await until(lambda: house.engine.requests)
            await house.cluster.kill(house.engine)
            failed = await eventually(
                lambda: house.client.responses.retrieve(begun.id),
                lambda found: found.status != "in_progress",
            )
            assert checked(failed).status == "failed" and "waited" in failed.error.message

    asyncio.run(story())


def test_what_runs_makes_no_room_for_more(tmp_path: Path) -> None:
    async def story() -> None:
        house = House(tmp_path, "x")
        house.keeper.limit = 1
        house.keeper.forget()
        async with house.open(steps=0):
            await house.ask(background=True)
            with pytest.raises(openai.InternalServerError) as caught:
                await house.ask(background=True)
            assert (caught.value.status_code, caught.value.code) == (503, "store_full")

    asyncio.run(story())


def test_an_answer_that_finds_no_room_has_failed(tmp_path: Path) -> None:
    async def story() -> None:
        house = House(tmp_path, "the fox " * 100)
        house.keeper.limit_bytes = 1600
        house.keeper.forget()
        async with house.open():
            begun = await house.ask(background=True)
            failed = await eventually(
                lambda: house.client.responses.retrieve(begun.id),
                lambda found: found.status != "in_progress",
            )
            assert checked(failed).status == "failed" and failed.output == []
            assert "stored_response_bytes" in failed.error.message

    asyncio.run(story())
