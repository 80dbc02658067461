"""Errors as clients see them, independent of the API: status, message, kind and code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from swell.cluster.api.bodies.protocol_base import ErrorBody, ErrorDetail
from swell.cluster.client.requests.deadline import RequestTimedOut
from swell.cluster.client.requests.request_state import (
    EngineGone,
    RequestCancelled,
    RequestFailed,
    RequestInvalid,
)
from swell.cluster.client.routing.admission import TooManyWaiting
from swell.cluster.client.routing.router import NoEngine
from swell.cluster.text.errors import BadRequest
from swell.configs.runtime.log import StructuredLogger

RETRY_AFTER = {"retry-after": "1"}
_ENGINE_ERRORS: dict[type[Exception], tuple[int, str, str]] = {
    EngineGone: (500, "server_error", "engine_failed"),
    NoEngine: (503, "server_error", "no_engine"),
    RequestCancelled: (499, "invalid_request_error", "request_cancelled"),
    RequestFailed: (500, "server_error", "request_failed"),
    RequestInvalid: (400, "invalid_request_error", "invalid_grammar"),
    RequestTimedOut: (408, "timeout_error", "request_timeout"),
}
ENGINE_ERRORS = tuple(_ENGINE_ERRORS)
"""Errors that may terminate an answer after it has begun."""


class ErrorInfo(NamedTuple):
    """An error as a client sees it, independent of the API."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    """OpenAI's `type`."""
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = {}


class HTTPError(Exception):
    """An error that is answered with its own HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.info = ErrorInfo(status, message, kind, None, code, headers or {})


def error_body(error: ErrorInfo) -> ErrorBody:
    """Returns the error in the format of OpenAI's API."""
    return ErrorBody(
        error=ErrorDetail(
            message=error.message, type=error.kind, param=error.param, code=error.code
        )
    )


def error_info(error: Exception) -> ErrorInfo:
    match error:
        case HTTPError():
            return error.info
        case BadRequest():
            status = 404 if error.code == "model_not_found" else 400
            return ErrorInfo(status, error.message, param=error.param, code=error.code)
        case TooManyWaiting():
            again = {"retry-after": str(error.retry_after_s)}
            return ErrorInfo(429, str(error), "rate_limit_exceeded", code=error.code, headers=again)
    for known, (status, kind, code) in _ENGINE_ERRORS.items():
        if isinstance(error, known):
            headers = RETRY_AFTER if status == 503 else {}
            return ErrorInfo(status, str(error), kind, code=code, headers=headers)
    StructuredLogger("cluster.ingress").error(
        "unexpected", error=f"{type(error).__name__}: {error}"
    )
    return ErrorInfo(500, "internal error", "server_error")
