"""Log probabilities as the API tells them, in the two shapes that it has."""

from __future__ import annotations

from swell.cluster.api.protocol_base import Body


class CompletionLogprobs(Body, kw_only=True):
    """Of a completion: one element for each token in each list, the echoed prompt's first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """By text; the token itself is always among them."""
    text_offset: list[int]
    """Characters of the whole text, echoed prompt included, before each token."""


class TopLogprob(Body, kw_only=True):
    """One token that could have stood at a position."""

    token: str
    """Parts of characters show as replacement characters."""
    logprob: float
    bytes: list[int]
    """Exact: those of consecutive tokens make up the text."""


class ChatTokenLogprob(TopLogprob, kw_only=True):
    """The token that stands there."""

    top_logprobs: list[TopLogprob]
    """The most likely ones, best first; the token itself may be missing."""


class ChatLogprobs(Body, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(Body, kw_only=True):
    """One token at one position of the prompt."""

    logprob: float
    rank: int
    """1 is the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each prompt token, by token id: the token itself, then the most likely; null for the first.
Not OpenAI's."""
