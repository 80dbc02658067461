"""The context of an HTTP request names an owner only after the key was checked."""

from __future__ import annotations

import asyncio

import pytest
from starlette.datastructures import Headers

from swell.cluster.api.request_context import RequestContext, detached_context


def test_a_request_without_a_checked_key_names_no_owner() -> None:
    """Otherwise a route that forgets the check would serve it as the user without a key."""

    async def scenario() -> RequestContext:
        return detached_context(Headers(), "/v1/models", "")

    authorized = asyncio.run(scenario())
    assert (authorized.owner, authorized.detached().owner) == ("", "")
    arrived = RequestContext(
        id="r", path="/v1/models", arrived_s=0.0, trace_headers={}, receive=authorized.receive
    )
    with pytest.raises(AssertionError, match="/v1/models: the key was not checked"):
        _ = arrived.owner
