"""Settings of the section `serve` for sessions, whose prompts arrive in chunks
(`docs/guide/sessions.md`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swell.configs.resumable import ResumableLimits
from swell.configs.section import MAX_KEPT_S, NonNegative, Positive


class SessionLimits(ResumableLimits, frozen=True):
    """Limits of the sessions of all ingresses together."""

    sessions: NonNegative = 1000
    """Maximum number of open sessions; one more is refused (503). 0 disables sessions."""
    sessions_per_key: Positive = 256
    """Maximum number of open sessions of one API key (429), so that one user cannot use all of
    them."""
    session_bytes: Positive = 256 * 1024 * 1024
    """Maximum size of the tokens of all sessions, at 4 bytes a token: 64 Mi tokens by default.
    Above this limit new chunks are refused (503). An ingress keeps a second copy of the same
    size."""
    session_idle_s: Annotated[float, Meta(ge=10, le=MAX_KEPT_S)] = 600.0
    """A session expires if no chunk of it was requested or answered for this long."""
