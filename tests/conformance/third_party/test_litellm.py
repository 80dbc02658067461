"""LiteLLM as its users call it, over three of our APIs."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "upper: abc"}]
SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


class Person(BaseModel):
    name: str
    age: int


def options(url: str, provider: str = "openai", **more: Any) -> dict[str, Any]:
    base = url if provider == "anthropic" else f"{url}/v1"
    plain = {"api_base": base, "api_key": "k", "temperature": 0, "max_tokens": 100}
    return {"model": f"{provider}/nano", **plain, **more}


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_an_answer_whole_and_streamed(url: str, provider: str) -> None:
    answer = litellm.completion(messages=MESSAGES, **options(url, provider))
    assert answer.choices[0].message.content == "ABC"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **options(url, provider)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ABC"


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_call_is_made_and_answered(url: str, provider: str) -> None:
    """A call is made and answered; the message goes back as LiteLLM built it, with its additional
    fields."""
    turns: list[Any] = [{"role": "user", "content": "look at 3"}]
    forced = options(url, provider, tools=[LOOK], tool_choice="required")
    response = litellm.completion(messages=turns, **forced).choices[0]
    (call,) = response.message.tool_calls
    assert response.finish_reason == "tool_calls"
    assert call.function.name == "look"
    assert type(json.loads(call.function.arguments)["at"]) is int
    turns += [
        response.message,
        {"role": "tool", "tool_call_id": call.id, "content": "a tree"},
    ]
    reply = litellm.completion(messages=turns, **options(url, provider, tools=[LOOK])).choices[0]
    assert reply.message.content or reply.message.tool_calls


def test_a_streamed_call_is_the_whole_one(url: str) -> None:
    turns = [{"role": "user", "content": "look at 3"}]
    forced = options(url, tools=[LOOK], tool_choice="required")
    whole = litellm.completion(messages=turns, **forced).choices[0].message.tool_calls
    chunks = list(litellm.completion(messages=turns, stream=True, **forced))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [call.function for call in streamed] == [call.function for call in whole]


def test_a_form(url: str) -> None:
    answer = litellm.completion(messages=MESSAGES, **options(url, response_format=Person))
    Person.model_validate_json(answer.choices[0].message.content)


def test_text_and_responses(url: str) -> None:
    text = litellm.text_completion(prompt="hi", **options(url, "text-completion-openai"))
    assert text.choices[0].text
    response = options(url)
    response["max_output_tokens"] = response.pop("max_tokens")
    answer = litellm.responses(input="upper: abc", **response)
    assert answer.output[-1].content[0].text == "ABC"


def test_a_refusal_keeps_its_message(url: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature=-1"):
        litellm.completion(messages=MESSAGES, **options(url, temperature=-1))
