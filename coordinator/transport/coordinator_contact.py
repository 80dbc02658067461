"""The addresses and keys with which a process reaches the coordinator."""

from __future__ import annotations

import msgspec

from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys


class CoordinatorContact(msgspec.Struct, frozen=True):
    """The data with which a member reaches the coordinator and the other members."""

    address: ChannelAddress
    keys: ChannelKeys
    pid: int
    name: str = ""
    """Name of its Ray actor, by which it is found again on any host."""
    namespace: str = ""
    """Namespace of the actor's name."""


class CoordinatorEndpoint(msgspec.Struct, frozen=True):
    """Socket names and keys of a coordinator; a restarted coordinator has the same."""

    keys: ChannelKeys
    name: str | None = None
    """Name of its `ipc` socket; None: any."""
    port: int = 0
    """TCP port; 0: any."""
    host: str = ""
    """The host for which name and port were chosen; empty: unknown."""

    def on_host(self, host: str) -> CoordinatorEndpoint:
        """Returns the endpoint for a coordinator on that host: on another host the port may be
        taken."""
        if self.host in ("", host):
            return self
        return msgspec.structs.replace(self, name=None, port=0)

    def is_at(self, address: ChannelAddress) -> bool:
        """Whether a process that knows only this endpoint can connect to that address."""
        return not self.host or address.tcp == f"tcp://{self.host}:{self.port}"
