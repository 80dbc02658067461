"""Adds properties of fields that their types do not express: which fields come from other servers,
where unknown fields are allowed, and the ranges of numbers.

The ranges of sampling parameters are the same ones that requests are checked against."""

from __future__ import annotations

from collections.abc import Iterable

from swell.cluster.api.admin.change_requests import (
    DrainRequest,
    LoadAdapterRequest,
    ScaleRequest,
    SwitchRequest,
    UnloadAdapterRequest,
)
from swell.cluster.text.json_types import JsonSchema
from swell.cluster.text.params.validate_params import RANGES, Integers, Numbers
from swell.cluster.text.schema.request_body import HistoryPart, RequestBody, describe_neutral
from swell.cluster.text.schema.unknown_fields import UnknownFields

Schemas = dict[str, JsonSchema]
_OPERATORS = (
    DrainRequest,
    LoadAdapterRequest,
    ScaleRequest,
    SwitchRequest,
    UnloadAdapterRequest,
)
"""Bodies in which an unknown field is always refused."""


def annotate_fields(
    schemas: Schemas, bodies: Iterable[type[RequestBody]], unknown: UnknownFields
) -> None:
    for kind in _kinds(RequestBody):
        schema = schemas.get(kind.__name__)
        if schema is None:
            continue
        if issubclass(kind, HistoryPart):
            _open(schema, "Unknown fields are ignored.")
        elif unknown == "ignore" and kind not in _OPERATORS:
            _open(schema, "Unknown fields are ignored, and listed in the header `x-swell-warning`.")
    for kind in bodies:
        _annotate_ecosystem(kind, schemas[kind.__name__])


def _kinds(base: type[RequestBody]) -> Iterable[type[RequestBody]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _open(schema: JsonSchema, note: str) -> None:
    schema["additionalProperties"] = True
    schema["description"] = " ".join(filter(None, (schema.get("description"), note)))


def _annotate_ecosystem(kind: type[RequestBody], schema: JsonSchema) -> None:
    properties = schema["properties"]
    for name, neutral in kind.ECOSYSTEM.neutral.items():
        properties[name] = {"enum": [*neutral, None], "description": describe_neutral(neutral)}
    for name in sorted(kind.ECOSYSTEM.accepted):
        properties[name] = {"description": "Accepted, without an effect on the answer."}
    for name, target in kind.ECOSYSTEM.means.items():
        properties[name] = {**properties[target], "description": f"Another name of `{target}`."}


_LIMITS: dict[str, Numbers | Integers] = {
    **RANGES,
    "top_logprobs": RANGES["logprobs"],
    "truncate_prompt_tokens": Integers(-1, None),
    "priority": Integers(-(2**31), 2**31 - 1),
    "data_parallel_rank": Integers(0, 2**31 - 1),
}
del _LIMITS["max_tokens"]  # an echoed prompt may have 0 answer tokens


def annotate_limits(schema: JsonSchema) -> None:
    """Writes the ranges of numbers into the schema of a request body."""
    for name, allowed in _LIMITS.items():
        field = schema["properties"].get(name, {})
        limits = {"minimum": allowed.low, "maximum": allowed.high}
        limits = {key: limit for key, limit in limits.items() if limit is not None}
        for form in field.get("anyOf", [field]):
            if form.get("type") in ("integer", "number"):
                form.update(limits)
