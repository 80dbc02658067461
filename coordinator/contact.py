"""How a process reaches the coordinator."""

from __future__ import annotations

import msgspec

from swell.coordinator.channel import ChannelAddress, ChannelKeys


class CoordinatorContact(msgspec.Struct, frozen=True):
    """How a member reaches the coordinator and the other members."""

    address: ChannelAddress
    keys: ChannelKeys
    pid: int
    name: str = ""
    """Of its actor, by which it is found again wherever it has moved."""
    namespace: str = ""
    """Of its actor's name."""


class CoordinatorEndpoint(msgspec.Struct, frozen=True):
    """Where a coordinator is found, and with which keys; its successor has the same."""

    keys: ChannelKeys
    name: str | None = None
    """Of its `ipc` socket; None: any."""
    port: int = 0
    """0: any."""
    host: str = ""
    """For which name and port were chosen; empty: unknown."""

    def on_host(self, host: str) -> CoordinatorEndpoint:
        """For a coordinator on that host: on another one than ours the port may be taken."""
        if self.host in ("", host):
            return self
        return msgspec.structs.replace(self, name=None, port=0)

    def is_at(self, address: ChannelAddress) -> bool:
        """Whether who knows this endpoint alone finds that address."""
        return not self.host or address.tcp == f"tcp://{self.host}:{self.port}"
