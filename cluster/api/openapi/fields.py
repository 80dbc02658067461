"""What the document says of fields beside their types: which are not served, which are those of
other servers, where unknown ones are allowed, and the ranges of numbers.

The ranges of sampling are those that requests are checked against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swell.cluster.api.admin.protocol import DrainRequest, ScaleRequest, SwitchRequest
from swell.cluster.text.schema.request_body import HistoryPart, RequestBody
from swell.cluster.text.schema.unknown_fields import UnknownFields
from swell.cluster.text.validate_params import RANGES, Integers, Numbers

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
        allowed = " or ".join(map(repr, (*neutral, None)))
        if name in schema["properties"]:
            schema["properties"][name]["description"] = f"Not served; it must be {allowed}."


def _annotate_ecosystem(kind: type[RequestBody], schema: dict[str, Any]) -> None:
    properties = schema["properties"]
    for name, neutral in kind.ECOSYSTEM.neutral.items():
        allowed = " or ".join(map(repr, (*neutral, None)))
        properties[name] = {
            "enum": [*neutral, None],
            "description": f"Not served; it must be {allowed}.",
        }
    for name in sorted(kind.ECOSYSTEM.taken):
        properties[name] = {"description": "Accepted; it changes nothing in the answer."}
    for name, target in kind.ECOSYSTEM.means.items():
        properties[name] = {**properties[target], "description": f"Means `{target}`."}


Limits = dict[str, float]
"""Keywords of JSON schema."""


def _limits(allowed: Numbers | Integers) -> Limits:
    return {
        name: limit
        for name, limit in (("minimum", allowed.low), ("maximum", allowed.high))
        if limit is not None
    }


GENERATION_LIMITS: dict[str, Limits] = {
    # max_tokens: an echoed prompt may have no answer.
    **{name: _limits(allowed) for name, allowed in RANGES.items() if name != "max_tokens"},
    "top_logprobs": _limits(RANGES["logprobs"]),
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
