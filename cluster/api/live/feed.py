"""Observes the cluster while there are readers, and sends what it finds to all readers.

One task observes for all of them, while a stream is open and for `LINGER_S` after the last one, so
that a client that asks for one event at a time has rates and a log, too. The time between two
observations is at least `1 / MAX_SHARE` times the processor time of one, so that an open page never
costs an ingress more than this share of a core.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import msgspec

from swell.cluster.api.admin.live_protocol import (
    LiveEngine,
    LiveEvent,
    LiveRates,
    LiveWorker,
    LogEntry,
)
from swell.cluster.api.admin.protocol import ClusterState
from swell.cluster.api.answers.sse import PING
from swell.cluster.api.live.cluster_events import (
    Observation,
    coordinator_answers,
    happened,
    rates_between,
)
from swell.cluster.api.services import Services
from swell.coordinator.wire import ClusterView, Counts, EngineReport

INTERVAL_S = 1.0
LINGER_S = 60.0
MAX_SHARE = 0.01
MAX_READERS = 16
MAX_SAMPLES = 3600
MAX_LOG = 300
_MAX_REQUESTS = 20
_PATIENCE_S = 10.0
"""A reader that has received nothing for this long gets a comment."""
_MANAGER_TIMEOUT_S = 5.0
"""The timeout of a call of the manager: longer than the manager itself waits for a coordinator."""
_MOVED = "swell_resubmitted_requests"
_log = logging.getLogger("swell.api")


class LiveFeed:
    """The observations of one ingress."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._rates: deque[LiveRates] = deque(maxlen=MAX_SAMPLES)
        self._log: deque[LogEntry] = deque(maxlen=MAX_LOG)
        self._event: LiveEvent | None = None
        """The newest event, with what is new since the one before."""
        self._encoded = b""
        self._number = 0
        """Counts the events."""
        self._last: tuple[float, Counts, Observation] | None = None
        """Time and result of the observation before."""
        self._manager = _ManagerPoll(services.manager)
        self._readers = 0
        self._unread_since_s = 0.0
        """The time at which the last reader left."""
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._has_ended = False

    @property
    def is_full(self) -> bool:
        return self._readers >= MAX_READERS

    def open(self) -> None:
        """Counts a reader, who calls `close` at the end."""
        self._readers += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._observe())

    def close(self) -> None:
        self._readers -= 1
        self._unread_since_s = time.monotonic()
        if self._has_ended:
            self._stop_observing()

    def end(self) -> None:
        """Ends all streams, because the ingress is shutting down."""
        self._has_ended = True
        self._wake_readers()
        self._stop_observing()

    def _stop_observing(self) -> None:
        if not self._readers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._manager.close()

    def _is_needed(self) -> bool:
        return self._readers > 0 or time.monotonic() < self._unread_since_s + LINGER_S

    async def events(self, limit_s: float) -> AsyncGenerator[bytes]:
        """Yields an event for each observation, at least one, for `limit_s`. The caller has opened
        the feed."""
        end_s = time.monotonic() + limit_s
        await self._wait_after(self._number, _PATIENCE_S)
        yield self._whole()
        seen = self._number
        while not self._has_ended and (left_s := end_s - time.monotonic()) > 0:
            await self._wait_after(seen, min(left_s, _PATIENCE_S))
            event = self._after(seen)
            seen = self._number
            yield event

    async def _wait_after(self, seen: int, limit_s: float) -> None:
        """Waits for an event after number `seen`, or for the end of all streams."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._number == seen and not self._has_ended:
                    await self._changed.wait()

    def _after(self, seen: int) -> bytes:
        """Returns what a reader of event `seen` gets next. A reader that is too slow for each event
        gets the whole state again."""
        if self._number == seen:
            return PING
        return self._encoded if self._number == seen + 1 else self._whole()

    def _wake_readers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _whole(self) -> bytes:
        """Returns the newest event with everything that is kept; a comment if there is none."""
        if self._event is None:
            return PING
        rates, log = list(self._rates), list(self._log)
        return _encode(msgspec.structs.replace(self._event, rates=rates, log=log))

    async def _observe(self) -> None:
        while self._is_needed():
            due_s = time.monotonic() + INTERVAL_S
            await self._manager.refresh(INTERVAL_S)
            began_s = time.thread_time()
            try:
                self._add()
            except Exception:
                _log.exception("this observation of the cluster is left out of /admin/events")
            work_s = time.thread_time() - began_s
            self._wake_readers()
            await asyncio.sleep(max(due_s - time.monotonic(), work_s / MAX_SHARE))
        self._task = None
        self._manager.close()

    def _add(self) -> None:
        """Makes the next event."""
        manager = self._manager
        services, now_s, at = self._services, time.monotonic(), time.time()
        view, counts = services.llm.view, services.metrics.totals()
        ready = services.llm.check_ready()
        observed = Observation(
            roster=view.roster,
            reports=tuple(view.reports.engines),
            cluster=manager.newest,
            manager_answers=manager.error is None,
            coordinator_answers=coordinator_answers(
                manager.newest if manager.error is None else None,
                self._last[2].coordinator_answers if self._last else True,
                is_silent=ready.coordinator_silent,
            ),
            moved_requests=int(sum(counts.get(_MOVED, []))),
        )
        rates: list[LiveRates] = []
        log: list[LogEntry] = []
        if self._last is not None:
            then_s, before, earlier = self._last
            rates = [rates_between(before, counts, at, now_s - then_s, view.reports.engines)]
            log = [LogEntry(at=at, kind=k, text=text) for k, text in happened(earlier, observed)]
        self._last = now_s, counts, observed
        self._rates += rates
        self._log += log
        self._event = LiveEvent(
            at=at,
            ingress=services.llm.client_index,
            cluster=manager.newest,
            cluster_at=manager.at,
            manager_error=manager.error,
            coordinator_answers=observed.coordinator_answers,
            not_ready=ready.reason or None,
            engines=_engines(view),
            rates=rates,
            log=log,
            requests=services.recorder.recent(_MAX_REQUESTS),
        )
        self._encoded = _encode(self._event)
        self._number += 1


class _ManagerPoll:
    """Polls the manager for the state of the cluster, and keeps the newest answer. Not more than
    one call is in progress."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._call: asyncio.Task[ClusterState] | None = None
        self.newest: ClusterState | None = None
        """None: there was no answer yet."""
        self.at: float | None = None
        """The time of that answer, in seconds since 1970."""
        self.error: str | None = None
        """Why the last call failed."""

    async def refresh(self, wait_s: float) -> None:
        """Asks the manager, unless it is being asked, and waits for the answer, `wait_s` at
        most."""
        if self._call is None:
            self._call = asyncio.get_running_loop().create_task(self._ask())
        if (await asyncio.wait({self._call}, timeout=wait_s))[0]:
            call, self._call = self._call, None
            self._take(call)

    def close(self) -> None:
        """Ends a call in progress."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def _ask(self) -> ClusterState:
        async with asyncio.timeout(_MANAGER_TIMEOUT_S):
            answer = await self._manager.describe.remote()
        return msgspec.convert(msgspec.to_builtins(answer), ClusterState)

    def _take(self, call: asyncio.Task[ClusterState]) -> None:
        try:
            self.newest, self.at, self.error = call.result(), time.time(), None
        except TimeoutError:
            self.error = f"no answer within {_MANAGER_TIMEOUT_S:g} s"
        except Exception as error:  # any error of the call
            self.error = f"{type(error).__name__}: {error}"


def _encode(event: LiveEvent) -> bytes:
    try:
        text = msgspec.json.encode(event)
    except UnicodeEncodeError:  # an error with a path whose bytes are not UTF-8
        text = json.dumps(msgspec.to_builtins(event)).encode()
    return b"event: state\ndata: " + text + b"\n\n"


def _engines(view: ClusterView) -> list[LiveEngine]:
    reports = {report.rank: report for report in view.reports.engines}
    return [
        LiveEngine(
            rank=member.rank,
            state=str(member.state),
            running=report.running,
            waiting=report.waiting,
            kv_usage=round(report.kv_usage, 4),
            steps=report.steps,
            prefix_queries=report.prefix_queries,
            prefix_hits=report.prefix_hits,
            preemptions=report.preemptions,
            epoch=report.epoch,
            wave=report.wave,
            version=member.version,
            sleep_level=report.sleep_level,
            workers=[
                LiveWorker(
                    status=one.status.name.lower(), pid=one.pid or None, replaced=one.replaced
                )
                for one in report.workers
            ],
        )
        for member in view.roster.members
        for report in (reports.get(member.rank, EngineReport(member.rank)),)
    ]
