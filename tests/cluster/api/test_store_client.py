"""An ingress and the process that keeps its responses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from swell.cluster.api.http_errors import HTTPError
from swell.cluster.api.responses.response_store import Read, StoredResponse
from swell.cluster.api.responses.store_client import ResponseStoreClient
from swell.cluster.api.responses.store_service import ResponseStoreService
from swell.cluster.app import application
from swell.configs.schema import load

KEPT = StoredResponse(b"{}", b"[]")


def test_a_stored_response_is_found() -> None:
    service = ResponseStoreService(10, 1000, 60.0)
    client = ResponseStoreClient(SimpleNamespace(handle=SimpleNamespace(remote=service.handle)))
    assert asyncio.run(client.keep("r", KEPT))
    assert asyncio.run(client.found(Read("r"))).kept == KEPT


def test_without_a_store_nothing_is_stored_or_found() -> None:
    client = ResponseStoreClient(None)
    assert not asyncio.run(client.keep("r", KEPT))
    with pytest.raises(HTTPError) as caught:
        asyncio.run(client.found(Read("r")))
    assert caught.value.info.status == 404


@pytest.mark.parametrize("limit", [0, 5])
def test_the_store_is_deployed_where_responses_are_stored(limit: int) -> None:
    config = load({"model": {"path": "m"}, "serve": {"stored_responses": limit}})
    *_others, store = application(config)._bound_deployment.init_args
    assert (store is not None) == (limit > 0)
    if store is not None:
        assert store._bound_deployment.init_args[0] == limit
