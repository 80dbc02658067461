"""Fields of other servers have the same effect as on those servers: over HTTP, to a scripted
engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.completions.convert import to_generation_request
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.sampling_params import sampler_params
from swell.cluster.text.schema.decode import decode
from tests.cluster.fake_cluster import FakeCluster, FakeEngine
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

TOKENIZER = tokenizers_for_tests.chat_tokenizer()
USER = {"role": "user", "content": "the quick"}
CHAT_BODY = {"messages": [USER], "max_tokens": 3, "seed": 3}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(
    folder: Path, work: Callable[[FakeCluster, FakeEngine], Awaitable[Any]], **settings: Any
) -> Any:
    TOKENIZER.save_pretrained(folder)

    async def serve() -> Any:
        async with FakeCluster(folder, **settings).serving() as cluster:
            return await work(cluster, await cluster.join(0))

    return asyncio.run(serve())


# -------------------------------------------------------------------------- forms of an answer

FORMS = [
    ("guided_json", {"type": "object"}, "json"),
    ("guided_json", '{"type": "object"}', "json"),
    ("guided_json_object", True, "json_object"),
    ("guided_regex", "a+", "regex"),
    ("guided_choice", ["a", "b"], "choice"),
    ("guided_grammar", 'root ::= "a"', "grammar"),
    ("json_schema", '{"type": "object"}', "json"),
    ("regex", "a+", "regex"),
    ("ebnf", 'root ::= "a"', "grammar"),
]


@pytest.mark.parametrize(("name", "value", "own"), FORMS)
def test_other_names_of_a_response_format_are_accepted(name: str, value: Any, own: str) -> None:
    request = CompletionRequest(prompt="x", **{name: value})
    request.check()
    form = request.form()
    assert form is not None
    assert getattr(form, own) == value
    sent = to_generation_request(request, {})
    assert sent.structured_outputs_field == name


@pytest.mark.parametrize(("name", "value", "own"), FORMS)
def test_two_response_formats_are_refused_by_name(name: str, value: Any, own: str) -> None:
    other = {"guided_choice": ["x"]} if own != "choice" else {"regex": "x"}
    with pytest.raises(BadRequest, match="both set the format of the answer") as caught:
        CompletionRequest(prompt="x", **{name: value}, **other).check()
    assert name in caught.value.message and next(iter(other)) in caught.value.message


# -------------------------------------------------------------------------- variables


ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning": {"effort": "low"}}, {**ON, "reasoning_effort": "low"}),
        ({"reasoning_effort": "high"}, {**ON, "reasoning_effort": "high"}),
        ({"reasoning_effort": "none"}, {**OFF, "reasoning_effort": "none"}),
        (
            {"reasoning_effort": "high", "enable_thinking": False},
            {**OFF, "reasoning_effort": "high"},
        ),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}},
            {"thinking": False, "reasoning_effort": "high"},
        ),
        (
            {"chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
        ({"reasoning": None}, {}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": True, "x": 1}},
            {"enable_thinking": True, "thinking": True, "x": 1},
        ),
    ],
)
def test_thinking_fields_become_template_variables(fields: dict[str, Any], variables: Any) -> None:
    assert chat(**fields).template_variables() == variables


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"enable_thinking and chat_template_kwargs"):
        chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(BadRequest, match="contradict") as caught:
        chat(reasoning_effort="low", reasoning={"effort": "high"})
    assert caught.value.param == "reasoning.effort"


def chat(**fields: Any) -> ChatCompletionRequest:
    return decode(json.dumps({"messages": [USER], **fields}).encode(), ChatCompletionRequest)


# -------------------------------------------------------------------------- sampling


def test_top_p_zero_is_greedy() -> None:
    params = CompletionRequest(prompt="x", top_p=0, top_k=40).sampling_params()
    sampler = sampler_params(params)
    assert (sampler.top_k, sampler.top_p) == (1, 1.0)


def test_an_empty_stop_means_no_stop() -> None:
    assert CompletionRequest(prompt="x", stop="").sampling_params().stop_strings == []


# -------------------------------------------------------------------------- prompts


def test_a_longer_prompt_is_cut(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 8
    whole = ids(text)

    async def work(cluster: FakeCluster, engine: FakeEngine) -> None:
        async def prompt(path: str = COMPLETIONS, **fields: Any) -> list[int]:
            payload = {"prompt": text, "max_tokens": 2} if path == COMPLETIONS else CHAT_BODY
            reply = await cluster.client.post(path, json={**payload, **fields})
            assert reply.status_code == 200, reply.text
            usage = reply.json()["usage"]["prompt_tokens"]
            assert usage == len(engine.arrived[-1].prompt_token_ids)
            return engine.arrived[-1].prompt_token_ids

        assert await prompt() == whole
        assert await prompt(truncate_prompt_tokens=5) == whole[-5:]
        assert await prompt(truncate_prompt_tokens=5, truncation_side="left") == whole[-5:]
        assert await prompt(truncate_prompt_tokens=5, truncation_side="right") == whole[:5]
        assert await prompt(truncate_prompt_tokens=1000) == whole
        assert await prompt(prompt=[7] * 40, truncate_prompt_tokens=3) == [7] * 3
        # The fake engine's context window has 2000 tokens.
        long = text * 40
        assert len(ids(long)) > 4000
        window = await prompt(prompt=long, truncate_prompt_tokens=-1, max_tokens=10)
        assert window == ids(long)[-1990:]
        chat_ids = await prompt(CHAT)
        assert await prompt(CHAT, truncate_prompt_tokens=4) == chat_ids[-4:]
        for bad in (0, -2, 2000):
            payload = {"prompt": text, "truncate_prompt_tokens": bad}
            reply = await cluster.client.post(COMPLETIONS, json=payload)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "truncate_prompt_tokens"
        huge = {"prompt": "a " * 1024 * 1024, "truncate_prompt_tokens": 4}
        reply = await cluster.client.post(COMPLETIONS, json=huge)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")

    run(tmp_path, work)


def test_special_tokens_are_added_on_request(tmp_path: Path) -> None:
    bos = TOKENIZER.convert_tokens_to_ids("<s>")
    made = tokenizers_for_tests.chat_tokenizer()
    backend = made.backend_tokenizer
    before = backend.post_processor
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    try:
        made.save_pretrained(tmp_path)
    finally:
        if before is None:
            backend.post_processor = processors.Sequence([])
        else:
            backend.post_processor = before

    async def serve() -> list[tuple[bool, str, Any]]:
        results = []
        async with FakeCluster(tmp_path).serving() as cluster:
            engine = await cluster.join(0)
            for path, payload in (
                (COMPLETIONS, {"prompt": "the", "max_tokens": 2}),
                (CHAT, CHAT_BODY),
            ):
                for add in (None, True, False):
                    body = {**payload, "add_special_tokens": add}
                    reply = await cluster.client.post(path, json=body)
                    assert reply.status_code == 200, reply.text
                    results.append((engine.arrived[-1].prompt_token_ids[0] == bos, path, add))
            for payload in ({"prompt": "the"}, {"messages": [USER]}):
                for add in (None, True, False):
                    reply = await cluster.client.post(
                        "/tokenize", json={**payload, "add_special_tokens": add}
                    )
                    results.append((reply.json()["tokens"][0] == bos, str(*payload), add))
        return results

    assert asyncio.run(serve()) == [
        (True, COMPLETIONS, None),
        (True, COMPLETIONS, True),
        (False, COMPLETIONS, False),
        (False, CHAT, None),
        (True, CHAT, True),
        (False, CHAT, False),
        (True, "prompt", None),
        (True, "prompt", True),
        (False, "prompt", False),
        (False, "messages", None),
        (True, "messages", True),
        (False, "messages", False),
    ]


DOCUMENTS = (
    "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}"
    + tokenizers_for_tests.CHAT_TEMPLATE
)


def test_documents_are_written_by_the_template_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(DOCUMENTS)
    payload = {**CHAT_BODY, "documents": [{"title": "T", "text": "brown fox"}]}

    async def work(cluster: FakeCluster, engine: FakeEngine) -> Any:
        reply = await cluster.client.post(CHAT, json=payload)
        return reply, [TOKENIZER.decode(request.prompt_token_ids) for request in engine.arrived]

    reply, prompts = run(tmp_path, work, **{"serve.chat_template": str(file)})
    assert reply.status_code == 200, reply.text
    assert prompts[0].startswith("[T: brown fox]")
    reply, prompts = run(tmp_path, work)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "documents")
    assert prompts == []


# -------------------------------------------------------------------------- answers


def test_an_answer_of_chat_may_begin_with_the_last_message(tmp_path: Path) -> None:
    begun = {"messages": [USER, {"role": "assistant", "content": "brown fox"}]}
    going = {**begun, "continue_final_message": True, "max_tokens": 3, "seed": 3}

    async def work(cluster: FakeCluster, _: FakeEngine) -> None:
        async def text(**fields: Any) -> str:
            reply = await cluster.client.post(CHAT, json={**going, **fields})
            assert reply.status_code == 200, reply.text
            return str(reply.json()["choices"][0]["message"]["content"])

        plain = await text()
        assert await text(echo=True) == "brown fox" + plain
        streamed = ""
        payload = {**going, "echo": True, "stream": True}
        async with cluster.client.stream("POST", CHAT, json=payload) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        streamed += choice["delta"].get("content") or ""
        assert streamed == "brown fox" + plain
        user_last = {**CHAT_BODY, "echo": True}
        reply = await cluster.client.post(CHAT, json=user_last)
        assert not reply.json()["choices"][0]["message"]["content"].startswith("the quick")

    run(tmp_path, work)


# -------------------------------------------------------------------------- ignored fields


def test_ignored_fields_are_counted_and_named_in_the_answer(tmp_path: Path) -> None:
    message = {**USER, "parsed": {}, "mine": 1, "yours": 2}

    async def work(cluster: FakeCluster, _: FakeEngine) -> None:
        reply = await cluster.client.post(CHAT, json={**CHAT_BODY, "messages": [message]})
        assert reply.status_code == 200, reply.text
        assert "x-swell-warning" not in reply.headers
        name = "swell_ignored_fields_total"
        assert await cluster.metric(name + '{field="parsed"}') == 1
        assert await cluster.metric(name + '{field="other"}') == 2
        refused = await cluster.client.post(CHAT, json={**CHAT_BODY, "mine": 1})
        assert refused.json()["error"]["param"] == "mine"

    run(tmp_path, work)


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_unknown_fields_are_named_in_a_header(tmp_path: Path, stream: bool) -> None:
    strange = {"naïve\r\nname": 1, "mine": {"a": 1}, **{f"n{n}": n for n in range(20)}}
    payload = {**CHAT_BODY, **strange, "stream": stream}

    async def work(cluster: FakeCluster, _: FakeEngine) -> None:
        reply = await cluster.client.post(CHAT, json=payload)
        assert reply.status_code == 200, reply.text
        warning = reply.headers["x-swell-warning"]
        assert warning.startswith("unknown fields were ignored: na\\xefve\\r\\nname, mine, n0, n1,")
        assert warning.endswith(" and 6 more")
        plain = await cluster.client.post(CHAT, json=CHAT_BODY)
        assert "x-swell-warning" not in plain.headers
        misspelt = await cluster.client.post(
            "/admin/scale", json={"engines": 1, "drain_timeout": 5}
        )
        assert misspelt.json()["error"]["param"] == "drain_timeout"
        document = (await cluster.client.get("/openapi.json")).json()
        schema = document["components"]["schemas"]["ChatCompletionRequest"]
        assert schema["additionalProperties"] is True

    run(tmp_path, work, **{"serve.unknown_fields": "ignore"})


def test_a_request_without_a_model_is_answered_by_the_one_that_is_served(tmp_path: Path) -> None:
    payloads = {
        CHAT: CHAT_BODY,
        COMPLETIONS: {"prompt": "the", "max_tokens": 2},
        "/v1/responses": {"input": "the", "max_output_tokens": 2},
        "/v1/messages": {"messages": [USER], "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": [USER]},
        "/tokenize": {"prompt": "the"},
        "/detokenize": {"tokens": [1, 2]},
    }

    async def work(cluster: FakeCluster, _: FakeEngine) -> None:
        for path, payload in payloads.items():
            reply = await cluster.client.post(path, json=payload)
            assert reply.status_code == 200, (path, reply.text)
            assert reply.json().get("model", "fake") == "fake"

    run(tmp_path, work)


def test_a_refusal_of_a_value_names_the_field_that_was_sent(tmp_path: Path) -> None:
    """The field keeps the client's name even if its value is checked long after the body was
    read."""

    async def work(cluster: FakeCluster, _: FakeEngine) -> None:
        for name, value in (("n_predict", -1), ("repeat_penalty", -1.0), ("routed_dp_rank", 7)):
            reply = await cluster.client.post(COMPLETIONS, json={"prompt": "the", name: value})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, name), reply.text
            assert error["message"].startswith(f"{name}={value}")

    run(tmp_path, work)
