"""The items of `/v1/responses`: the complete elements of a conversation, in one form.

Answers are written as items, and stored responses are kept as items. The input is converted to
items (`cluster/api/responses/input_items.py`), so clients may send back an answer's items
unchanged.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from swell.cluster.api.answers.logprobs import ChatTokenLogprob
from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.text.random_ids import SYSTEM_RANDOM

Status = Literal["in_progress", "completed", "incomplete"]


def new_id(prefix: str, random: Random = SYSTEM_RANDOM) -> str:
    """Returns a random id. The default source is unguessable, because a client that knows the id of
    a response may read it."""
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
    """The id with which the call's output refers to the call."""
    name: str
    arguments: str
    """JSON, as text. The model may have written invalid or incomplete JSON."""
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
"""The items that an answer may contain."""
