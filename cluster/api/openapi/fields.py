"""What the document says of fields beside their types: which are not served, which are those of
other servers, where unknown ones are allowed, and the ranges of numbers.

The routes check ranges by hand, because their messages name the way out; a test holds both
together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swell.cluster.api.admin.protocol import DrainRequest, ScaleRequest, SwitchRequest
from swell.cluster.text import validate_params as limits
from swell.cluster.text.schema.request_body import HistoryPart, RequestBody
from swell.cluster.text.schema.unknown_fields import UnknownFields

Schemas = dict[str, dict[str, Any]]
_OPERATORS = (DrainRequest, ScaleRequest, SwitchRequest)
"""Bodies in which an unknown field is refused in any case."""


def annotate_fields(
    schemas: Schemas, bodies: Iterable[type[RequestBody]], unknown: UnknownFields
) -> None:
    for kind in _kinds(RequestBody):
        schema = schemas.get(kind.__name__)
        if schema is None:
            continue
        _mark_unsupported(kind, schema)
        if issubclass(kind, HistoryPart):
            _open(schema, "Unknown fields are ignored.")
        elif unknown == "ignore" and kind not in _OPERATORS:
            _open(schema, "Unknown fields are ignored, and named in the header `x-swell-warning`.")
    for kind in bodies:
        _annotate_ecosystem(kind, schemas[kind.__name__])


def _kinds(base: type[RequestBody]) -> Iterable[type[RequestBody]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _open(schema: dict[str, Any], words: str) -> None:
    schema["additionalProperties"] = True
    schema["description"] = " ".join(filter(None, (schema.get("description"), words)))


def _mark_unsupported(kind: type[RequestBody], schema: dict[str, Any]) -> None:
    """Say which fields are known but not served, so that no client is built on them."""
    for name, neutral in kind.NOT_SERVED.items():
        if name in schema["properties"]:
            schema["properties"][name]["description"] = _not_served(neutral)


def _not_served(neutral: tuple[Any, ...]) -> str:
    return f"Not served; it must be {' or '.join(map(repr, (*neutral, None)))}."


def _annotate_ecosystem(kind: type[RequestBody], schema: dict[str, Any]) -> None:
    properties = schema["properties"]
    for name, neutral in kind.ECOSYSTEM.neutral.items():
        properties[name] = {"enum": [*neutral, None], "description": _not_served(neutral)}
    for name in sorted(kind.ECOSYSTEM.taken):
        properties[name] = {"description": "Accepted; it changes nothing in the answer."}
    for name, target in kind.ECOSYSTEM.means.items():
        properties[name] = {**properties[target], "description": f"Means `{target}`."}


_PENALTY = (-limits.MAX_PENALTY, limits.MAX_PENALTY)

GENERATION_LIMITS: dict[str, tuple[float, float | None]] = {
    "temperature": (0, limits.MAX_TEMPERATURE),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, limits.MAX_TOP_K),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, limits.MAX_N),
    "best_of": (1, limits.MAX_N),
    "min_tokens": (0, None),
    "stream_interval": (1, limits.MAX_STREAM_INTERVAL),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": (limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY),
    "logprobs": (0, limits.MAX_LOGPROBS),
    "top_logprobs": (0, limits.MAX_LOGPROBS),
    "prompt_logprobs": (limits.WHOLE_VOCABULARY, limits.MAX_LOGPROBS),
    "truncate_prompt_tokens": (-1, None),
    "priority": (-(2**31), 2**31 - 1),
    "data_parallel_rank": (0, 2**31 - 1),
}
"""Smallest and largest number of a field."""


def annotate_limits(schema: dict[str, Any]) -> None:
    """Write limits into the schema of a body, at those of its fields that hold numbers."""
    for name, (low, high) in GENERATION_LIMITS.items():
        field = schema["properties"].get(name, {})
        for form in field.get("anyOf", [field]):
            if form.get("type") in ("integer", "number"):
                form.update({"minimum": low} if high is None else {"minimum": low, "maximum": high})
