"""Fields of requests, tested with third-party clients, the whole serving path and a real model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers

from tests.e2e.cluster import NANO, Cluster
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

MODEL = "nano"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def api(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=cluster.url + "/v1", api_key="none", timeout=HANG_S, max_retries=0
    )


@pytest.fixture(scope="module")
def logprobs_of() -> Callable[[list[int]], torch.Tensor]:
    """ids -> [len(ids), V] log probabilities of the token after each, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()

    @torch.no_grad()
    def compute(ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)

    return compute


def chat(prompt: str = "count from 3 to 9", **extra: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": prompt}], **extra}


def test_logprobs_of_a_chat_equal_those_of_transformers(
    api: openai.OpenAI, logprobs_of: Callable[[list[int]], torch.Tensor]
) -> None:
    answer = api.chat.completions.create(
        **chat(temperature=0.9, seed=4, max_tokens=20, logprobs=True, top_logprobs=3),
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    prompt, ids = answer.prompt_token_ids, choice.token_ids
    logprobs = choice.logprobs.content
    assert len(logprobs) == len(ids)
    wanted = logprobs_of(prompt + ids)[len(prompt) - 1 :]
    for one, token, row in zip(logprobs, ids, wanted, strict=False):
        assert one.logprob == pytest.approx(row[token].item(), abs=1e-4)
        tops = [top.logprob for top in one.top_logprobs]
        assert tops == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    joined = b"".join(bytes(one.bytes) for one in logprobs)
    assert joined.startswith(choice.message.content.encode())


def test_an_echo_scores_the_prompt(
    api: openai.OpenAI, logprobs_of: Callable[[list[int]], torch.Tensor]
) -> None:
    """Scores a prompt with the fields that evaluation harnesses use."""
    text = "the quick brown fox"
    answer = api.completions.create(
        model=MODEL, prompt=text, max_tokens=1, temperature=0, echo=True, logprobs=1,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.text.startswith(text)
    ids = choice.prompt_token_ids
    wanted = logprobs_of(ids)
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None
    assert "".join(logprobs.tokens[: len(ids)]) == text
    for place in range(1, len(ids)):
        expected = wanted[place - 1, ids[place]].item()
        assert logprobs.token_logprobs[place] == pytest.approx(expected, abs=1e-4)
        assert max(logprobs.top_logprobs[place].values()) == pytest.approx(
            wanted[place - 1].max().item(), abs=1e-4
        )
    assert [text[o] for o in logprobs.text_offset[: len(ids)]] == list(text)
    alone = api.completions.create(
        model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    assert alone.choices[0].text == text
    assert alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        logprobs.token_logprobs[1 : len(ids)], abs=1e-5
    )


def test_n_answers_follow_their_seeds(api: openai.OpenAI) -> None:
    fields = {"temperature": 1.0, "max_tokens": 16}
    many = api.chat.completions.create(**chat(**fields, n=4, seed=100))
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    ones = [api.chat.completions.create(**chat(**fields, seed=100 + i)) for i in range(4)]
    assert [c.message.content for c in many.choices] == [
        one.choices[0].message.content for one in ones
    ]
    assert many.usage.prompt_tokens == ones[0].usage.prompt_tokens
    assert many.usage.completion_tokens == sum(one.usage.completion_tokens for one in ones)
    texts = ["", "", "", ""]
    for chunk in api.chat.completions.create(**chat(**fields, n=4, seed=100, stream=True)):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in many.choices]


def test_best_of_keeps_the_most_likely_answer(api: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": "abc", "temperature": 1.0, "max_tokens": 6, "seed": 7}
    sampled = api.completions.create(**fields, n=5, logprobs=0).choices
    means = [math.fsum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in sampled]
    ranked = [sampled[i].text for i in sorted(range(5), key=lambda i: -means[i])]
    best = api.completions.create(**fields, n=2, best_of=5)
    assert [choice.text for choice in best.choices] == ranked[:2]
    assert best.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in sampled)


@pytest.mark.parametrize("seed", range(8))
def test_a_schema_is_enforced_at_high_temperature(api: openai.OpenAI, seed: int) -> None:
    answer = api.chat.completions.create(
        **chat("say something", temperature=1.5, seed=seed, max_tokens=400),
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
        },
    )
    person = json.loads(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert person.keys() == {"name", "age", "tags"}
    assert 0 <= person["age"] <= 130
    assert len(person["name"]) <= 12


def test_a_required_call_is_made_and_its_answer_can_be_sent_back(api: openai.OpenAI) -> None:
    body = chat("weather?", temperature=1.2, seed=3, max_tokens=300, tools=[TOOL])
    answer = api.chat.completions.create(**body, tool_choice="required", parallel_tool_calls=False)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert 1 <= json.loads(call.function.arguments)["days"] <= 9
    arguments, name = "", ""
    stream = api.chat.completions.create(
        **body, tool_choice="required", parallel_tool_calls=False, stream=True
    )
    for chunk in stream:
        for delta in chunk.choices[0].delta.tool_calls or []:
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    assert (name, arguments) == (call.function.name, call.function.arguments)
    body["messages"] += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sun"},
    ]
    after = api.chat.completions.create(**{**body, "max_tokens": 5}, tool_choice="none")
    assert after.choices[0].message.tool_calls is None


def test_token_parameters_are_obeyed(api: openai.OpenAI) -> None:
    """Relies on the ids of nano being bytes, so the text shows which ids were sampled."""
    allowed = api.completions.create(
        model=MODEL, prompt="x", temperature=1.0, max_tokens=12,
        extra_body={"allowed_token_ids": [97, 98]},
    )  # fmt: skip
    assert set(allowed.choices[0].text) <= {"a", "b"}
    pushed = {"model": MODEL, "prompt": "x", "temperature": 0, "max_tokens": 8}
    pushed["logit_bias"] = {"65": 100, "66": 96}
    assert api.completions.create(**pushed).choices[0].text == "AAAAAAAA"
    varied = api.completions.create(**pushed, frequency_penalty=2).choices[0].text
    assert set(varied) == {"A", "B"}
    plain = api.completions.create(model=MODEL, prompt="count from 3 to 9", temperature=0)
    banned = api.completions.create(
        model=MODEL, prompt="count from 3 to 9", temperature=0,
        extra_body={"bad_words": [plain.choices[0].text[:2]]},
    )  # fmt: skip
    assert plain.choices[0].text[:2] not in banned.choices[0].text


def test_a_request_id_is_returned_unchanged(cluster: Cluster) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    answer = httpx.post(
        cluster.url + "/v1/completions",
        json=body,
        headers={"x-request-id": "mine-1"},
        timeout=HANG_S,
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    assert len(cluster.get("/v1/models").headers["x-request-id"]) == 32
    refused = httpx.post(
        cluster.url + "/v1/completions", json=body, headers={"x-request-id": "a b"}, timeout=HANG_S
    )
    assert refused.status_code == 400
    assert "x-request-id" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 3, "best_of": 2}, ["best_of=2", "n=3"]),
        ({"logprobs": 21}, ["logprobs=21", "20"]),
        ({"logit_bias": {"99999": 1}}, ["99999", "0 .. 319"]),
        ({"stop": [""]}, ["stop[0]", "non-empty string"]),
        ({"stop": ["x" * 2000]}, ["stop[0]", "1024"]),
        (
            {"structured_outputs": {"json": {"$ref": "https://example.com/s.json"}}},
            ["structured_outputs.json", "example.com"],
        ),
        ({"structured_outputs": {"regex": "("}}, ["structured_outputs.regex"]),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, ["regex and choice"]),
    ],
)
def test_contradictions_name_both_sides(
    cluster: Cluster, fields: dict[str, Any], words: list[str]
) -> None:
    body = {"model": MODEL, "prompt": "x", **fields}
    answer = cluster.post("/v1/completions", body)
    assert answer.status_code == 400
    for word in words:
        assert word in answer.json()["error"]["message"]
