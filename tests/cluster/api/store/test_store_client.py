"""The client with which an ingress calls the process that stores its responses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.responses.response_client import ResponseStoreClient
from swell.cluster.api.store.response_store import Read, StoredResponse
from swell.cluster.api.store.store_service import StoreService
from swell.cluster.app import application
from swell.configs.schema import load
from swell.configs.serve import ServeConfig

KEPT = StoredResponse(b"{}", b"[]")


def test_a_stored_response_is_found() -> None:
    service = StoreService(ServeConfig(stored_responses=10, stored_response_bytes=1000))
    client = ResponseStoreClient(SimpleNamespace(handle=SimpleNamespace(remote=service.handle)))
    assert asyncio.run(client.keep("r", KEPT))
    assert asyncio.run(client.found(Read("r"))).kept == KEPT


def test_without_a_store_nothing_is_stored_or_found() -> None:
    client = ResponseStoreClient(None)
    assert not asyncio.run(client.keep("r", KEPT))
    with pytest.raises(HTTPError) as caught:
        asyncio.run(client.found(Read("r")))
    assert caught.value.info.status == 404


@pytest.mark.parametrize("responses", [0, 5])
@pytest.mark.parametrize("sessions", [0, 7])
def test_the_store_is_deployed_where_something_is_stored(responses: int, sessions: int) -> None:
    serve = {"stored_responses": responses, "sessions": sessions}
    config = load({"model": {"path": "m"}, "serve": serve})
    *_others, store = application(config)._bound_deployment.init_args
    assert (store is not None) == (responses + sessions > 0)
    if store is not None:
        limits, _stall_timeout_s = store._bound_deployment.init_args
        assert (limits.stored_responses, limits.sessions) == (responses, sessions)
