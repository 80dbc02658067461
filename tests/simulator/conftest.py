"""Tests of channels run over ZeroMQ and over the simulated network."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from swell.coordinator.channel import ChannelAddress
from tests.simulator.channel_worlds import ChannelWorld, Seen, SimWorld, ZmqWorld


@pytest.fixture
def heartbeats() -> None:
    """None are sent, unless a test says so."""


@pytest.fixture(params=[pytest.param(ZmqWorld, marks=pytest.mark.slow), SimWorld])
def world(request: Any, heartbeats: tuple[float, float] | None) -> ChannelWorld:
    made: ChannelWorld = request.param(heartbeats)
    return made


@pytest.fixture(params=["near", "far"])
def seen(request: Any) -> Seen:
    """The address of an inbox as a peer of the same machine, or of another one, sees it."""
    near = request.param == "near"

    def seen(address: ChannelAddress) -> ChannelAddress:
        return address if near else msgspec.structs.replace(address, machine="another")

    return seen
