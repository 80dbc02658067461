"""Sleep over HTTP: what operators may send, which clusters can sleep, and what requests get."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swell.configs.schema import load
from swell.configs.sleep_check import sleep_refusal
from swell.coordinator.manager_state import Sleep
from tests.cluster.api.test_admission_http import NO_STEPS, REQUEST
from tests.cluster.fake_cluster import FakeCluster, body, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

JSON = {"content-type": "application/json"}
SLEEP, WAKE = "/admin/sleep", "/admin/wake"
GOOD: dict[str, tuple[str, Any, tuple[int, str]]] = {
    "nothing": ("", None, (1, "wait")),
    "an object": ("", {}, (1, "wait")),
    "a body": ("", {"level": 2, "requests": "refuse"}, (2, "refuse")),
    "a query": ("?level=2&requests=refuse", None, (2, "refuse")),
    "a query as of vLLM": ("?level=1", None, (1, "wait")),
    "a query beside an empty object": ("?level=2", {}, (2, "wait")),
}
WRONG: dict[str, tuple[str, Any, str]] = {
    "level 0": ("", {"level": 0}, "level"),
    "level 3 in the query": ("?level=3", None, "level"),
    "no number": ("?level=deep", None, "level"),
    "a text": ("", {"level": "1"}, "level"),
    "another choice": ("?requests=drop", None, "requests"),
    "an unknown field": ("", {"tags": ["weights"]}, "tags"),
    "an unknown parameter": ("?mode=abort", None, "mode"),
    "a long number": ("?level=" + "9" * 5000, None, "level"),
    "digits of another script": ("?level=\u0661", None, "level"),
    "a repeated parameter": ("?level=1&level=2", None, "level"),
    "both": ("?level=1", {"level": 1}, "query"),
}
REFUSED = {503, 529}
"""The status codes of a refusal. 529 is Anthropic's code for an overloaded API."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_sleep_and_wake_accept_only_valid_parameters(folder: Path) -> None:
    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            for name, (query, sent, arguments) in GOOD.items():
                answer = await cluster.client.post(SLEEP + query, json=sent, headers=JSON)
                assert answer.status_code == 202, (name, answer.text)
                assert cluster.manager.arguments["sleep"] == arguments, name
            cluster.manager.calls.clear()
            for name, (query, sent, word) in WRONG.items():
                answer = await cluster.client.post(SLEEP + query, json=sent, headers=JSON)
                assert answer.status_code == 400, (name, answer.text)
                assert word in answer.json()["error"]["message"], (name, answer.text)
            assert (await cluster.client.post(WAKE, headers=JSON)).status_code == 202
            assert (
                await cluster.client.post(WAKE + "?tags=weights", headers=JSON)
            ).status_code == 400
            assert cluster.manager.calls == ["wake"]

    asyncio.run(run())


@pytest.mark.parametrize("refuses", [False, True])
def test_requests_to_a_sleeping_cluster_wait_or_are_refused(folder: Path, refuses: bool) -> None:
    """A request that has begun waits in either case."""

    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            engine = await cluster.join(0, NO_STEPS)
            client, services = cluster.client, cluster.ingress.services
            begun = asyncio.create_task(client.post("/v1/completions", json=body([9], 2)))
            await until(lambda: len(engine.arrived) == 1)
            cluster.coordinator.publish(state="paused", sleep=Sleep(2, refuses))
            await until(lambda: services.llm.view.reports.sleep.level)
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert "asleep, level 2 by an operator" in ready.json()["error"]["message"]
            late = [asyncio.create_task(client.post(p, json=w)) for p, w in REQUEST.items()]
            if refuses:
                for answer in await asyncio.gather(*late):
                    assert answer.status_code in REFUSED and "retry-after" in answer.headers
                    assert "until they are woken up" in answer.text
            else:
                await until(lambda: len(engine.arrived) == 1 + len(late))
            cluster.coordinator.publish(state="serving", sleep=Sleep())
            await until(lambda: not services.llm.view.reports.sleep.level)
            engine.allow()
            assert (await begun).status_code == 200
            found = {answer.status_code for answer in await asyncio.gather(*late)}
            assert found == (REFUSED if refuses else {200})
            answer = await client.post("/v1/completions", json=body([9], 2))
            assert answer.status_code == 200

    asyncio.run(run())


def test_engines_that_cannot_sleep_refuse_with_the_reason() -> None:
    def refusal(level: int, **settings: object) -> str:
        config = load({"model": {"path": "none"}}, settings)
        return sleep_refusal(config, level) or ""

    assert refusal(1) == refusal(2) == refusal(1, **{"lora.enabled": True}) == ""
    assert "use level=1" in refusal(2, **{"lora.enabled": True})
    for level in (1, 2):
        assert "share experts cannot sleep" in refusal(level, **{"parallel.expert": True})
