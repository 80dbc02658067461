"""The items of `/v1/responses`: what a conversation is made of, complete and in one form.

An answer is written in them, stored ones are kept in them, and the input is brought into them
(`cluster/api/responses/input_items.py`), so an answer's items may be sent back as they are.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from swell.cluster.api.logprobs import ChatTokenLogprob
from swell.cluster.api.protocol_base import Body
from swell.cluster.text.randomness import SYSTEM_RANDOM

Status = Literal["in_progress", "completed", "incomplete"]


def new_id(prefix: str, random: Random = SYSTEM_RANDOM) -> str:
    """By default an id that cannot be guessed: a client that knows that of a response may read
    it."""
    return f"{prefix}_{random.getrandbits(128):032x}"


class InputText(Body, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class OutputText(Body, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []
    """Log probabilities of the tokens of the text, if `include` requests them."""


class Refusal(Body, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


class ReasoningText(Body, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Body, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(Body, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    status: Status = "completed"
    content: list[InputText | OutputText | Refusal]


class FunctionCallItem(Body, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    """The id by which the call's output refers to it."""
    name: str
    arguments: str
    """JSON, as text; the model may have written something else, or not finished."""
    status: Status = "completed"


class FunctionCallOutputItem(Body, kw_only=True, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputText]
    status: Status = "completed"


class ReasoningItem(Body, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: None = None
    status: Status = "completed"


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
OutputItem = MessageItem | FunctionCallItem | ReasoningItem
"""What an answer may hold."""
