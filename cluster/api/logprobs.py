"""Log probabilities in the two shapes of the API: the bodies, and tables turned into them."""

from __future__ import annotations

from swell.cluster.api.protocol_base import Body
from swell.cluster.client.outputs import LogprobTable


class CompletionLogprobs(Body, kw_only=True):
    """Log probabilities of a completion: one element for each token in each list, the echoed
    prompt's first."""

    tokens: list[str]
    r"""Their texts; of one that is not whole characters its bytes, as `bytes:\xf0\x9f`."""
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """By the names of tokens; the token itself is always among them, and no two tokens have one
    name."""
    text_offset: list[int]
    """Characters of the whole text, echoed prompt included, before each token."""


class TopLogprob(Body, kw_only=True):
    """One token that was possible at a position."""

    token: str
    """Parts of characters show as replacement characters."""
    logprob: float
    bytes: list[int]
    """Exact: those of consecutive tokens make up the text."""


class ChatTokenLogprob(TopLogprob, kw_only=True):
    """The token at the position."""

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

MIN_LOGPROB = -9999.0
"""Sent instead of anything below: JSON has no infinity."""


def finite(logprob: float) -> float:
    """At least `MIN_LOGPROB`; also for NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def _name_by_id(token_id: int) -> str:
    """As under vLLM's `return_tokens_as_token_ids`: also for tokens that are no text alone."""
    return f"token_id:{token_id}"


def completion_logprobs(
    answer: LogprobTable,
    top: int,
    *,
    by_id: bool = False,
    echo: LogprobTable | None = None,
    echoed_chars: int = 0,
) -> CompletionLogprobs:
    """The body for a completion, or for one delta of it.

    `top`: how many of the most likely tokens are listed beside each token; one whose text is that
    of a token before it is named by its id. `by_id`: all tokens are. With `echo`, the tokens of the
    prompt come first: in a stream, with the first delta alone. `echoed_chars` are those of the
    echoed text: the answer's offsets count from behind them, in every delta.
    """
    body = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for table, shift in ((echo, 0), (answer, echoed_chars)):
        if table is None:
            continue
        columns = zip(table.token_ids, table.logprobs, strict=True)
        for index, (token_ids, logprobs) in enumerate(columns):
            name = _name_by_id if by_id else table.texts_at(index).name
            likely: dict[int, float] = {}
            for token_id, logprob in zip(token_ids[: 1 + top], logprobs[: 1 + top], strict=False):
                likely.setdefault(token_id, finite(logprob))
            listed: dict[str, float] = {}
            for token_id, logprob in likely.items():
                own = name(token_id)
                listed[_name_by_id(token_id) if own in listed else own] = logprob
            body.tokens.append(name(token_ids[0]))
            body.token_logprobs.append(finite(logprobs[0]) if logprobs else None)
            body.top_logprobs.append(listed if logprobs else None)
        body.text_offset += [offset + shift for offset in table.offsets]
    return body


def chat_logprobs(answer: LogprobTable, top: int, *, by_id: bool = False) -> ChatLogprobs:
    """The body for a chat answer, or for one delta of it, with the `top` most likely tokens
    each."""
    content = []
    columns = zip(answer.token_ids, answer.logprobs, strict=True)
    for index, (token_ids, logprobs) in enumerate(columns):
        texts = answer.texts_at(index)
        name = _name_by_id if by_id else texts.text
        first, *others = (
            TopLogprob(token=name(id), logprob=finite(logprob), bytes=list(texts[id]))
            for id, logprob in zip(token_ids[: 1 + top], logprobs[: 1 + top], strict=True)
        )
        content.append(
            ChatTokenLogprob(
                token=first.token, logprob=first.logprob, bytes=first.bytes, top_logprobs=others
            )
        )
    return ChatLogprobs(content=content)


def prompt_logprobs_body(prompt: LogprobTable) -> PromptLogprobs:
    """The body for a prompt, keyed by token ids."""
    return [
        None
        if position is None
        else {
            token_id: PromptLogprob(
                logprob=finite(entry.logprob), rank=entry.rank, decoded_token=entry.decoded_token
            )
            for token_id, entry in position.items()
        }
        for position in prompt
    ]
