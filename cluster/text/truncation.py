"""How a text becomes tokens, and what of a longer prompt is kept: `add_special_tokens`,
`truncate_prompt_tokens` and `truncation_side` of a request. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from swell.cluster.text.sampling_params import BadRequest

WINDOW = -1
"""Of `truncate_prompt_tokens`: as many as the model can read."""
MAX_TRUNCATED_BYTES = 1024 * 1024
"""Of a text of which `truncate_prompt_tokens` keeps a part: all of it is tokenized, which takes a
second."""


class Keep(NamedTuple):
    """What is kept of a longer prompt."""

    tokens: int
    """`WINDOW`: as many as fit."""
    side: Literal["left", "right"]
    """That is cut off."""
    beside: int
    """Tokens of the answer, which must fit too."""


class TextOptions(NamedTuple):
    """How a text becomes tokens."""

    add_special_tokens: bool
    keep: Keep | None = None


PLAIN_TEXT = TextOptions(add_special_tokens=True)
TEMPLATE_TEXT = TextOptions(add_special_tokens=False)
"""A chat template writes special tokens itself."""


def kept(token_ids: list[int], keep: Keep | None, max_model_len: int) -> list[int]:
    """Of a prompt. Raises `BadRequest` where no token of it could stay."""
    if keep is None:
        return token_ids
    count = max_model_len - keep.beside if keep.tokens == WINDOW else keep.tokens
    if not 1 <= count < max_model_len:
        raise BadRequest(
            f"truncate_prompt_tokens={keep.tokens} leaves {max(count, 0)} tokens of the prompt "
            f"beside {keep.beside} of the answer; it must leave at least one, and fewer than "
            f"max_model_len={max_model_len}",
            "truncate_prompt_tokens",
        )
    return token_ids[:count] if keep.side == "right" else token_ids[-count:]
