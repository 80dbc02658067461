"""instructor, in each of its modes for servers with OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Literal

import instructor
import openai
import pytest
from animal import PROMPT, Animal, Anything
from instructor import Mode
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ValidationInfo, field_validator

from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

FORMS = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS]
"""The modes whose requests contain the schema of the answer, so that nano follows it too."""


class Client:
    """instructor's client in one mode, with the requests that it has sent."""

    def __init__(self, url: str, mode: Mode) -> None:
        raw = openai.OpenAI(base_url=f"{url}/v1", api_key="k", timeout=HANG_S, max_retries=0)
        self._instructor = instructor.from_openai(raw, mode=mode)
        self._instructor.on("completion:kwargs", self._keep)
        self._limit = "max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens"
        self.requests: list[dict[str, Any]] = []

    def _keep(self, *_: Any, **request: Any) -> None:
        self.requests.append(json.loads(json.dumps(request, default=str)))

    def create(self, method: str, kind: Any, max_tokens: int = 120, **more: Any) -> Any:
        call = getattr(self._instructor.chat.completions, method)
        more = {"max_retries": 0, self._limit: max_tokens, **more}
        messages = [{"role": "user", "content": PROMPT}]
        return call(model="nano", response_model=kind, messages=messages, temperature=0, **more)


@pytest.fixture(params=FORMS, ids=lambda mode: mode.name)
def client(url: str, request: pytest.FixtureRequest) -> Client:
    return Client(url, request.param)


def test_a_form_is_filled(client: Client) -> None:
    assert isinstance(client.create("create", Animal), Animal)


def test_a_form_grows(client: Client) -> None:
    """Fields arrive while the answer is generated, several at once if they are complete, and no
    text is withdrawn."""
    grown = [partial.model_dump() for partial in client.create("create_partial", Animal)]
    Animal.model_validate(grown[-1])
    assert len(grown) > 1 and grown[0] != grown[-1]
    for before, after in pairwise(grown):
        assert all(str(after[key]).startswith(str(old)) for key, old in before.items() if old)


def test_an_answer_comes_with_its_completion(client: Client) -> None:
    animal, completion = client.create("create_with_completion", Animal)
    assert isinstance(animal, Animal) and completion.usage.total_tokens > 0


def test_a_validation_error_is_returned_to_the_model_and_answered(client: Client) -> None:
    """A validation error is sent back and answered: the second request contains the refused answer
    and the reason."""
    refused: list[str] = []

    class Chosen(Animal):
        @field_validator("name")
        @classmethod
        def not_the_first(cls, name: str, _: ValidationInfo) -> str:
            if not refused:
                refused.append(name)
                raise ValueError("this name is taken")
            return name

    assert isinstance(client.create("create", Chosen, max_retries=2), Chosen)
    first, second = client.requests
    key = "messages" if "messages" in first else "input"
    assert len(second[key]) > len(first[key])
    assert "this name is taken" in json.dumps(second[key])


def test_a_form_that_is_cut_off_is_an_error(client: Client) -> None:
    with pytest.raises((IncompleteOutputException, InstructorRetryException)):
        client.create("create", Animal, max_tokens=16)


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.MD_JSON], ids=lambda mode: mode.name)
def test_a_form_in_the_prompt(
    url: str, mode: Mode, prefer: Callable[[str], dict[str, int]]
) -> None:
    """A schema in the prompt only: the request demands an object without a schema, or nothing."""
    client = Client(url, mode)
    body: dict[str, Any] = {"logit_bias": prefer("}")}
    if mode is Mode.MD_JSON:
        body = {"structured_outputs": {"regex": r"```json\n\{\}\n```"}}
    assert isinstance(client.create("create", Anything, extra_body=body), Anything)


def test_an_object_without_the_fields_is_requested_again(
    url: str, prefer: Callable[[str], dict[str, int]]
) -> None:
    """An object without the fields is requested again: `json_object` only promises an object, which
    may be `{}` and is never an Animal."""
    client = Client(url, Mode.JSON)
    with pytest.raises(InstructorRetryException) as failed:
        client.create("create", Animal, max_retries=1, extra_body={"logit_bias": prefer("}")})
    assert failed.value.n_attempts == len(client.requests) == 2
    first, second = (request["messages"] for request in client.requests)
    assert len(second) > len(first)


class Look(BaseModel):
    """Look."""

    at: Literal["left", "right"]


class Go(BaseModel):
    """Go."""

    to: Literal["left", "right"]


def test_parallel_calls(url: str) -> None:
    client = Client(url, Mode.PARALLEL_TOOLS)
    calls = list(
        client.create(
            "create", Iterable[Look | Go], max_tokens=400, extra_body={"tool_choice": "required"}
        )
    )
    assert calls and all(isinstance(call, Look | Go) for call in calls)


def test_each_of_many(url: str) -> None:
    """Each of many items is parsed; only Mode.RESPONSES_TOOLS requires the list itself, which the
    other modes allow to omit."""
    client = Client(url, Mode.RESPONSES_TOOLS)
    found = list(client.create("create_iterable", Animal))
    assert all(isinstance(animal, Animal) for animal in found)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def test_each_of_many_of_any_form(url: str, mode: Mode) -> None:
    found = list(Client(url, mode).create("create_iterable", Anything))
    assert all(isinstance(one, Anything) for one in found)
