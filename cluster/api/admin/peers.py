"""The other ingresses, which share the port: any of them may have served a request."""

from __future__ import annotations

from typing import Protocol

from swell.cluster.api.admin.protocol import RequestStory


class PeerStories(Protocol):
    """How an ingress asks all others."""

    async def find(self, id: str, asking: int) -> tuple[list[RequestStory], bool]:
        """The stories that other ingresses than number `asking` have under an id, and whether all
        of them answered. It ends in some seconds, and raises nothing."""


class NoPeers:
    """There is one ingress."""

    async def find(self, id: str, asking: int) -> tuple[list[RequestStory], bool]:
        return [], True
