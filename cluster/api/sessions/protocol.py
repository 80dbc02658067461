"""Request and response bodies of `/v1/sessions`."""

from __future__ import annotations

from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.text.schema.request_body import RequestBody


class CreateSessionRequest(RequestBody, kw_only=True):
    """An empty object."""


class SessionBody(Body, kw_only=True):
    """A session."""

    id: str
    object: str = "session"
    created_at: int
    chunks: int
    """The number of chunks."""
    tokens: int
    """The total length of all chunks and their answers."""
    idle_limit_s: float
    """The session ends if no chunk arrives for this time."""


class SessionDeleted(Body, kw_only=True):
    id: str
    object: str = "session.deleted"
    deleted: bool = True
