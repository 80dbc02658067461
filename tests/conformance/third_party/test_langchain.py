"""LangChain's OpenAI package, over chat completions and over responses."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.slow


class Person(BaseModel):
    name: str
    age: int


@tool
def look(at: int) -> str:
    """Look."""
    return "a tree"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(url: str, request: pytest.FixtureRequest) -> Any:
    return ChatOpenAI(
        model="nano",
        base_url=f"{url}/v1",
        api_key="k",
        temperature=0,
        max_tokens=100,
        max_retries=0,
        use_responses_api=request.param,
    )


def test_an_answer_whole_and_streamed(model: Any) -> None:
    answer = model.invoke("upper: abc")
    assert answer.text == "ABC"
    assert answer.usage_metadata["total_tokens"] > answer.usage_metadata["input_tokens"]
    assert "".join(chunk.text for chunk in model.stream("upper: abc")) == "ABC"
    assert [one.text for one in model.batch(["upper: ab", "reverse: abc"])] == ["AB", "cba"]


def test_a_call_is_made_and_answered(model: Any) -> None:
    forced = model.bind_tools([look], tool_choice="required", strict=True)
    turns: list[Any] = [HumanMessage("look at 3")]
    turns.append(forced.invoke(turns))
    (call,) = turns[-1].tool_calls
    assert call["name"] == "look" and type(call["args"]["at"]) is int
    turns.append(look.invoke(call))
    reply = model.bind_tools([look], strict=True).invoke(turns)
    assert reply.text or reply.tool_calls
    whole = None
    for chunk in forced.stream(turns[:1]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.tool_calls[0]["args"] == call["args"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, method: str) -> None:
    answer = model.with_structured_output(Person, method=method, strict=True).invoke("a person")
    assert isinstance(answer, Person)


def test_a_completion(url: str) -> None:
    plain = OpenAI(model="nano", base_url=f"{url}/v1", api_key="k", max_tokens=4, max_retries=0)
    assert plain.invoke("hi")
