"""`/tokenize` returns the tokens that the model reads, with transformers' own chat template as the
oracle. Token ids outside the vocabulary are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cluster.fake_cluster import FakeCluster
from tests.model_kinds import MODEL_KINDS, model_kind

pytestmark = pytest.mark.slow

CONVERSATION = [{"role": "user", "content": "How is the sky?"}]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "full": {"name": "look", "description": "Looks.", "parameters": SCHEMA},
    "no description": {"name": "look", "parameters": SCHEMA},
    "as openai's helper sends it": {"name": "look", "strict": True, "parameters": SCHEMA},
    "null": {"name": "look", "description": None, "parameters": SCHEMA},
    "another order": {"parameters": SCHEMA, "description": "Looks.", "name": "look"},
    "fields of others": {"name": "look", "parameters": SCHEMA, "returns": {"type": "string"}},
}
WITH_TOOLS = [name for name in MODEL_KINDS if model_kind(name).tools]


async def answered(cluster: FakeCluster, url: str, **fields: Any) -> dict[str, Any]:
    answer = await cluster.client.post(url, json={"model": "fake", **fields})
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def serving(name: str, **settings: Any) -> FakeCluster:
    one = model_kind(name)
    return FakeCluster(one.folder(), vocab_size=one.vocab_size, **settings)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_reach_the_template_as_they_were_sent(name: str) -> None:
    async def run() -> None:
        async with serving(name).serving() as cluster:
            engine = await cluster.join(0)
            for function in FUNCTIONS.values():
                tools = [{"type": "function", "function": function}]
                expected = model_kind(name).tokenizer.apply_chat_template(
                    CONVERSATION,
                    tools=tools,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                )
                fields = {"messages": CONVERSATION, "tools": tools}
                reply = await answered(cluster, "/tokenize", **fields)
                assert reply["tokens"] == expected
                assert reply["count"] == len(expected)
                if cluster.ingress.services.input_processor._processor.formats._tools is None:
                    continue  # there is no parser for this kind's calls yet
                engine.reply_with([5])
                await answered(cluster, "/v1/chat/completions", max_tokens=1, **fields)
                assert engine.arrived[-1].prompt_token_ids == expected

    asyncio.run(run())


def test_a_template_that_needs_a_description_receives_an_empty_one() -> None:
    """A tool may omit its description and parameters, which some templates cannot handle."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name + t.function.description }}"
        "{{ t.function.parameters.properties | length }}{% endfor %}"
    )

    async def run() -> None:
        one = serving("qwen3", **{"serve.request_chat_template": True})
        async with one.serving() as cluster:
            await cluster.join(0)
            tools = [{"type": "function", "function": {"name": "look"}}]
            reply = await answered(
                cluster, "/tokenize", messages=CONVERSATION, tools=tools, chat_template=template
            )
            assert model_kind("qwen3").tokenizer.decode(reply["tokens"]) == "look0"

    asyncio.run(run())


@pytest.mark.parametrize("name", ["llama2", "llama3", "gemma"])
def test_texts_and_ids_have_the_peers_form(name: str) -> None:
    async def run() -> None:
        tokenizer = model_kind(name).tokenizer
        async with serving(name).serving() as cluster:
            await cluster.join(0)
            for special in (True, False):
                ids = tokenizer.encode("The sky", add_special_tokens=special)
                fields = {"prompt": "The sky", "add_special_tokens": special}
                reply = await answered(cluster, "/tokenize", **fields)
                length = cluster.engines[0].member.max_model_len
                assert reply == {
                    "tokens": ids,
                    "count": len(ids),
                    "max_model_len": length,
                    "token_strs": None,
                }
                reply = await answered(cluster, "/tokenize", **fields, return_token_strs=True)
                assert reply["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
                text = await answered(cluster, "/detokenize", tokens=ids)
                assert text == {"prompt": tokenizer.decode(ids)}

    asyncio.run(run())


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
def test_ids_outside_the_vocabulary_are_refused_with_its_size(url: str) -> None:
    async def run() -> None:
        async with serving("llama3").serving() as cluster:
            engine = await cluster.join(0)
            engine.reply_with([5])
            size = model_kind("llama3").vocab_size
            payload: dict[str, Any] = (
                {"messages": CONVERSATION} if "chat" in url else {"prompt": "The sky"}
            )
            payload |= {"model": "fake", "max_tokens": 1}
            last = {"stop_token_ids": [size - 1], "logit_bias": {str(size - 1): 1.0}}
            taken = await cluster.client.post(url, json={**payload, **last})
            assert taken.status_code == 200, taken.text
            for bad in (size, size + 1, -1):
                for fields in ({"stop_token_ids": [bad]}, {"logit_bias": {str(bad): 1.0}}):
                    answer = await cluster.client.post(url, json={**payload, **fields})
                    error = answer.json()["error"]
                    assert answer.status_code == 400
                    assert str(bad) in error["message"] and str(size) in error["message"]
                    assert error["param"].startswith(next(iter(fields)))
            keys = {"bad1": 50.0, "7": 1.0, "bad2": 20.0}
            answer = await cluster.client.post(url, json={**payload, "logit_bias": keys})
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert "logit_bias" in message and "bad1" in message and "bad2" in message

    asyncio.run(run())
