"""The id of an event of a resumable stream.

    9f2c61...b7.1795440012-69fd...f2.3-0f3a91c2d4e5.17
    │           │          │         │              └ number of events up to this one
    │           │          │         └ version of the weights; empty: unknown
    │           │          └ digest of the adapter, if any
    │           └ when the answer was created
    └ digest of caller, key and request: the answer

Together with the request, the id is all that another ingress needs to continue the answer: the
tokens follow from the request, the version and the adapter, and the events follow from the tokens.
Pure.
"""

from __future__ import annotations

import re

import msgspec

from swell.cluster.text.errors import BadRequest
from swell.configs.error_text import shown

LAST_EVENT_ID = "last-event-id"
MAX_VERSION_CHARS = 128
_FORM = re.compile(
    r"([0-9a-f]{32})\.([0-9]{1,11})(?:-([0-9a-f]{32}))?"
    rf"\.([!-~]{{0,{MAX_VERSION_CHARS}}})\.([0-9]{{1,9}})\Z"
)


class AnswerOrigin(msgspec.Struct, frozen=True):
    """Identifies an answer. Answers with the same origin have the same events."""

    name: str
    created: int
    version: str
    adapter: str = ""
    """The digest of the adapter; empty: the answer is computed without an adapter."""

    def event_prefix(self) -> str:
        """Returns the id of an event without its number."""
        adapter = self.adapter and f"-{self.adapter}"
        return f"{self.name}.{self.created}{adapter}.{self.version}."


class EventId(msgspec.Struct, frozen=True):
    origin: AnswerOrigin
    number: int
    """The number of this event; the first event is 1."""


def parse_event_id(text: str) -> EventId:
    """Parses a `last-event-id`. Raises BadRequest."""
    found = _FORM.match(text)
    if found is None:
        raise BadRequest(
            f"the header {LAST_EVENT_ID}={shown(text)} is not an event id of this server; send "
            "the id of the last event that you received, or leave out the header to get the whole "
            "answer",
            LAST_EVENT_ID,
            "invalid_event_id",
        )
    name, created, adapter, version, number = found.groups(default="")
    return EventId(AnswerOrigin(name, int(created), version, adapter), int(number))
