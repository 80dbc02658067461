"""Converts the arguments of `LLM` calls to one value for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swell.cluster.text.prompt.generation_request import Prompt, split_prompts
from swell.cluster.text.prompt.truncation import TokenizeOptions, Truncation


def inputs_of(
    prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
) -> list[Prompt]:
    """Returns the prompts, each a text or a list of token ids."""
    if not isinstance(prompts, str):
        prompts = [p if isinstance(p, str | int) else list(p) for p in prompts]  # type: ignore[assignment]
    return split_prompts(prompts)


def fields_of(count: int) -> list[str]:
    """Returns the names of the prompts in error messages."""
    return [f"prompt[{index}]" for index in range(count)] if count > 1 else ["prompt"]


def each_of(what: str, given: Any, kind: type, count: int) -> list[Any]:
    """Returns a list of `count` values, from one value of `kind` for all prompts, or from one for
    each."""
    if isinstance(given, kind):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} {what} for {count} prompts; pass one or {count}")
    return list(given)


def cut_to(tokens: int | None) -> TokenizeOptions:
    truncation = None if tokens is None else Truncation(tokens, "right", reserved_tokens=0)
    return TokenizeOptions(add_special_tokens=True, truncation=truncation)
