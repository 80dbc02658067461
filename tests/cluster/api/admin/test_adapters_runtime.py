"""Operators load and unload adapters over HTTP. What vLLM's clients send is accepted, requests
carry the adapter to the engine that serves them, and everything else is refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.api.admin import adapter_routes
from swell.cluster.api.admin.protocol import NOT_STORED
from swell.cluster.text.adapters import LoadedAdapters
from swell.configs.files.adapter_files import WEIGHTS_NAME
from tests.cluster.fake_cluster import FakeCluster, Stream, body, truth, until
from tests.cluster.text import tokenizers_for_tests
from tests.support.weights import adapters

pytestmark = pytest.mark.slow

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NEW = {"lora_name": "new"}
JSON = {"content-type": "application/json"}


def play(
    folder: Path,
    scene: Callable[[FakeCluster], Awaitable[None]],
    *,
    is_silent: bool = False,
    **settings: object,
) -> None:
    """Runs a scene with a manager that keeps adapter names and a coordinator that publishes them.
    If `is_silent`, the coordinator publishes nothing at first."""
    tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)
    own = adapters.make_adapter(folder / "own", SHAPES, seed=77)
    on = {"lora.enabled": True, "lora.adapters": {"own": str(own)}, **settings}

    async def run() -> None:
        cluster = FakeCluster(folder, **on)
        names = LoadedAdapters(
            cluster.config.lora,
            "fake",
            lambda: cluster.coordinator.publish(adapters=cluster.manager.adapters.all),  # type: ignore[union-attr]
        )
        cluster.manager.adapters = names
        cluster.coordinator.is_silent = is_silent
        async with cluster.serving():
            await scene(cluster)

    asyncio.run(run())


def made(folder: Path, name: str, seed: int = 0, **settings: Any) -> str:
    return str(adapters.make_adapter(folder / name, SHAPES, seed=seed, **settings))


def test_an_ingress_without_a_view_holds_requests_for_unknown_adapters(tmp_path: Path) -> None:
    """An ingress that has just started, while the coordinator is silent, holds requests for unknown
    adapters until it has a view."""

    async def scene(cluster: FakeCluster) -> None:
        client = cluster.client
        early = [
            asyncio.create_task(client.post("/v1/completions", json=body([4, 5], 2, model=name)))
            for name in ("new", "none")
        ]
        await asyncio.sleep(0.2)
        assert not any(each.done() for each in early)
        cluster.coordinator.is_silent = False
        path = made(tmp_path, "a")
        assert (await client.post(LOAD, json={"lora_name": "new", "lora_path": path})).is_success
        await cluster.join(0)
        answers = [await each for each in early]
        assert [answer.status_code for answer in answers] == [200, 404]
        assert answers[0].json()["model"] == "new"

    play(tmp_path, scene, is_silent=True)


def test_a_view_without_engines_lists_the_adapters(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await until(lambda: cluster.ingress.llm.has_seen_view)
        answer = await cluster.client.post("/v1/completions", json=body([4, 5], 2, model="none"))
        assert answer.status_code == 404

    play(tmp_path, scene)


def test_the_answer_marks_an_adapter_that_is_not_stored(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        cluster.manager.is_stored = False
        await cluster.join(0)
        files = {"lora_name": "new", "lora_path": made(tmp_path, "a")}
        for path in (LOAD, UNLOAD):
            answer = await cluster.client.post(path, json=files if path == LOAD else NEW)
            assert answer.status_code == 200
            assert answer.text.startswith("Success: ") and NOT_STORED in answer.text

    play(tmp_path, scene)


def test_an_adapter_is_loaded_and_unloaded(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        client = cluster.client
        engine = await cluster.join(0)
        path = made(tmp_path, "a")
        answer = await client.post(LOAD, json={"lora_name": "new", "lora_path": path})
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'new' added successfully.",
        )
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [
            ("fake", None),
            ("own", "fake"),
            ("new", "fake"),
        ]
        answer = await client.post("/v1/completions", json=body([4, 5], 2, model="new"))
        assert answer.status_code == 200 and answer.json()["model"] == "new"
        (arrived,) = engine.arrived
        assert arrived.adapter is not None
        assert (arrived.adapter.name, arrived.adapter.folder) == ("new", path)
        again = await client.post(LOAD, json={"lora_name": "new", "lora_path": path})
        assert again.status_code == 400 and "has already been loaded" in again.text
        answer = await client.post(UNLOAD, json={"lora_name": "new"})
        assert (answer.status_code, answer.text) == (
            200,
            "Success: LoRA adapter 'new' removed successfully.",
        )
        answer = await client.post("/v1/completions", json=body([4, 5], 2, model="new"))
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        answer = await client.post(UNLOAD, json={"lora_name": "new"})
        assert answer.status_code == 404 and "cannot be found" in answer.text

    play(tmp_path, scene)


def test_different_files_under_one_name_have_different_salts(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0)
        for seed in (1, 1, 2):
            path = made(tmp_path, "a", seed=seed)
            loading = {"lora_name": "new", "lora_path": path, "load_inplace": True}
            assert (await cluster.client.post(LOAD, json=loading)).status_code == 200
            await cluster.client.post("/v1/completions", json=body([4, 5], 2, model="new"))
        first, second, third = engine.arrived
        assert first.adapter == second.adapter != third.adapter
        assert first.cache_salt == second.cache_salt != third.cache_salt

    play(tmp_path, scene)


def test_a_request_carries_its_adapter_to_an_engine_that_joined_later(tmp_path: Path) -> None:
    """A request carries its adapter to an engine that joined later. A running answer continues with
    its adapter even after that was unloaded."""

    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        loading = {"lora_name": "new", "lora_path": made(tmp_path, "a")}
        await cluster.client.post(LOAD, json=loading)
        stream = Stream(cluster, body([4, 5], 20, model="new"))
        await stream.has(3)
        await cluster.client.post(UNLOAD, json={"lora_name": "new"})
        second = await cluster.join(1)
        await cluster.kill(first)
        await stream.done
        assert stream.ids == truth([4, 5], 20)
        (moved,) = second.arrived
        assert moved.adapter == first.arrived[0].adapter is not None

    play(tmp_path, scene)


def test_adapter_names_come_from_the_view(tmp_path: Path) -> None:
    """Adapter names come from the published view, so every ingress has them, including one that
    starts later."""

    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        services = cluster.ingress.services
        assert services.adapters.names == ["own"]
        await cluster.client.post(LOAD, json={"lora_name": "n", "lora_path": made(tmp_path, "a")})
        assert services.adapters.names == ["own", "n"]
        assert services.llm.view.reports.adapters == cluster.coordinator.view.reports.adapters

    play(tmp_path, scene)


WRONG: dict[str, tuple[str, dict[str, Any] | bytes, int, str]] = {
    "relative": (LOAD, {"lora_name": "x", "lora_path": "a/b"}, 400, "absolute path"),
    "dots": (LOAD, {"lora_name": "x", "lora_path": "/a/../b"}, 400, "absolute path"),
    "long": (LOAD, {"lora_name": "x", "lora_path": "/" + "a" * 5000}, 400, "4096 characters"),
    "zero": (LOAD, {"lora_name": "x", "lora_path": "/a\0b"}, 400, "control characters"),
    "missing folder": (LOAD, {"lora_name": "x", "lora_path": "/nowhere"}, 400, "is not a folder"),
    "long part": (LOAD, {"lora_name": "x", "lora_path": "/" + "a" * 300}, 400, "is not a folder"),
    "long accents": (
        LOAD,
        {"lora_name": "x", "lora_path": "/" + "é" * 200},
        400,
        "is not a folder",
    ),
    "no name": (LOAD, {"lora_path": "/a"}, 400, "lora_name"),
    "empty name": (LOAD, {"lora_name": "", "lora_path": "/a"}, 400, "1 to 256"),
    "long name": (LOAD, {"lora_name": "n" * 257, "lora_path": "/a"}, 400, "1 to 256"),
    "line": (LOAD, {"lora_name": "a\nb", "lora_path": "/a"}, 400, "printable"),
    "the model": (LOAD, {"lora_name": "fake", "lora_path": "/a"}, 400, "belongs to the model"),
    "of the configuration": (LOAD, {"lora_name": "own", "lora_path": "/a"}, 400, "replaced"),
    "no text": (LOAD, {"lora_name": 7, "lora_path": "/a"}, 400, "lora_name"),
    "no flag": (LOAD, {"lora_name": "x", "lora_path": "/a", "load_inplace": 1}, 400, "inplace"),
    "unknown field": (LOAD, {"lora_name": "x", "lora_path": "/a", "rank": 1}, 400, "rank"),
    "no object": (LOAD, b"[]", 400, "object"),
    "no JSON": (LOAD, b"{", 400, "JSON"),
    "deep": (LOAD, b'{"lora_name":' + b"[" * 10_000, 400, ""),
    "twice": (LOAD, b'{"lora_name":"a","lora_name":"b","lora_path":"/a"}', 400, "lora_name"),
    "large": (LOAD, b" " * 70_000, 413, "65536"),
    "unload nothing": (UNLOAD, {}, 400, "lora_name"),
    "unload what stays": (UNLOAD, {"lora_name": "own"}, 400, "is listed in"),
    "unload the model": (UNLOAD, {"lora_name": "fake"}, 404, "cannot be found"),
}


def test_wrong_bodies_are_refused_by_name(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        for name, (route, sent, status, text) in WRONG.items():
            content = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
            answer = await cluster.client.post(route, content=content, headers=JSON)
            assert answer.status_code == status, (name, answer.text)
            assert text in answer.json()["error"]["message"], (name, answer.text)
            assert len(answer.content) < 3000, name
        assert cluster.coordinator.view.reports.adapters == ()

    play(tmp_path, scene)


def test_files_that_do_not_fit_are_refused_before_the_adapter_is_announced(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        cluster.manager.calls.clear()
        for seed, settings in enumerate(({"rank": 17}, {"use_dora": True}, {"bias": "all"})):
            loading = {"lora_name": "x", "lora_path": made(tmp_path, str(seed), **settings)}
            answer = await cluster.client.post(LOAD, json=loading)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "invalid_adapter"
            assert next(iter(settings)) in error["message"]
        assert "load_adapter" not in cluster.manager.calls

    play(tmp_path, scene)


def test_a_hanging_folder_delays_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter folder on a hanging file system delays only its own request. Only a few folders
    are read at a time."""
    monkeypatch.setattr(adapter_routes, "_FILES_TIMEOUT_S", 0.5)
    hanging = Path(made(tmp_path, "hangs"))
    released = adapters.hang(monkeypatch, hanging / WEIGHTS_NAME)

    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)

        async def load(name: str, path: str) -> tuple[int, str]:
            answer = await cluster.client.post(LOAD, json={"lora_name": name, "lora_path": path})
            return answer.status_code, answer.text

        names = [f"h{number}" for number in range(adapter_routes._MAX_READS - 1)]
        late = await asyncio.gather(*(load(name, str(hanging)) for name in names))
        monkeypatch.setattr(adapter_routes, "_FILES_TIMEOUT_S", 60.0)
        assert (await load("good", made(tmp_path, "a")))[0] == 200
        monkeypatch.setattr(adapter_routes, "_FILES_TIMEOUT_S", 0.5)
        assert {status for status, _ in late} == {503}
        assert all("its file system may hang" in text for _, text in late)
        assert (await load("again", str(hanging)))[0] == 503
        status, text = await load("other", made(tmp_path, "b"))
        assert status == 503 and "8 reads of folders are in progress" in text
        monkeypatch.setattr(adapter_routes, "_FILES_TIMEOUT_S", 60.0)
        released.set()  # each reader fails
        async with asyncio.timeout(60):
            while status == 503:
                await asyncio.sleep(0.05)
                status, _ = await load("other", made(tmp_path, "c"))
        assert status == 200

    play(tmp_path, scene)


