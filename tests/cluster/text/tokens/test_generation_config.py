"""The defaults in a model's generation_config.json apply to every API, unless the request sets a
value."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.text.tokens.generation_config import GenerationDefaults, read_generation_config
from swell.configs.schema import ConfigError, load
from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.text import tokenizers_for_tests

GIVEN = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "max_new_tokens": 9,
    "do_sample": False,
    "eos_token_id": 2,
    "transformers_version": "5.0.0",
}
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DEFAULTS = {name: GIVEN[name] for name in NAMES}
NEUTRAL = dict(zip(NAMES, (1.0, 1.0, 0, 0.0, 1.0), strict=True))
SAID = dict(zip(NAMES, (0.75, 0.9, 3, 0.5, 1.25), strict=True))
HELLO = [{"role": "user", "content": "hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2]},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "hello", "store": False},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(GIVEN))
    return tmp_path


def engine_requests(
    folder: Path, requests: list[tuple[str, dict[str, Any]]], **settings: object
) -> list[Any]:
    """Returns, for each payload, the request that the engine receives and the answer."""

    async def run() -> list[Any]:
        async with FakeCluster(folder, **settings).serving() as cluster:
            engine = await cluster.join(0)
            got = []
            for path, payload in requests:
                answer = await cluster.client.post(path, json={"model": "fake", **payload})
                assert answer.status_code == 200, answer.text
                got.append((engine.arrived[-1], answer.json()))
            return got

    return asyncio.run(run())


def filters(request: Any) -> dict[str, float]:
    return {name: getattr(request.sampler, name) for name in NAMES}


@pytest.mark.slow
def test_fields_that_a_request_omits_have_the_models_defaults(folder):
    got = engine_requests(folder, list(REQUESTS.items()))
    assert [filters(request) for request, _ in got] == [DEFAULTS] * 4
    # Chat and responses lack a default limit of their own. Completions and messages have one.
    assert [request.max_tokens for request, _ in got] == [16, 9, 9, 5]
    received = got[2][1]
    assert (received["temperature"], received["top_p"]) == (0.25, 0.5)


@pytest.mark.slow
def test_null_means_the_default_and_a_neutral_value_does_not(folder):
    null = dict.fromkeys(NAMES)
    requests = [("/v1/completions", {"prompt": [1], **null})]
    requests += [
        ("/v1/chat/completions", {"messages": HELLO, **fields}) for fields in (NEUTRAL, SAID)
    ]
    requests += [("/v1/responses", {"input": "x", **NEUTRAL})]
    few = {name: SAID[name] for name in ("temperature", "top_p", "top_k")}
    requests += [("/v1/messages", {"messages": HELLO, "max_tokens": 2, **few})]
    got = [filters(request) for request, _ in engine_requests(folder, requests)]
    assert got == [DEFAULTS, NEUTRAL, SAID, NEUTRAL, {**DEFAULTS, **few}]


@pytest.mark.slow
def test_the_file_is_ignored_if_configured(folder):
    got = engine_requests(folder, list(REQUESTS.items()), **{"model.generation_config": "none"})
    assert [filters(request) for request, _ in got] == [NEUTRAL] * 4
    assert got[1][0].max_tokens > 100
    assert got[2][1]["temperature"] == 1.0


@pytest.mark.slow
def test_a_longer_answer_than_the_default_may_be_requested(folder):
    payload = {"messages": HELLO, "max_tokens": 40, "ignore_eos": True}
    ((request, _),) = engine_requests(folder, [("/v1/chat/completions", payload)])
    assert request.max_tokens == 40


def read(tmp_path: Path, **given: object) -> GenerationDefaults:
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    return read_generation_config(load({"model": {"path": str(tmp_path)}}).model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", -0.5),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", "many"),
    ],
)
def test_a_value_that_no_request_may_have_is_refused_by_the_files_name(tmp_path, name, value):
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, **{name: value})
    assert str(tmp_path / "generation_config.json") in str(refused.value)
    assert name in str(refused.value)
    assert "model.generation_config=none" in str(refused.value)


def test_null_or_absent_keys_have_no_default(tmp_path):
    assert read(tmp_path, temperature=None, top_k=None) == GenerationDefaults()
    assert read(tmp_path, top_k=-1).sampling == {"top_k": -1}
    (tmp_path / "generation_config.json").unlink()
    assert read_generation_config(load({"model": {"path": str(tmp_path)}}).model) == (
        GenerationDefaults()
    )
