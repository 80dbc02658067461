"""HTTP requests that run or finished recently, with the events of each. Pure."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from swell.cluster.client.requests.journey import Journey
from swell.configs.runtime.secret import SecretText

MAX_FOUND = 20
"""Records that `find` returns at most: a client may reuse an id any number of times."""


class CancelStatus(enum.StrEnum):
    """The result of a cancel for the requests with one id."""

    CANCELLED = "cancelled"
    FINISHED = "finished"
    """All requests with the id had finished before."""
    NOT_FOUND = "not_found"
    """No ingress knows the id, or it belongs to another user."""
    UNKNOWN = "unknown"
    """An ingress that may know the id did not answer."""


@dataclass(slots=True, eq=False, repr=False)
class RequestRecord:
    """One HTTP request. The record contains no part of the prompt or of the answer."""

    id: str
    """The id of the response, as the client gets it."""
    request_id: str
    """The id in the `x-request-id` header."""
    operation: str
    """`chat` or `text_completion`, as OpenTelemetry names them."""
    model: str
    received_s: float
    """The time on the clock of the ingress; `received_at` is the same moment in seconds since
    1970."""
    received_at: float
    journeys: list[Journey] = field(default_factory=list)
    """The journeys of its engine requests: one for each answer that is sampled."""
    ended_s: float | None = None
    """The time on the clock of the ingress; None while the request runs."""
    owner: SecretText = ""
    """The name of the user's key."""
    abort: Callable[[], bool] | None = None
    """Ends the answers that have not finished; returns whether there were any. None once the
    request has ended."""
    is_cancelled: bool = False

    def cancel(self) -> bool:
        """Ends the answers that have not finished. Returns whether there were any, now or at an
        earlier call."""
        self.is_cancelled = self.is_cancelled or (self.abort is not None and self.abort())
        return self.is_cancelled

    def end(self, now_s: float) -> None:
        self.ended_s, self.abort = now_s, None


class RequestHistory:
    """Finds records by the ids that clients know. Finished records are kept for `limit_s`; if they
    have more than `limit` answers in total, the oldest are dropped first."""

    def __init__(self, limit: int, limit_s: float) -> None:
        self._limit = limit
        self._limit_s = limit_s
        self._by_id: dict[str, list[RequestRecord]] = {}
        self._ended: deque[RequestRecord] = deque()
        self._num_ended = 0

    def __len__(self) -> int:
        """Number of ids that can be found."""
        return len(self._by_id)

    def begin(self, record: RequestRecord) -> None:
        for id in {record.id, record.request_id}:
            records = self._by_id.pop(id, [])  # the newest id is the last one
            self._by_id[id] = records
            records.append(record)

    def end(self, record: RequestRecord, now_s: float) -> None:
        record.end(now_s)
        self._ended.append(record)
        self._num_ended += _num_answers(record)
        self._expire(now_s)

    def find(self, id: str, now_s: float) -> list[RequestRecord]:
        """Returns the newest requests with this id, oldest first."""
        self._expire(now_s)
        return self._by_id.get(id, [])[-MAX_FOUND:]

    def cancel(self, id: str, owner: SecretText, now_s: float) -> CancelStatus:
        """Cancels all requests of `owner` with this id."""
        self._expire(now_s)
        status = CancelStatus.NOT_FOUND
        for record in [one for one in self._by_id.get(id, ()) if one.owner == owner]:
            if status is CancelStatus.NOT_FOUND:
                status = CancelStatus.FINISHED
            if record.cancel():
                status = CancelStatus.CANCELLED
        return status

    def newest(self, limit: int, now_s: float) -> list[RequestRecord]:
        """Returns the newest requests, newest first: those that run, and those that finished."""
        self._expire(now_s)
        records = itertools.islice(_unique(reversed(self._by_id.values())), limit)
        return sorted(records, key=lambda record: -record.received_s)

    def _expire(self, now_s: float) -> None:
        ended = self._ended
        while ended and (self._num_ended > self._limit or self._is_old(ended[0], now_s)):
            record = ended.popleft()
            self._num_ended -= _num_answers(record)
            for id in {record.id, record.request_id}:
                records = self._by_id[id]
                records.remove(record)
                if not records:
                    del self._by_id[id]

    def _is_old(self, record: RequestRecord, now_s: float) -> bool:
        return record.ended_s is not None and now_s - record.ended_s > self._limit_s


def _num_answers(record: RequestRecord) -> int:
    """Counts a request that failed before it had any engine request as one answer."""
    return max(1, len(record.journeys))


def _unique(groups: Iterable[list[RequestRecord]]) -> Iterator[RequestRecord]:
    """Yields each record once, although it is known by two ids."""
    seen: set[int] = set()
    for records in groups:
        for record in reversed(records):
            if id(record) not in seen:
                seen.add(id(record))
                yield record
