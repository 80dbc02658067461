"""Log probabilities in the two formats of the API: the bodies, and the functions that fill them
from tables."""

from __future__ import annotations

from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.client.requests.outputs import LogprobTable


class CompletionLogprobs(Body, kw_only=True):
    """Log probabilities of a completion. Each list has one element for each token; the tokens of an
    echoed prompt come first."""

    tokens: list[str]
    r"""The texts of the tokens. A token that is not whole characters is shown as its bytes, like
    `bytes:\xf0\x9f`."""
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens by name. The sampled token is always among them, and no two tokens
    have the same name."""
    text_offset: list[int]
    """Number of characters of the whole text, including an echoed prompt, before each token."""


class TopLogprob(Body, kw_only=True):
    """One candidate token at a position."""

    token: str
    """The token's text; incomplete characters appear as replacement characters."""
    logprob: float
    bytes: list[int]
    """The exact bytes: those of consecutive tokens make up the text."""


class ChatTokenLogprob(TopLogprob, kw_only=True):
    """The sampled token at a position."""

    top_logprobs: list[TopLogprob]
    """The most likely tokens, best first; the sampled token may be missing."""


class ChatLogprobs(Body, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(Body, kw_only=True):
    """One token at one position of the prompt."""

    logprob: float
    rank: int
    """1 is the most likely token."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each prompt token, by token id: the token itself, then the most likely ones; null for the
first prompt token. Not part of OpenAI's API."""

MIN_LOGPROB = -9999.0
"""Sent instead of lower values, because JSON cannot express infinity."""


def finite(logprob: float) -> float:
    """Returns `logprob`, but at least `MIN_LOGPROB`, also for NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def _name_by_id(token_id: int) -> str:
    """Returns the name of a token as vLLM's `return_tokens_as_token_ids` writes it. It also works
    for tokens that are not text by themselves."""
    return f"token_id:{token_id}"


def completion_logprobs(
    answer: LogprobTable,
    top: int,
    *,
    by_id: bool = False,
    echo: LogprobTable | None = None,
    echoed_chars: int = 0,
) -> CompletionLogprobs:
    """Returns the body for a completion, or for one delta of it.

    `top` is how many of the most likely tokens are listed for each token. A token whose text equals
    that of an earlier one is named by its id; with `by_id` all are. With `echo`, the tokens of the
    prompt come first (in a stream only in the first delta). `echoed_chars` is the length of the
    echoed text: in every delta, the offsets of the answer's tokens start after it.
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
    """Returns the body for a chat answer, or for one delta of it, with the `top` most likely tokens
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
    """Returns the body for a prompt, keyed by token ids."""
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
