"""How a process reaches the coordinator."""

from __future__ import annotations

import msgspec

from swell.coordinator.channel import ChannelAddress, ChannelKeys


class CoordinatorContact(msgspec.Struct, frozen=True):
    """What a member needs to talk to the coordinator and to the other members."""

    address: ChannelAddress
    keys: ChannelKeys
    pid: int
