"""What an error is to a client, whatever the API: status, message, kind and code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from swell.cluster.client.admission import TooManyWaiting
from swell.cluster.client.deadline import RequestTimedOut
from swell.cluster.client.request_state import EngineGone, RequestFailed
from swell.cluster.client.router import NoEngine
from swell.cluster.text.sampling_params import BadRequest
from swell.configs.log import StructuredLogger

_RETRY_AFTER = {"retry-after": "1"}
ENGINE_ERRORS = (EngineGone, NoEngine, RequestFailed, RequestTimedOut)
"""What may end an answer that has begun."""


class HTTPError(Exception):
    """An answer with a status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.headers = headers or {}


class ErrorInfo(NamedTuple):
    """What an error is to a client, whatever the API."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    """OpenAI's `type`."""
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = {}


def error_info(error: Exception) -> ErrorInfo:
    match error:
        case BadRequest():
            status = 404 if error.code == "model_not_found" else 400
            return ErrorInfo(status, error.message, param=error.param, code=error.code)
        case HTTPError():
            return ErrorInfo(
                error.status, str(error), error.kind, code=error.code, headers=error.headers
            )
        case TooManyWaiting():
            again = {"retry-after": str(error.retry_after_s)}
            return ErrorInfo(429, str(error), "rate_limit_exceeded", code=error.code, headers=again)
        case RequestTimedOut():
            return ErrorInfo(408, str(error), "timeout_error", code="request_timeout")
        case NoEngine():
            return ErrorInfo(
                503, str(error), "server_error", code="no_engine", headers=_RETRY_AFTER
            )
        case EngineGone():
            return ErrorInfo(500, str(error), "server_error", code="engine_failed")
        case RequestFailed():
            return ErrorInfo(500, str(error), "server_error", code="request_failed")
    StructuredLogger("cluster.ingress").error(
        "unexpected", error=f"{type(error).__name__}: {error}"
    )
    return ErrorInfo(500, "internal error", "server_error")
