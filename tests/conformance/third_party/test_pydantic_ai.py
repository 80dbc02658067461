"""pydantic-ai over three APIs: chat completions, responses and Anthropic's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import anthropic
import openai
import pytest
from animal import PROMPT, Animal, Anything
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelMessage, RetryPromptPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow


class Result:
    def __init__(self, output: Any, messages: list[ModelMessage], usage: Any) -> None:
        self.output = output
        self.messages = messages
        self.usage = usage

    def parts(self, kind: type) -> list[Any]:
        return [part for one in self.messages for part in one.parts if isinstance(part, kind)]


async def run(agent: Agent[Any, Any], prompt: str, **more: Any) -> Result:
    result = await agent.run(prompt, **more)
    return Result(result.output, result.all_messages(), result.usage)


async def run_stream(agent: Agent[Any, Any], prompt: str, **more: Any) -> Result:
    async with agent.run_stream(prompt, **more) as result:
        output = await result.get_output()
        return Result(output, result.all_messages(), result.usage)


@pytest.fixture(params=[run, run_stream], ids=["whole", "streamed"])
def answer(loop: asyncio.Runner, request: pytest.FixtureRequest) -> Callable[..., Result]:
    return lambda agent, prompt, **more: loop.run(request.param(agent, prompt, **more))


def openai_provider(url: str) -> OpenAIProvider:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", timeout=HANG_S, max_retries=0)
    return OpenAIProvider(openai_client=client)


def chat(url: str) -> OpenAIChatModel:
    return OpenAIChatModel("nano", provider=openai_provider(url))


def responses(url: str) -> OpenAIResponsesModel:
    return OpenAIResponsesModel("nano", provider=openai_provider(url))


def messages(url: str) -> AnthropicModel:
    client = anthropic.AsyncAnthropic(base_url=url, api_key="k", timeout=HANG_S, max_retries=0)
    return AnthropicModel("nano", provider=AnthropicProvider(anthropic_client=client))


@pytest.fixture(params=[chat, responses, messages], ids=lambda make: make.__name__)
def model(url: str, request: pytest.FixtureRequest) -> Any:
    return request.param(url)


@pytest.fixture(params=[chat, responses], ids=lambda make: make.__name__)
def openai_model(url: str, request: pytest.FixtureRequest) -> Any:
    return request.param(url)


def agent(model: Any, output_type: Any = str, **more: Any) -> Agent[Any, Any]:
    body = more.pop("body", None)
    settings = {"temperature": 0, "max_tokens": 200, **({"extra_body": body} if body else {})}
    return Agent(model, output_type=output_type, model_settings=settings, **more)


def give_look(agent: Agent[Any, Any]) -> None:
    """Adds a tool for the first step only, so that the run finishes even if nano prefers to call
    it."""

    @agent.tool_plain(prepare=_first_step)
    def look(at: Literal["left", "right"]) -> str:
        """Look."""
        return "a tree"


async def _first_step(context: Any, tool: Any) -> Any:
    return tool if context.run_step == 1 else None


def test_a_text(model: Any, answer: Any) -> None:
    result = answer(agent(model), "upper: abc")
    assert result.output == "ABC"


def test_pieces_of_a_text(loop: asyncio.Runner, model: Any) -> None:
    async def pieces() -> list[str]:
        async with agent(model).run_stream("upper: abc") as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    assert "".join(loop.run(pieces())) == "ABC"


def test_instructions(model: Any, answer: Any) -> None:
    built = agent(model, instructions="Answer.", system_prompt="Be brief.")
    assert isinstance(answer(built, "upper: abc").output, str)


def test_a_form_by_a_tool(model: Any, answer: Any) -> None:
    result = answer(agent(model, ToolOutput(Animal)), PROMPT)
    assert isinstance(result.output, Animal)
    assert len(result.parts(ToolCallPart)) == 1


def test_one_of_two_forms_by_tools(model: Any, answer: Any) -> None:
    kinds = [ToolOutput(Animal, name="animal"), ToolOutput(Anything, name="anything")]
    built = agent(model, kinds)
    assert isinstance(answer(built, PROMPT).output, Animal | Anything)


def test_a_native_form(openai_model: Any, answer: Any) -> None:
    assert isinstance(answer(agent(openai_model, NativeOutput(Animal)), PROMPT).output, Animal)


def test_a_form_in_the_prompt(openai_model: Any, answer: Any, prefer: Any) -> None:
    """A schema in the prompt only: the request just promises an object, and `}` ends it at once."""
    body = {"logit_bias": prefer("}")}
    result = answer(agent(openai_model, PromptedOutput(Anything), body=body), PROMPT)
    assert isinstance(result.output, Anything)


def test_a_tool_then_a_form_by_a_tool(model: Any, answer: Any) -> None:
    built = agent(model, ToolOutput(Animal))
    give_look(built)
    assert isinstance(answer(built, PROMPT).output, Animal)


def test_a_tool_that_is_chosen(openai_model: Any, answer: Any, prefer: Any) -> None:
    """A tool is chosen: its name begins with the character that nano is made to prefer."""
    built = agent(openai_model, ToolOutput(Animal), body={"logit_bias": prefer("l")})
    give_look(built)
    result = answer(built, PROMPT)
    assert [part.tool_name for part in result.parts(ToolCallPart)] == ["look", "final_result"]
    assert result.parts(ToolReturnPart)[0].content == "a tree"


@pytest.mark.parametrize("first", ["<", "{"])
def test_a_native_form_with_a_tool_at_hand(
    openai_model: Any, answer: Any, prefer: Any, first: str
) -> None:
    """A native output schema works while a tool is available: `first` is the first character of a
    call or of the schema, and both may begin the answer."""
    built = agent(openai_model, NativeOutput(Animal), body={"logit_bias": prefer(first)})
    give_look(built)
    result = answer(built, PROMPT)
    assert isinstance(result.output, Animal)
    assert bool(result.parts(ToolCallPart)) == (first == "<")


def test_a_refused_answer_is_requested_again(loop: asyncio.Runner, model: Any) -> None:
    """A refused answer is generated again: the reason goes back to the model with the refused
    answer."""
    built = agent(model, ToolOutput(Animal))
    seen: list[str] = []

    @built.output_validator
    def not_the_first(animal: Animal) -> Animal:
        seen.append(animal.name)
        if len(seen) == 1:
            raise ModelRetry("this name is taken")
        return animal

    result = loop.run(run(built, PROMPT))
    assert isinstance(result.output, Animal) and len(seen) == 2
    assert result.parts(RetryPromptPart)[0].content == "this name is taken"


def test_a_conversation_continues(model: Any, answer: Any) -> None:
    """A conversation continues: calls and their results are sent back in the format of each API."""
    first = answer(agent(model, ToolOutput(Animal)), PROMPT)
    second = answer(agent(model), "upper: abc", message_history=first.messages)
    assert isinstance(second.output, str)
    form = agent(model, ToolOutput(Animal))
    third = answer(form, PROMPT, message_history=second.messages)
    assert isinstance(third.output, Animal)


def test_a_conversation_changes_its_api(url: str, answer: Any) -> None:
    history: list[ModelMessage] = []
    for make in (messages, responses, chat, messages):
        form = agent(make(url), ToolOutput(Animal))
        result = answer(form, PROMPT, message_history=history[-3:])
        assert isinstance(result.output, Animal)
        history = result.messages


def test_usage(loop: asyncio.Runner, model: Any) -> None:
    result = loop.run(run(agent(model), "upper: abc"))
    usage = result.usage() if callable(result.usage) else result.usage
    assert usage.input_tokens > 0 and usage.output_tokens > 0


def test_a_refusal_is_an_error(model: Any, answer: Any) -> None:
    built = agent(model)
    built.model_settings["temperature"] = -1
    with pytest.raises(ModelHTTPError, match="temperature=-1"):
        answer(built, PROMPT)
