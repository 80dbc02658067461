"""Tests of channels run over ZeroMQ and over the simulated network."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from swell.coordinator.transport.channel import DEFAULT_SILENCE_S, ChannelAddress
from tests.simulator.channel_worlds import ChannelWorld, Seen, SimWorld, ZmqWorld


@pytest.fixture
def silence_s() -> float:
    """After which a connection is taken for dead."""
    return DEFAULT_SILENCE_S


@pytest.fixture(params=[pytest.param(ZmqWorld, marks=pytest.mark.slow), SimWorld])
def world(request: Any, silence_s: float) -> ChannelWorld:
    made: ChannelWorld = request.param(silence_s)
    return made


@pytest.fixture(params=["near", "far"])
def seen(request: Any) -> Seen:
    """The address of an inbox as a peer of the same machine, or of another one, sees it."""
    near = request.param == "near"

    def seen(address: ChannelAddress) -> ChannelAddress:
        return address if near else msgspec.structs.replace(address, machine="another")

    return seen
