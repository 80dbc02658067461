"""Keys of the section `serve` about sessions, prompts that grow by chunks. See
`docs/guide/sessions.md`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swell.configs.resumable import ResumableLimits
from swell.configs.section import MAX_KEPT_S, NonNegative, Positive


class SessionLimits(ResumableLimits, frozen=True):
    """What is kept of sessions, of all ingresses together."""

    sessions: NonNegative = 1000
    """Sessions that may be open; one more is refused (503). 0: there are none."""
    sessions_per_key: Positive = 256
    """How many of them one API key may have (429), so that no user takes the place of all."""
    session_bytes: Positive = 256 * 1024 * 1024
    """Bytes of the tokens of all sessions, four a token: 64 Mi tokens. While there are more, no
    chunk is taken (503). An ingress keeps a second copy of as many."""
    session_idle_s: Annotated[float, Meta(ge=10, le=MAX_KEPT_S)] = 600.0
    """A session ends when no chunk of it has been requested or answered for this long."""
