"""Settings of the section `serve` for answers that a client can resume or request twice."""

from __future__ import annotations

from swell.configs.section import NonNegative, Positive, Seconds, Section


class ResumableLimits(Section, frozen=True):
    """Limits of the resumable answers that an ingress keeps."""

    resumable_answers: NonNegative = 256
    """Maximum number of answers to requests with `Idempotency-Key` that an ingress keeps, while
    they run and for `resumable_age_s` after they finish. If the limit is reached, the answer that
    finished first is dropped; if all are still running, the request is refused (503). 0 disables
    them: requests with the header are refused."""
    resumable_answers_per_key: Positive = 64
    """Maximum number of such answers of one API key. Above it, this key's own answers are dropped
    or its requests refused (429), so that one user cannot use all of them."""
    resumable_bytes: Positive = 64 * 1024 * 1024
    """Maximum size of the events of all these answers in an ingress: about 256 answers of 1000
    tokens by default. Events that were dropped are computed again if a client needs them."""
    resumable_age_s: Seconds = 600.0
    """How long a finished answer is kept. Long enough for a client that was suspended or that
    retries with growing delays."""
    resume_grace_s: Seconds = 30.0
    """How long such an answer continues without a connected client before it is aborted. A mobile
    client reconnects within some seconds; until then no client reads what the engine computes."""
