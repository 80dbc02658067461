"""Options of tokenization, and truncation of longer prompts: the fields `add_special_tokens`,
`truncate_prompt_tokens` and `truncation_side` of a request. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from swell.cluster.text.errors import BadRequest

FIT_CONTEXT = -1
"""A value of `truncate_prompt_tokens`: as many tokens as the model can read."""
MAX_TRUNCATED_BYTES = 1024 * 1024
"""Limit on the length of a text that is truncated: all of it is tokenized, which takes a second."""


class Truncation(NamedTuple):
    """The part of a longer prompt that is kept."""

    tokens: int
    """Number of tokens to keep; `FIT_CONTEXT` for as many as fit."""
    side: Literal["left", "right"]
    """The side that is cut off."""
    reserved_tokens: int
    """Number of tokens of the answer, which must fit too."""


class TokenizeOptions(NamedTuple):
    """Options for the tokenization of a text."""

    add_special_tokens: bool
    truncation: Truncation | None = None
    can_truncate: bool = True
    """Whether the request may set a truncation for this text."""


PLAIN_TEXT = TokenizeOptions(add_special_tokens=True)
TEMPLATE_TEXT = TokenizeOptions(add_special_tokens=False)
"""Options for rendered conversations: a chat template writes special tokens itself."""


def truncate(
    token_ids: list[int],
    truncation: Truncation | None,
    max_model_len: int,
    min_answer_tokens: int = 1,
) -> list[int]:
    """Returns the tokens of a prompt that are kept. Raises `BadRequest` if none could be."""
    if truncation is None:
        return token_ids
    count = kept_tokens(truncation, max_model_len, min_answer_tokens)
    return token_ids[:count] if truncation.side == "right" else token_ids[-count:]


def kept_tokens(truncation: Truncation, max_model_len: int, min_answer_tokens: int) -> int:
    """Returns the maximum number of tokens of a prompt that are kept. Raises `BadRequest` if none
    could be."""
    count = (
        max_model_len - truncation.reserved_tokens
        if truncation.tokens == FIT_CONTEXT
        else truncation.tokens
    )
    longest = max_model_len - min_answer_tokens
    if not 1 <= count <= longest:
        raise BadRequest(
            f"truncate_prompt_tokens={truncation.tokens} leaves {max(count, 0)} tokens for the "
            f"prompt and {truncation.reserved_tokens} for the answer; it must leave 1 to "
            f"{longest} tokens for the prompt (max_model_len={max_model_len})",
            "truncate_prompt_tokens",
        )
    return count
