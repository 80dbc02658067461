"""Checks the query parameters of a URL."""

from __future__ import annotations

from starlette.requests import Request

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.field_path import MAX_PATH_CHARS
from swell.configs.error_text import shown


def checked_query(request: Request, *known: str) -> dict[str, str]:
    """Returns the query parameters of a request; if a name occurs twice, its last value. Raises
    BadRequest for a name that is not in `known`."""
    query = dict(request.query_params)
    for name in query:
        if name not in known:
            raise BadRequest(
                f"the query parameter {shown(name)} is not supported here"
                + (f"; supported: {', '.join(known)}" if known else ""),
                name[:MAX_PATH_CHARS],
                "unknown_field",
            )
    return query
