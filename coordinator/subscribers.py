"""The ingresses that receive the coordinator's publications. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Iterator

from swell.coordinator.transport.listening_clock import ListeningClock

_TIMEOUT_HEARTBEATS = 5
"""Number of heartbeats after which a silent ingress is removed."""


class Subscribers:
    """The subscribed ingresses, identified by their channel identities."""

    def __init__(self, heartbeat_s: float) -> None:
        self._silence_s = _TIMEOUT_HEARTBEATS * heartbeat_s
        self._clock = ListeningClock(self._silence_s)
        self._heard_at: dict[bytes, float] = {}
        self._versions: dict[bytes, list[str]] = {}

    @property
    def versions(self) -> list[str]:
        """Versions of engines that at least one ingress needs to finish its answers."""
        return sorted({version for versions in self._versions.values() for version in versions})

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._heard_at)

    def on_message(self, peer: bytes, now: float, versions: list[str] | None = None) -> bool:
        """Records the subscription of an ingress, or its repetition, and the versions that it
        needs; None: unchanged. Returns whether the ingress is new."""
        if versions is not None:
            self._versions[peer] = versions
        is_new = peer not in self._heard_at
        self._heard_at[peer] = self._clock.read(now)
        return is_new

    def forget_silent(self, now: float) -> None:
        """Removes silent ingresses. Call it after all received messages have been handled."""
        limit = self._clock.advance(now) - self._silence_s
        self._heard_at = {peer: at for peer, at in self._heard_at.items() if at > limit}
        self._versions = {
            peer: self._versions[peer] for peer in self._heard_at.keys() & self._versions
        }
