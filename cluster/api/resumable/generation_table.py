"""The answers that one ingress keeps, within its limits, for clients that may come back.

Invariant: keeping an answer only saves work. If its events were dropped, the answer is computed
again with the same events. Therefore, if other answers leave too little room for the events of the
running ones, the older half of the events of the largest one is dropped. Pure: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator

from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.resumable.generation import Generation
from swell.cluster.api.store.bounded_table import Bound, BoundedTable, TableKey, TableLimits
from swell.configs.serve import ResumableLimits


class GenerationTable:
    """The answers. An answer is in use while it runs or a client reads it."""

    def __init__(self, limits: ResumableLimits) -> None:
        self._limits = limits
        self._kept = BoundedTable[Generation](
            TableLimits(
                limits.resumable_answers,
                limits.resumable_bytes,
                limits.resumable_age_s,
                limits.resumable_answers_per_key,
            )
        )

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Generation]:
        return (generation for _key, generation in self._kept.items())

    @property
    def size_bytes(self) -> int:
        return self._kept.size_bytes

    def find(self, key: TableKey, now_s: float) -> Generation | None:
        self._kept.expire(now_s)
        return self._kept.get(key)

    def holds(self, generation: Generation) -> bool:
        return self._kept.get(generation.key) is generation

    def add(self, generation: Generation, now_s: float) -> None:
        """Adds an answer, and replaces one with the same key. Raises HTTPError."""
        self._kept.expire(now_s)
        refused = self._kept.make_room(generation.key, generation.size_bytes)
        if refused is Bound.OWNER:
            raise _full(429, "this API key", "_per_key", self._limits.resumable_answers_per_key)
        if refused is not None:
            raise _full(503, "this server", "", self._limits.resumable_answers)
        self._kept.put(generation.key, generation, now_s)

    def grew(self, generation: Generation) -> None:
        """Counts new events of a running answer, as long as it is kept, and makes room if
        necessary."""
        if not self.holds(generation):
            return
        self._kept.resize(generation.key)
        while not self._kept.trim():
            finished = next((one for one in self if not one.is_running), None)
            if finished is not None:  # its current readers still get all events
                self._kept.remove(finished.key)
            else:
                largest = max(self, key=lambda one: one.size_bytes)
                largest.drop_half()
                self._kept.resize(largest.key)

    def ended(self, generation: Generation, now_s: float) -> None:
        if self.holds(generation):
            self._kept.renew(generation.key, now_s)

    def remove(self, generation: Generation) -> None:
        if self.holds(generation):
            self._kept.remove(generation.key)

    def expire(self, now_s: float) -> None:
        self._kept.expire(now_s)


def _full(status: int, whose: str, suffix: str, limit: int) -> HTTPError:
    return HTTPError(
        status,
        f"{limit} resumable answers of {whose} are running (serve.resumable_answers{suffix}="
        f"{limit}); try again later, or leave out idempotency-key",
        "too_many_resumable_answers",
        RETRY_AFTER,
    )
