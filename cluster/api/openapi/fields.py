"""What the document says of fields beside their types: those that are not served, those of other
servers, and where unknown ones are allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swell.cluster.api.admin.protocol import DrainRequest, ScaleRequest, SwitchRequest
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
    """Say which fields are known but not served, so that nobody plans with them."""
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
