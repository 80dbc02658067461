"""`/v1/sessions`: what a client may send, and what it gets."""

from __future__ import annotations

from swell.cluster.api.protocol_base import Body
from swell.cluster.text.schema.request_body import RequestBody


class CreateSessionRequest(RequestBody, kw_only=True):
    """An empty object."""


class SessionBody(Body, kw_only=True):
    """What is kept of a session."""

    id: str
    object: str = "session"
    created_at: int
    chunks: int
    """How many it has."""
    tokens: int
    """Of all chunks and their answers."""
    idle_limit_s: float
    """It ends when no chunk has come for so long."""


class SessionDeleted(Body, kw_only=True):
    id: str
    object: str = "session.deleted"
    deleted: bool = True
