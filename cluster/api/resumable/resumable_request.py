"""Reads the headers of a resumable request: its key and its last event. Derives the name of its
answer. Pure."""

from __future__ import annotations

import hashlib
import re

import msgspec
from starlette.requests import Request

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.resumable.event_id import LAST_EVENT_ID, EventId, parse_event_id
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.exact_numbers import encode_json
from swell.cluster.text.params.sampling_params import SEED_BITS
from swell.cluster.text.schema.request_body import RequestBody
from swell.configs.error_text import shown

IDEMPOTENCY_KEY = "idempotency-key"
MAX_KEY_CHARS = 255
_KEY = re.compile(rf"[!-~]([ -~]{{0,{MAX_KEY_CHARS - 2}}}[!-~])?\Z")


class ResumableHeaders(msgspec.Struct, frozen=True):
    key: str
    last_event: EventId | None
    """The last event that the client has; None: the client has none."""


def read_headers(request: Request) -> ResumableHeaders | None:
    """Returns the headers; None: the answer is not resumable. Raises BadRequest."""
    key = request.headers.get(IDEMPOTENCY_KEY)
    last = request.headers.get(LAST_EVENT_ID) or None
    if key is None and last is None:
        return None
    if key is None:
        raise BadRequest(
            f"the header {LAST_EVENT_ID}={shown(last)} continues an answer that was requested "
            f"with the header {IDEMPOTENCY_KEY}; send that header too, with the same body",
            IDEMPOTENCY_KEY,
            "missing_idempotency_key",
        )
    if not _KEY.match(key):
        raise BadRequest(
            f"the header {IDEMPOTENCY_KEY}={shown(key)} must be 1 to {MAX_KEY_CHARS} visible "
            "ASCII characters; use a new UUID for each answer",
            IDEMPOTENCY_KEY,
            "invalid_idempotency_key",
        )
    return ResumableHeaders(key, None if last is None else parse_event_id(last))


def answer_name(owner: str, path: str, key: str, body: RequestBody) -> str:
    """Returns a digest of the request. It covers the decoded body, so white space and the order of
    fields do not matter. Every ingress computes the same name for an answer, and derives the same
    ids and seed from it."""
    parts = [owner.encode(), path.encode(), key.encode(), encode_json(body)]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()


def seed_of(name: str) -> int:
    """Returns the seed of a request that does not set one."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"seed")
    return int.from_bytes(digest.digest(), "big") & ((1 << SEED_BITS) - 1)


def check_same_answer(sent: ResumableHeaders, name: str, known: str | None) -> None:
    """Checks that a key is used for only one request. `name` is the digest of the request; `known`
    is that of the answer that the key has here. Raises HTTPError 422."""
    if known is not None and known != name:
        raise HTTPError(
            422,
            f"{IDEMPOTENCY_KEY}={shown(sent.key)} was used for another request: a repeated request "
            "must have the same path and body; send another key",
            "idempotency_key_reused",
        )
    if sent.last_event is not None and sent.last_event.origin.name != name:
        raise HTTPError(
            422,
            f"{LAST_EVENT_ID} belongs to another answer: a request that continues an answer must "
            f"have the same {IDEMPOTENCY_KEY}, API key, path and body as the request that started "
            "it",
            "event_of_another_answer",
        )
