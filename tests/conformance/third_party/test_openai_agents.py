"""OpenAI's agents SDK, over chat completions and over responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.result import RunResultBase
from animal import PROMPT, Animal

from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

set_tracing_disabled(True)
MODELS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]
OF_AGENTS = ("tools", "handoffs", "tool_use_behavior")
CALLED = ["ToolCallItem", "ToolCallOutputItem"]


@function_tool
def look(at: Literal["left", "right"]) -> str:
    """Look."""
    return "a tree"


async def run(agent: Agent[Any], prompt: Any, **more: Any) -> RunResultBase:
    return await Runner.run(agent, prompt, max_turns=3, **more)


async def run_streamed(agent: Agent[Any], prompt: Any, **more: Any) -> RunResultBase:
    result = Runner.run_streamed(agent, prompt, max_turns=3, **more)
    async for _ in result.stream_events():
        pass
    return result


@pytest.fixture(params=[run, run_streamed], ids=["whole", "streamed"])
def answer(loop: asyncio.Runner, request: pytest.FixtureRequest) -> Callable[..., RunResultBase]:
    return lambda agent, prompt, **more: loop.run(request.param(agent, prompt, **more))


@pytest.fixture(params=MODELS, ids=["chat", "responses"])
def model(url: str, request: pytest.FixtureRequest) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", timeout=HANG_S, max_retries=0)
    return request.param(model="nano", openai_client=client)


def agent(model: Any, name: str = "one", output_type: Any = None, **more: Any) -> Agent[Any]:
    known = {
        key: more.pop(key) for key in ("tools", "handoffs", "tool_use_behavior") if key in more
    }
    settings = ModelSettings(temperature=0, max_tokens=100, include_usage=True, **more)
    return Agent(name=name, model=model, model_settings=settings, output_type=output_type, **known)


def items(result: RunResultBase) -> list[str]:
    return [type(item).__name__ for item in result.new_items]


def test_a_text(model: Any, answer: Any) -> None:
    result = answer(agent(model), "upper: abc")
    assert result.final_output == "ABC" and items(result) == ["MessageOutputItem"]
    usage = result.context_wrapper.usage
    assert usage.requests == 1 and usage.input_tokens > 0 and usage.output_tokens > 0


def test_instructions(model: Any, answer: Any) -> None:
    built = agent(model)
    built.instructions = "Answer."
    assert isinstance(answer(built, "upper: abc").final_output, str)


def test_an_output_type(model: Any, answer: Any) -> None:
    assert isinstance(answer(agent(model, output_type=Animal), PROMPT).final_output, Animal)


def test_a_tool_is_called_and_answered(model: Any, answer: Any, prefer: Any) -> None:
    """A tool is called and answered. The call is forced in the first turn. Then nano may call
    again: biases make it say AAA, and stop as soon as `min_tokens` allows it."""
    letters = dict.fromkeys(prefer("A"), 50)
    body = {"logit_bias": prefer("<|end|>") | letters, "min_tokens": 3}
    result = answer(agent(model, tools=[look], tool_choice="required", extra_body=body), PROMPT)
    assert items(result) == [*CALLED, "MessageOutputItem"]
    assert result.new_items[1].output == "a tree" and result.final_output == "AAA"


@pytest.mark.parametrize("choice", ["required", "look"])
def test_a_tool_ends_the_run(model: Any, answer: Any, choice: str) -> None:
    forced = agent(model, tools=[look], tool_choice=choice, tool_use_behavior="stop_on_first_tool")
    result = answer(forced, PROMPT)
    assert result.final_output == "a tree" and items(result) == CALLED


@pytest.mark.parametrize("parallel", [True, False])
def test_parallel_calls_are_reported(model: Any, answer: Any, parallel: bool) -> None:
    forced = agent(
        model,
        tools=[look],
        tool_choice="required",
        tool_use_behavior="stop_on_first_tool",
        parallel_tool_calls=parallel,
    )
    assert items(answer(forced, PROMPT))[0] == "ToolCallItem"


def test_an_output_type_with_a_tool_at_hand(model: Any, answer: Any, prefer: Any) -> None:
    """An output type works while a tool is available: nano may call or answer, and a bias makes it
    answer in the schema."""
    free = agent(model, output_type=Animal, tools=[look], extra_body={"logit_bias": prefer("{")})
    assert isinstance(answer(free, PROMPT).final_output, Animal)


def test_a_tool_then_an_output_type(model: Any, answer: Any, prefer: Any) -> None:
    built = agent(
        model,
        output_type=Animal,
        tools=[look],
        tool_choice="required",
        extra_body={"logit_bias": prefer("{")},
    )
    result = answer(built, PROMPT)
    assert items(result) == [*CALLED, "MessageOutputItem"]
    assert isinstance(result.final_output, Animal)


def test_a_handoff(model: Any, answer: Any) -> None:
    """After a handoff, the other agent reads what the first one did, and has an output schema of
    its own."""
    other = agent(model, "other", output_type=Animal)
    result = answer(agent(model, handoffs=[other], tool_choice="required"), PROMPT)
    assert result.last_agent.name == "other"
    assert items(result) == ["HandoffCallItem", "HandoffOutputItem", "MessageOutputItem"]
    assert isinstance(result.final_output, Animal)


def test_a_conversation_continues(model: Any, answer: Any) -> None:
    """A conversation continues: everything that a run produced is the input of the next one,
    including messages, calls and their results."""
    forced = agent(
        model, tools=[look], tool_choice="required", tool_use_behavior="stop_on_first_tool"
    )
    turns = [
        *answer(forced, PROMPT).to_input_list(),
        {"role": "user", "content": "upper: abc"},
    ]
    result = answer(agent(model, output_type=Animal), turns)
    assert isinstance(result.final_output, Animal)
    turns = [*result.to_input_list(), {"role": "user", "content": "a dog"}]
    assert isinstance(answer(agent(model, output_type=Animal), turns).final_output, Animal)


def test_stored_conversations(url: str, answer: Any) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", timeout=HANG_S, max_retries=0)
    model = OpenAIResponsesModel(model="nano", openai_client=client)
    first = answer(agent(model, store=True), "upper: abc")
    assert first.last_response_id
    more = {"previous_response_id": first.last_response_id}
    second = answer(agent(model, output_type=Animal), PROMPT, **more)
    assert isinstance(second.final_output, Animal)
    assert second.context_wrapper.usage.input_tokens > first.context_wrapper.usage.total_tokens


def test_a_refusal_is_an_error(model: Any, answer: Any) -> None:
    built = agent(model)
    built.model_settings.temperature = -1
    with pytest.raises(openai.BadRequestError, match="temperature=-1"):
        answer(built, PROMPT)
