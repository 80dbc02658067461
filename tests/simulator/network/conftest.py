"""Fixtures that run tests of channels over ZeroMQ and over the simulated network."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from swell.coordinator.transport.channel import DEFAULT_SILENCE_S, ChannelAddress
from tests.simulator.network.channel_worlds import ChannelWorld, Seen, SimWorld, ZmqWorld


@pytest.fixture
def silence_s() -> float:
    """Returns the time without data after which a connection counts as dead."""
    return DEFAULT_SILENCE_S


@pytest.fixture(params=[pytest.param(ZmqWorld, marks=pytest.mark.slow), SimWorld])
def world(request: Any, silence_s: float) -> ChannelWorld:
    made: ChannelWorld = request.param(silence_s)
    return made


@pytest.fixture(params=["near", "far"])
def seen(request: Any) -> Seen:
    """Returns the address of an inbox as a peer on the same machine, or on another one, sees it."""
    near = request.param == "near"

    def seen(address: ChannelAddress) -> ChannelAddress:
        return address if near else msgspec.structs.replace(address, machine="another")

    return seen
