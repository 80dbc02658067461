"""`prompt_embeds` over HTTP: what an engine receives, what moves with a request, and what is
refused."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from swell.cluster.text.params.sampling_params import DERIVED_SALT
from swell.worker.sampler_wire import PromptEmbeds
from tests.cluster.fake_cluster import FakeCluster, Stream, body, truth, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

WIDTH = 4
ON = {"model.prompt_embeds": True}


def with_header(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(data: bytes, shape: list[int], **fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)], **fields}


def file(values: list[float], shape: list[int], **fields: Any) -> bytes:
    data = struct.pack(f"<{len(values)}f", *values)
    return with_header({"prompt_embeds": tensor(data, shape, **fields)}, data)


def halves(data: bytes, dtype: str) -> bytes:
    return with_header({"x": tensor(data, [1, WIDTH], dtype=dtype)}, data)


def sent(content: bytes) -> str:
    return base64.b64encode(content).decode()


def embeds(tokens: int, first: float = 0.5) -> str:
    return sent(file([first + n for n in range(tokens * WIDTH)], [tokens, WIDTH]))


def play(folder: Path, scene: Callable[[FakeCluster], Awaitable[None]], **settings: object) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"hidden_size": WIDTH}))

    async def run() -> None:
        async with FakeCluster(folder, **{**ON, **settings}).serving() as cluster:
            await scene(cluster)

    asyncio.run(run())


async def post(cluster: FakeCluster, **fields: Any) -> httpx.Response:
    return await cluster.client.post(
        "/v1/completions", json={"model": "fake", "max_tokens": 3, "ignore_eos": True, **fields}
    )


def test_an_engine_receives_the_embeddings_and_a_salt_made_from_them(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0)
        answer = await post(cluster, prompt_embeds=embeds(3))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 3
        await post(cluster, prompt_embeds=embeds(3), prompt=None)
        await post(cluster, prompt_embeds=embeds(3, 0.25), prompt="")
        await post(cluster, prompt_embeds=embeds(3), cache_salt="mine")
        both = await post(cluster, prompt_embeds=[embeds(2), embeds(5)], n=2)
        assert len(both.json()["choices"]) == 4 and both.json()["usage"]["prompt_tokens"] == 7
        given = [request.prompt_embeds for request in engine.arrived]
        data = struct.pack("<12f", *(0.5 + n for n in range(12)))
        assert given[0] == PromptEmbeds("F32", WIDTH, data)
        assert engine.arrived[0].prompt_token_ids == [0, 0, 0]
        salts = [request.cache_salt for request in engine.arrived]
        assert salts[0] == salts[1] and len({salts[0], salts[2], salts[3]}) == 3
        assert None not in salts
        assert [one.num_tokens for one in given if one is not None] == [3, 3, 3, 3, 2, 2, 5, 5]

    play(tmp_path, scene)


def test_a_default_of_the_model_that_needs_tokens_is_left_out(tmp_path: Path) -> None:
    """Qwen2.5-Instruct has such a default in its generation_config.json."""
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.05, "top_k": 9}')

    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0)
        answer = await post(cluster, prompt_embeds=embeds(3))
        assert answer.status_code == 200, answer.text
        await post(cluster, prompt="hi")
        samplers = [request.sampler for request in engine.arrived]
        assert [one.repetition_penalty for one in samplers] == [1.0, 1.05]
        assert [one.top_k for one in samplers] == [9, 9]
        refused = await post(cluster, prompt_embeds=embeds(3), repetition_penalty=1.05)
        assert refused.status_code == 400

    play(tmp_path, scene)


def test_a_migrated_request_keeps_its_embeddings(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        payload = body([], 20, prompt_embeds=embeds(2))
        del payload["prompt"]
        stream = Stream(cluster, payload)
        await stream.has(3)
        second = await cluster.join(1)
        await cluster.kill(first)
        await stream.done
        assert stream.ids == truth([0, 0], 20)
        (moved,) = second.arrived
        assert moved.prompt_embeds == first.arrived[0].prompt_embeds is not None
        assert len(moved.output_token_ids) == 3

    play(tmp_path, scene)


HOSTILE: dict[str, Any] = {
    "no base64": "@@@@",
    "a lone surrogate": "\ud800",
    "nothing": "",
    "a few bytes": sent(b"abc"),
    "no header": sent(bytes(8)),
    "a header that is longer than the file": sent((2**62).to_bytes(8, "little") + b"{}"),
    "a long header": sent((5000).to_bytes(8, "little") + b" " * 5000),
    "a header that is no JSON": sent((4).to_bytes(8, "little") + b"\xff{}}"),
    "a deep header": sent((4000).to_bytes(8, "little") + b"[" * 4000),
    "a list": sent((2).to_bytes(8, "little") + b"[]"),
    "no tensor": sent((2).to_bytes(8, "little") + b"{}"),
    "two tensors": sent(with_header({name: tensor(bytes(4), [1, 1]) for name in "ab"}, bytes(4))),
    "one dimension": sent(file([1.0] * WIDTH, [WIDTH])),
    "three dimensions": sent(file([1.0] * WIDTH, [1, 1, WIDTH])),
    "no tokens": sent(file([], [0, WIDTH])),
    "a negative size": sent(file([1.0] * WIDTH, [-1, -WIDTH])),
    "a huge size": sent(file([1.0] * WIDTH, [2**40, WIDTH])),
    "a size that overflows": sent(file([1.0] * WIDTH, [2**70, WIDTH])),
    "too few numbers": sent(file([1.0] * 3, [1, WIDTH])),
    "too many numbers": sent(file([1.0] * 5, [1, WIDTH])),
    "offsets elsewhere": sent(file([1.0] * WIDTH, [1, WIDTH], data_offsets=[4, 20])),
    "negative offsets": sent(file([1.0] * WIDTH, [1, WIDTH], data_offsets=[-16, 0])),
    "doubles": sent(file([1.0] * WIDTH, [1, WIDTH], dtype="F64")),
    "an unknown key": sent(file([1.0] * WIDTH, [1, WIDTH], more=1)),
    "another width": sent(file([1.0] * 6, [1, 6])),
    "NaN": sent(file([float("nan")] * WIDTH, [1, WIDTH])),
    "NaN in F16": sent(halves(bytes(2) + b"\0\x7e" + bytes(4), "F16")),
    "infinity in BF16": sent(halves(b"\x80\x7f" + bytes(6), "BF16")),
    "more tokens than fit": embeds(2001),
    "no prompts": [],
    "too many prompts": [embeds(1)] * 1025,
    "a pickle": sent(b"\x80\x04\x95cos\nsystem\n."),
}


def test_hostile_embeddings_are_refused_by_name(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0)
        for name, value in HOSTILE.items():
            content = json.dumps({"model": "fake", "prompt_embeds": value})
            answer = await cluster.client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400, (name, answer.text)
            error = answer.json()["error"]
            assert error["param"] == "prompt_embeds", (name, error)
            assert len(answer.content) < 1000, name
        assert not engine.arrived

    play(tmp_path, scene)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "hi"}, "prompt_embeds"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
    ],
)
def test_parameters_that_need_prompt_tokens_are_refused(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        answer = await post(cluster, **{"prompt_embeds": embeds(2), **fields})
        assert answer.status_code == 400, answer.text
        assert param in answer.json()["error"]["message"]

    play(tmp_path, scene)


def test_a_request_cannot_name_the_blocks_of_another_one(tmp_path: Path) -> None:
    """A request cannot name the salt of another one, and cannot ask for more answers than the
    embeddings bound allows."""

    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0)
        await post(cluster, prompt_embeds=embeds(3))
        salt = engine.arrived[0].cache_salt
        assert salt is not None and salt.startswith(DERIVED_SALT)
        for fields in ({"prompt": [0, 0, 0]}, {"prompt_embeds": embeds(3)}):
            answer = await post(cluster, **fields, cache_salt=salt)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"
        many = await post(cluster, prompt_embeds=embeds(1500), n=2)
        assert many.status_code == 200
        many = await post(cluster, prompt_embeds=embeds(1500), n=3)
        assert many.status_code == 400 and "fewer answers" in many.json()["error"]["message"]
        assert len(engine.arrived) == 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "swell.cluster.text.prompt.prompt_embeds.MAX_CHILDREN_BYTES", 1500 * 4 * WIDTH * 2
        )
        play(tmp_path, scene)


def test_a_server_without_prompt_embeds_refuses_them_with_the_reason(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        answer = await post(cluster, prompt_embeds=embeds(2))
        assert answer.status_code == 400
        assert "set model.prompt_embeds=true" in answer.json()["error"]["message"]
        answer = await post(cluster)
        assert answer.json()["error"]["code"] == "missing_field"
        await until(lambda: not cluster.ingress.llm._processor.request_states)

    play(tmp_path, scene, **{"model.prompt_embeds": False})
