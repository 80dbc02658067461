"""The additions of the adapter `RayCluster` to the real Ray. No Ray runs here."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    RayError,
    RayTaskError,
)
from ray.experimental import internal_kv

from swell.cluster.control.ray import ray_cluster
from swell.cluster.control.ray.actor_errors import (
    ActorDied,
    ActorError,
    ActorRaised,
    ActorUnavailable,
    GcsUnavailable,
)
from swell.cluster.control.ray.ray_cluster import RayCluster, _translate


def raised(cause: Exception) -> RayError:
    """Returns the error as a caller gets it: an instance of both Ray's error and the cause's
    type."""
    error = RayTaskError("method", "a traceback", cause).as_instanceof_cause()
    assert isinstance(error, RayError)
    return error


def test_errors_of_ray_are_converted() -> None:
    assert type(_translate(ActorDiedError())) is ActorDied
    assert type(_translate(ActorUnavailableError("away", None))) is ActorUnavailable
    assert type(_translate(ObjectLostError("00", None, ""))) is ActorError
    assert type(_translate(raised(ValueError("bad")))) is ActorRaised


def test_the_cause_is_the_first_raised_error() -> None:
    """The start of an engine fails with the error that its worker raised, or with its worker's
    death."""
    for inner in (ValueError("bad"), raised(ValueError("bad"))):
        error = _translate(raised(inner))
        assert isinstance(error, ActorRaised)
        assert type(error.cause) is ValueError and str(error) == "bad"
    error = _translate(raised(ActorDiedError()))
    assert isinstance(error, ActorRaised) and type(error.cause) is ActorDied


def test_a_write_that_timed_out_comes_before_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a late write would overwrite a newer value."""
    answers, written = threading.Event(), []

    def put(_key: bytes, value: bytes, _overwrite: bool, *, namespace: bytes) -> bool:
        assert namespace == b"swell"
        if value == b"1":
            answers.wait(10)
            time.sleep(0.1)
        written.append(value)
        return True

    async def scenario() -> None:
        ray = RayCluster()
        for value in (b"1", b"2"):
            with pytest.raises(GcsUnavailable):
                await ray.kv_put(b"key", value)
        answers.set()
        monkeypatch.setattr(ray_cluster, "_GCS_TIMEOUT_S", 10.0)
        await ray.kv_put(b"key", b"3")

    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(ray_cluster, "_GCS_TIMEOUT_S", 0.05)
    asyncio.run(scenario())
    assert written in ([b"1", b"3"], [b"1", b"2", b"3"])
