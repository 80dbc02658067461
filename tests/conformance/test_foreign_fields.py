"""Fields of other servers, on a real engine: they have their effect, and the answers match the
document."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conformance.document import check_answer
from tests.conformance.in_process_server import InProcessServer

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "upper: abc"}]},
    COMPLETIONS: {"prompt": "upper: abc"},
}


def send(in_process_server: InProcessServer, path: str, **fields: Any) -> dict[str, Any]:
    response = in_process_server.client.post(
        path, json={**BODIES[path], "max_tokens": 6, "seed": 7, **fields}
    )
    assert response.status_code == 200, response.text
    check_answer(path, response)
    answer: dict[str, Any] = response.json()
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]


def test_the_best_of_several_answers_is_kept_in_chat_too(
    in_process_server: InProcessServer,
) -> None:
    options = {"temperature": 1.5, "ignore_eos": True, "logprobs": True}
    sampled = send(in_process_server, CHAT, n=4, **options)
    likely = [
        sum(token["logprob"] for token in choice["logprobs"]["content"])
        for choice in sampled["choices"]
    ]
    ranked = sorted(range(4), key=lambda one: -likely[one])
    best = send(in_process_server, CHAT, n=2, best_of=4, **options)
    assert texts(best) == [texts(sampled)[one] for one in ranked[:2]]
    assert best["usage"]["completion_tokens"] == 24
    refused = in_process_server.client.post(
        CHAT, json={**BODIES[CHAT], "best_of": 2, "stream": True}
    )
    assert refused.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "form",
    [
        {"guided_regex": "[0-9]{3}"},
        {"regex": "[0-9]{3}"},
        {"guided_choice": ["123", "456"]},
        {"guided_grammar": "root ::= [0-9] [0-9] [0-9]"},
        {"ebnf": "root ::= [0-9] [0-9] [0-9]"},
        {"guided_json": {"type": "integer", "minimum": 100, "maximum": 999}},
        {"json_schema": '{"type": "integer", "minimum": 100, "maximum": 999}'},
    ],
)
def test_another_name_of_a_form_is_held(
    in_process_server: InProcessServer, path: str, form: dict[str, Any]
) -> None:
    (text,) = texts(send(in_process_server, path, temperature=1.0, **form))
    assert re.fullmatch("[0-9]{3}", text)


def test_a_form_that_is_wrong_is_refused_under_its_own_name(
    in_process_server: InProcessServer,
) -> None:
    response = in_process_server.client.post(
        COMPLETIONS, json={**BODIES[COMPLETIONS], "guided_regex": "("}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


def test_tokens_are_named_by_their_ids(in_process_server: InProcessServer) -> None:
    options = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    completion = send(in_process_server, COMPLETIONS, logprobs=2, **options)["choices"][0]
    named = [f"token_id:{token}" for token in completion["token_ids"]]
    assert completion["logprobs"]["tokens"] == named
    assert all(
        name in top and all(one.startswith("token_id:") for one in top)
        for name, top in zip(named, completion["logprobs"]["top_logprobs"], strict=True)
    )
    chat = send(in_process_server, CHAT, logprobs=True, top_logprobs=2, **options)["choices"][0]
    content = chat["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{t}" for t in chat["token_ids"]]
    assert all(
        top["token"].startswith("token_id:") for one in content for top in one["top_logprobs"]
    )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_whole_vocabulary_of_a_prompt_is_returned_within_a_bound(
    in_process_server: InProcessServer, path: str
) -> None:
    answer = send(in_process_server, path, prompt_logprobs=-1)
    response = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
    sizes = {len(position) for position in response[1:]}
    assert len(sizes) == 1 and sizes.pop() > 200
    long = {"prompt": "a" * 200} if path == COMPLETIONS else {}
    options = {**BODIES[path], **long, "n": 128, "prompt_logprobs": -1}
    refused = in_process_server.client.post(path, json=options)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_top_p_zero_means_greedy(in_process_server: InProcessServer, path: str) -> None:
    greedy = send(in_process_server, path, temperature=0)
    assert texts(send(in_process_server, path, temperature=2.0, top_p=0)) == texts(greedy)
