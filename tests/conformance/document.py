"""The server's OpenAPI document as Schemathesis reads it, and the checks of Schemathesis that run
here."""

from __future__ import annotations

from typing import Any

import httpx
import schemathesis
from schemathesis.config import SchemathesisConfig

from swell.cluster.api.openapi.document import openapi_document

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
REFUSALS = [
    "400",
    "401",
    "403",
    "404",
    "405",
    "406",
    "408",
    "409",
    "415",
    "422",
    "428",
    "429",
    "5xx",
]
"""Schemathesis's own list, and 408: a client that allows no time to wait gets no other answer."""


def read_document(*, edges: bool) -> Any:
    """Returns the document's schema. `edges`: in addition to random cases, tries the limits of
    every field, one by one, and every method, which takes some thousand requests."""
    return schemathesis.openapi.from_dict(
        openapi_document(),
        config=SchemathesisConfig.from_dict(
            {
                "request-timeout": 120,
                "phases": {"stateful": {"enabled": False}, "coverage": {"enabled": edges}},
                "checks": {
                    "enabled": False,
                    **{name: {"enabled": True} for name in CHECKS},
                    "negative_data_rejection": {"enabled": True, "expected-statuses": REFUSALS},
                },
            }
        ),
    )


DOCUMENT = read_document(edges=False)


def check_answer(path: str, answer: httpx.Response) -> None:
    """Raises FailureGroup if the document does not describe such an answer to a POST: its status,
    content type, headers, body, or an event of its stream."""
    DOCUMENT[path]["POST"].Case().validate_response(answer)
