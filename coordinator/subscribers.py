"""The ingresses that want what the coordinator publishes: pure, with time as an argument."""

from __future__ import annotations

from collections.abc import Iterator

from swell.coordinator.listening_clock import ListeningClock

_TIMEOUT_HEARTBEATS = 5
"""Heartbeats after which a silent ingress is sent nothing more."""


class Subscribers:
    """By the channel's identity of their connections."""

    def __init__(self, heartbeat_s: float) -> None:
        self._silence_s = _TIMEOUT_HEARTBEATS * heartbeat_s
        self._clock = ListeningClock(self._silence_s)
        self._heard_at: dict[bytes, float] = {}
        self._versions: dict[bytes, list[str]] = {}

    @property
    def versions(self) -> list[str]:
        """Versions of engines that one of them needs to finish its answers."""
        return sorted({version for versions in self._versions.values() for version in versions})

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._heard_at)

    def on_message(self, peer: bytes, now: float, versions: list[str] | None = None) -> bool:
        """An ingress subscribes, or does so again, and needs these versions; None: those of before.
        Whether it is new."""
        if versions is not None:
            self._versions[peer] = versions
        is_new = peer not in self._heard_at
        self._heard_at[peer] = self._clock.read(now)
        return is_new

    def forget_silent(self, now: float) -> None:
        """Every message that was there has been taken in."""
        limit = self._clock.advance(now) - self._silence_s
        self._heard_at = {peer: at for peer, at in self._heard_at.items() if at > limit}
        self._versions = {
            peer: self._versions[peer] for peer in self._heard_at.keys() & self._versions
        }
