"""The other ingresses, which share the port. Any of them may have served a request."""

from __future__ import annotations

from typing import Protocol

from swell.cluster.api.admin.protocol import RequestStory


class PeerStories(Protocol):
    """Searches all other ingresses for a request."""

    async def find(self, id: str, asking: int) -> tuple[list[RequestStory], bool]:
        """Returns the stories that the ingresses other than number `asking` have under an id, and
        whether all of them answered. It returns within seconds and raises nothing."""


class NoPeers:
    """The case of a single ingress."""

    async def find(self, id: str, asking: int) -> tuple[list[RequestStory], bool]:
        return [], True
