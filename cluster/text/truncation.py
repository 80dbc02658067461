"""How a text is tokenized, and which part of a longer prompt is kept: the fields
`add_special_tokens`, `truncate_prompt_tokens` and `truncation_side` of a request. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from swell.cluster.text.sampling_params import BadRequest

FIT_CONTEXT = -1
"""A value of `truncate_prompt_tokens`: as many tokens as the model can read."""
MAX_TRUNCATED_BYTES = 1024 * 1024
"""Longest text of which `truncate_prompt_tokens` keeps a part: all of it is tokenized, which takes
a second."""


class Truncation(NamedTuple):
    """Which part of a longer prompt is kept."""

    tokens: int
    """`FIT_CONTEXT`: as many as fit."""
    side: Literal["left", "right"]
    """The side that is cut off."""
    reserved_tokens: int
    """Tokens of the answer, which must fit too."""


class TokenizeOptions(NamedTuple):
    """How a text becomes tokens."""

    add_special_tokens: bool
    truncation: Truncation | None = None


PLAIN_TEXT = TokenizeOptions(add_special_tokens=True)
TEMPLATE_TEXT = TokenizeOptions(add_special_tokens=False)
"""A chat template writes special tokens itself."""


def truncate(
    token_ids: list[int],
    truncation: Truncation | None,
    max_model_len: int,
    min_answer_tokens: int = 1,
) -> list[int]:
    """The tokens of a prompt that are kept. Raises `BadRequest` if none could be."""
    if truncation is None:
        return token_ids
    count = kept_tokens(truncation, max_model_len, min_answer_tokens)
    return token_ids[:count] if truncation.side == "right" else token_ids[-count:]


def kept_tokens(truncation: Truncation, max_model_len: int, min_answer_tokens: int) -> int:
    """The most tokens of a prompt that are kept. Raises `BadRequest` if none could be."""
    count = (
        max_model_len - truncation.reserved_tokens
        if truncation.tokens == FIT_CONTEXT
        else truncation.tokens
    )
    longest = max_model_len - min_answer_tokens
    if not 1 <= count <= longest:
        raise BadRequest(
            f"truncate_prompt_tokens={truncation.tokens} leaves {max(count, 0)} tokens of the "
            f"prompt beside {truncation.reserved_tokens} of the answer; it must leave "
            f"at least one, and at most {longest} (max_model_len={max_model_len})",
            "truncate_prompt_tokens",
        )
    return count
