"""Errors as Anthropic's clients know them: the kind goes with the status."""

from __future__ import annotations

import msgspec

from swell.cluster.api.messages.message import MessagesError, MessagesErrorDetail

OVERLOADED = 529
"""Of this API alone: no engine can answer, try again. Its clients do so, as with other 5xx, and
call it by its name."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def status_of(status: int) -> int:
    """The status that this API has instead of another one."""
    return OVERLOADED if status == 503 else status


def error(message: str, status: int, request_id: str) -> MessagesError:
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return MessagesError(
        error=MessagesErrorDetail(type=kind, message=message), request_id=request_id
    )


def error_body(message: str, status: int, request_id: str) -> bytes:
    return msgspec.json.encode(error(message, status, request_id))
