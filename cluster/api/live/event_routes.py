"""The route `/admin/events`."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.admin.admin_routes import check_literal
from swell.cluster.api.answers.event_stream import EventStreamResponse
from swell.cluster.api.answers.sse import EVENT_HEADERS
from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.bodies.query import checked_query
from swell.cluster.api.endpoints import route
from swell.cluster.api.live.feed import MAX_READERS, LiveFeed
from swell.cluster.api.services import Services
from swell.cluster.text.errors import bad_value

EVENTS = "/admin/events"
MAX_STREAM_S = 3600
"""The longest stream of events; then the client connects again, perhaps to another ingress."""
_SECONDS = re.compile("[0-9]{1,4}")


class EventRoutes:
    """Streams what happens in the cluster: one event, or one a second for `seconds`."""

    def __init__(self, services: Services) -> None:
        self._access = services.access
        self._feed = LiveFeed(services)

    def routes(self) -> list[Route]:
        return [route(EVENTS, self._events, "GET")]

    def end_streams(self) -> None:
        """Ends the streams, because the ingress is shutting down."""
        self._feed.end()

    async def _events(self, request: Request) -> EventStreamResponse | Response:
        check_literal(request, EVENTS)
        self._access.check_admin(request)
        given = checked_query(request, "seconds").get("seconds", "0")
        if not _SECONDS.fullmatch(given) or int(given) > MAX_STREAM_S:
            raise bad_value("seconds", given, f"must be an integer between 0 and {MAX_STREAM_S}")
        if self._feed.is_full:
            raise HTTPError(
                503,
                f"{MAX_READERS} clients already read the events of this ingress; close one of them",
                "too_many_readers",
                RETRY_AFTER,
            )
        if request.method == "HEAD":
            return Response(headers=EVENT_HEADERS)
        self._feed.open()
        return EventStreamResponse(self._feed.events(float(given)), {}, self._feed.close)
