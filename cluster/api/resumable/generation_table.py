"""The answers that one ingress keeps, within its limits, for clients that may come back.

Invariant: keeping an answer only saves work. If its events were dropped, the answer is computed
again with the same events. Therefore, if space runs out, finished answers are removed, the oldest
first, and those that a client is reading last. Running answers stay: if only these are left, a new
answer is refused, and the older half of the events of the largest one is dropped. Pure: time is an
argument.
"""

from __future__ import annotations

from collections.abc import Iterator

from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.resumable.generation import Generation
from swell.configs.resumable import ResumableLimits


class GenerationTable:
    """The answers by caller and key."""

    def __init__(self, limits: ResumableLimits) -> None:
        self._limits = limits
        self._kept: dict[tuple[str, str], Generation] = {}
        """The answers, oldest first."""
        self._ended_s: dict[tuple[str, str], float] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._kept.values())

    def find(self, owner: str, key: str, now_s: float) -> Generation | None:
        self.expire(now_s)
        return self._kept.get((owner, key))

    def add(self, generation: Generation, now_s: float) -> None:
        """Adds an answer, and replaces one with the same key. Raises HTTPError."""
        self.expire(now_s)
        limits, owner = self._limits, generation.owner
        if (before := self._kept.get((owner, generation.key))) is not None:
            self.remove(before)
        own = [one for one in self if one.owner == owner]
        if owner and len(own) >= limits.resumable_answers_per_key:
            limit = f"serve.resumable_answers_per_key={limits.resumable_answers_per_key}"
            self._make_place(own, 429, f"of this API key are running ({limit})")
        if len(self) >= limits.resumable_answers:
            limit = f"serve.resumable_answers={limits.resumable_answers}"
            self._make_place([*self], 503, f"of this server are running ({limit})")
        self._kept[owner, generation.key] = generation
        self.size_bytes += generation.size_bytes

    def _make_place(self, among: list[Generation], status: int, full: str) -> None:
        unread = next((one for one in among if not one.is_running and not one.readers), None)
        if unread is None:
            raise HTTPError(
                status,
                f"{len(among)} resumable answers {full}; try again later, or leave out "
                "idempotency-key",
                "too_many_resumable_answers",
                RETRY_AFTER,
            )
        self.remove(unread)

    def holds(self, generation: Generation) -> bool:
        return self._kept.get((generation.owner, generation.key)) is generation

    def grew(self, generation: Generation, size_bytes: int) -> None:
        """Counts new events of a running answer, as long as it is kept, and makes room if
        necessary."""
        if not self.holds(generation):
            return
        self.size_bytes += size_bytes
        while self.size_bytes > self._limits.resumable_bytes:
            over = [one for one in self if not one.is_running]
            if over:  # their current readers still get all events
                self.remove(min(over, key=lambda one: one.readers > 0))
            else:
                self.size_bytes -= max(self, key=lambda one: one.size_bytes).drop_half()

    def ended(self, generation: Generation, now_s: float) -> None:
        if self.holds(generation):
            self._ended_s[generation.owner, generation.key] = now_s

    def remove(self, generation: Generation) -> None:
        if self.holds(generation):
            del self._kept[generation.owner, generation.key]
            self._ended_s.pop((generation.owner, generation.key), None)
            self.size_bytes -= generation.size_bytes

    def expire(self, now_s: float) -> None:
        """Removes the answers that finished more than `resumable_age_s` ago; `_ended_s` is in order
        of their finish."""
        for place, ended_s in list(self._ended_s.items()):
            if now_s - ended_s <= self._limits.resumable_age_s:
                return
            self.remove(self._kept[place])