def test_only_operators_may_load_adapters(tmp_path: Path) -> None:
    (tmp_path / "users").write_text("user-key\n")
    (tmp_path / "admins").write_text("admin-key\n")
    loading = {"lora_name": "x", "lora_path": made(tmp_path, "a")}

    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        for route in (LOAD, UNLOAD):
            for key, status in ((None, 401), ("user-key", 401)):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                answer = await cluster.client.post(route, json=loading, headers=headers)
                assert answer.status_code == status
        mine = {"authorization": "Bearer admin-key"}
        assert (await cluster.client.post(LOAD, json=loading, headers=mine)).status_code == 200

    keys = {name: str(tmp_path / name) for name in ("users", "admins")}
    play(
        tmp_path,
        scene,
        **{"serve.api_keys_file": keys["users"], "serve.admin_keys_file": keys["admins"]},
    )


def test_a_server_without_lora_refuses_adapters_with_the_reason(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        loading = {"lora_name": "x", "lora_path": made(tmp_path, "a")}
        answer = await cluster.client.post(LOAD, json=loading)
        assert answer.status_code == 403 and "lora.enabled=false" in answer.text

    play(tmp_path, scene, **{"lora.enabled": False})


def test_adapter_names_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        path = made(tmp_path, "a")
        for number in range(65):
            loading = {"lora_name": f"n{number}", "lora_path": path}
            answer = await cluster.client.post(LOAD, json=loading)
            assert answer.status_code == (200 if number < 64 else 400), answer.text
        assert "64 adapters are loaded, and the limit is 64" in answer.text

    play(tmp_path, scene)
