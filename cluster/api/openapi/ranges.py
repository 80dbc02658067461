"""The ranges of numbers, as the document tells them. The routes check them by hand, because their
messages name the way out; a test holds both together."""

from __future__ import annotations

from typing import Any

from swell.cluster.text.validate_params import (
    MAX_LOGPROBS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_STREAM_INTERVAL,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
    WHOLE_VOCABULARY,
)

Limits = dict[str, float]
"""Keywords of JSON schema."""

_PENALTY: Limits = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}
_LOGPROBS: Limits = {"minimum": 0, "maximum": MAX_LOGPROBS}
_COUNT: Limits = {"minimum": 1, "maximum": MAX_N}

GENERATION_LIMITS: dict[str, Limits] = {
    "temperature": {"minimum": 0, "maximum": MAX_TEMPERATURE},
    "top_p": {"minimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_TOP_K},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "n": _COUNT,
    "best_of": _COUNT,
    "min_tokens": {"minimum": 0},
    "stream_interval": {"minimum": 1, "maximum": MAX_STREAM_INTERVAL},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
    "logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "prompt_logprobs": {"minimum": WHOLE_VOCABULARY, "maximum": MAX_LOGPROBS},
    "truncate_prompt_tokens": {"minimum": -1},
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "data_parallel_rank": {"minimum": 0, "maximum": 2**31 - 1},
}


def annotate_limits(schema: dict[str, Any], limits: dict[str, Limits]) -> None:
    """Write limits into the schema of a body, at those of its fields that hold numbers."""
    for name, words in limits.items():
        field = schema["properties"].get(name, {})
        for form in field.get("anyOf", [field]):
            if form.get("type") in ("integer", "number"):
                form.update(words)
