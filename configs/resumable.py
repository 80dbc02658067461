"""Keys of the section `serve` about answers that a client can continue or request twice."""

from __future__ import annotations

from swell.configs.section import NonNegative, Positive, Seconds, Section


class ResumableLimits(Section, frozen=True):
    """What an ingress keeps of such answers."""

    resumable_answers: NonNegative = 256
    """Answers of requests with `Idempotency-Key` that an ingress keeps while they run and for
    `resumable_age_s` after their end; 0: none, and the header is refused. Where more are requested,
    the one that ended first is dropped; if all run, the request is refused (503)."""
    resumable_answers_per_key: Positive = 64
    """How many of them one API key may have; then its own ones are dropped or refused (429), so
    that no user takes the place of all."""
    resumable_bytes: Positive = 64 * 1024 * 1024
    """Bytes of all their events in an ingress: 256 answers of 1000 tokens. Events that were dropped
    are computed again for a client that needs them."""
    resumable_age_s: Seconds = 600.0
    """How long an answer is kept after its end: long enough for a client that was suspended, or
    that retries with growing delays."""
    resume_grace_s: Seconds = 30.0
    """How long such an answer goes on while no client reads it, before it is aborted: a mobile
    client is back after some seconds, and an engine computes without a reader meanwhile."""
