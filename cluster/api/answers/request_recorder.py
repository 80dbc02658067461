"""Records each HTTP request while it runs and for a while after it has finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from swell.cluster.api.admin.live_protocol import RecentRequest
from swell.cluster.api.admin.protocol import RequestStory
from swell.cluster.api.answers.response_writer import AnswerWriter
from swell.cluster.api.bodies.timings import timings_of
from swell.cluster.api.request_context import RequestContext
from swell.cluster.api.tracing.exporter import TraceExporter
from swell.cluster.client.requests.request_history import (
    CancelStatus,
    RequestHistory,
    RequestRecord,
)
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.configs.runtime.secret import SecretText


class RequestRecorder:
    """Keeps the records of one ingress and exports them as traces when their requests finish."""

    def __init__(self, history: RequestHistory, traces: TraceExporter, ingress: int) -> None:
        """`ingress` is the `client_index` of this ingress."""
        self._history = history
        self._traces = traces
        self._ingress = ingress

    def record(
        self,
        context: RequestContext,
        processed: ProcessedRequest,
        answer: AnswerWriter,
        abort: Callable[[], bool],
        ending: ExitStack,
    ) -> RequestRecord:
        """Returns the record of a request that begins now. `abort` is as in `RequestRecord`. The
        record is closed by `ending`."""
        now_s = time.monotonic()
        came_s = context.arrived_s
        record = RequestRecord(
            id=answer.id,
            request_id=context.id,
            operation=answer.operation,
            model=answer.model,
            received_s=came_s,
            received_at=time.time() - (now_s - came_s),
            owner=context.owner,
            abort=abort,
        )
        answer.begin(record)
        self._history.begin(record)
        ending.callback(self._end, record, processed, context.trace_headers)
        return record

    def _end(
        self, record: RequestRecord, processed: ProcessedRequest, headers: Mapping[str, str]
    ) -> None:
        self._history.end(record, time.monotonic())
        if record.journeys:
            self._traces.export(record, processed, headers)

    def recent(self, limit: int) -> list[RecentRequest]:
        """Returns the newest requests of this ingress, newest first."""
        now_s = time.monotonic()
        return [_recent(record, now_s) for record in self._history.newest(limit, now_s)]

    def find(self, id: str) -> list[RequestStory]:
        """Returns the requests of this ingress that clients know by this id, oldest first."""
        return [
            RequestStory(
                id=record.id,
                request_id=record.request_id,
                operation=record.operation,
                model=record.model,
                running=record.ended_s is None,
                ingress=self._ingress,
                timings=timings_of(record),
            )
            for record in self._history.find(id, time.monotonic())
        ]

    def cancel(self, ids: Sequence[str], owner: SecretText) -> dict[str, CancelStatus]:
        """Cancels the requests of `owner` that clients know by these ids."""
        now_s = time.monotonic()
        return {id: self._history.cancel(id, owner, now_s) for id in ids}


def _recent(record: RequestRecord, now_s: float) -> RecentRequest:
    ended_s = now_s if record.ended_s is None else record.ended_s
    placements = {
        (event.attempt, event.rank): event.rank
        for journey in record.journeys
        for event in journey.events
        if event.rank is not None
    }
    return RecentRequest(
        id=record.id,
        operation=record.operation,
        model=record.model,
        received_at=record.received_at,
        duration_s=round(ended_s - record.received_s, 4),
        running=record.ended_s is None,
        ranks=list(dict.fromkeys(placements.values())),
    )
