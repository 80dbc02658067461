"""Defects that the conformance tools have found."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from schemathesis.core.failures import FailureGroup

from tests.conformance.document import check_answer
from tests.conformance.in_process_server import MODEL, InProcessServer
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

TALK = [{"role": "user", "content": "upper: abc"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/completions", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("/v1/messages", "POST"),
    ],
)
def test_a_wrong_method_gets_the_allowed_ones(
    in_process_server: InProcessServer, path: str, allowed: str
) -> None:
    """Schemathesis: a 405 has an Allow header (RFC 9110, 15.5.6)."""
    response = in_process_server.client.request("PATCH", path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    assert response.headers["x-request-id"]
    assert "allow" not in in_process_server.client.get("/v1/nothing").headers


def test_a_call_in_the_form_of_litellm_is_accepted_as_history(
    in_process_server: InProcessServer,
) -> None:
    """A call is accepted as LiteLLM returns it: LiteLLM adds `provider_specific_fields` to an
    answer, and sends all of it back."""
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    reply = {"role": "tool", "tool_call_id": "c1", "content": "x"}
    ids = []
    for more in ({}, {"provider_specific_fields": {"refusal": None}, "function_call": None}):
        body = {"model": MODEL, "messages": [*TALK, {**answer, **more}, reply]}
        response = in_process_server.client.post("/tokenize", json=body)
        assert response.status_code == 200, response.text
        ids.append(response.json()["tokens"])
    assert ids[0] == ids[1]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_is_sent_while_an_answer_grows(
    in_process_server: InProcessServer, path: str, n: int
) -> None:
    """Usage is sent while an answer grows: GuideLLM sets `continuous_usage_stats`, an option of
    vLLM's servers."""
    prompt: dict[str, Any] = {"prompt": "hi"} if path == "/v1/completions" else {"messages": TALK}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "max_tokens": 5, "ignore_eos": True, "n": n, **prompt}
    body |= {"return_token_ids": True, "stream": True, "stream_options": options}
    response = in_process_server.client.post(path, json=body)
    check_answer(path, response)
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    counts = [0] * n
    for chunk in chunks:
        (choice,) = chunk["choices"]
        counts[choice["index"]] += len(choice.get("token_ids", ()))
        if chunk["usage"] is not None:
            assert chunk["usage"]["completion_tokens"] == counts[choice["index"]]
            assert chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
        else:
            assert not choice.get("token_ids")
    assert counts == [5] * n
    assert last["usage"]["completion_tokens"] == sum(counts)


def test_continuous_usage_needs_usage(in_process_server: InProcessServer) -> None:
    body = {"model": MODEL, "prompt": "hi", "stream": True}
    body["stream_options"] = {"continuous_usage_stats": True}
    response = in_process_server.client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize(
    ("status", "kind", "content"),
    [
        (418, "application/json", b'{"error": {"message": "no"}}'),
        (200, "text/html", b"<p>"),
        (200, "application/json", b'{"id": 1}'),
        (400, "application/json", b'{"detail": "no"}'),
        (200, "text/event-stream", b'data: {"id": 1}\n\n'),
        (200, "text/event-stream", b"data: [OVER]\n\n"),
    ],
)
def test_answers_that_contradict_the_document_are_detected(
    status: int, kind: str, content: bytes
) -> None:
    headers = {"content-type": kind, "x-swell-engine": "0"}

    def answer_all(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=headers, content=iter([content]))

    with httpx.Client(transport=httpx.MockTransport(answer_all), timeout=HANG_S) as client:
        answer = client.post("http://h/v1/completions")
    with pytest.raises(FailureGroup):
        check_answer("/v1/completions", answer)
