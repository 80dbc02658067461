"""Only a few of many simultaneous requests start in one iteration of the loop. Health probes are
not queued. The tests use no clock, only the order of events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from swell.cluster.api.request_context import RequestContextMiddleware, context_of
from swell.cluster.api.server import request_throttle
from swell.cluster.api.server.request_throttle import PER_TURN, RequestThrottle


class Handlers:
    """Records which request starts in which iteration of the loop."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.turn = 0
        self.left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append((scope["path"], self.turn))

    def tick(self) -> None:
        self.turn += 1
        if self.left:
            asyncio.get_running_loop().call_soon(self.tick)

    async def run(self, *paths: str, later: tuple[str, ...] = (), app: Any = None) -> None:
        """Runs the requests. `later` holds requests that arrive after half of `paths` has started.
        `app` replaces the throttle."""
        app = app or RequestThrottle(self)
        self.left = len(paths)
        self.tick()
        tasks = [asyncio.ensure_future(self._call(app, path)) for path in paths]
        while later and len(self.begun) < len(paths) // 2:
            await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(self._call(app, path)) for path in later]
        await asyncio.gather(*tasks)
        self.left = 0

    async def _call(self, app: RequestThrottle, path: str) -> None:
        await app({"type": "http", "path": path, "headers": []}, None, None)  # type: ignore[arg-type]

    def order(self) -> list[str]:
        return [path for path, _ in self.begun]


ANSWERS = [f"/v1/completions?{number}" for number in range(1000)]


def test_few_start_per_loop_iteration_in_arrival_order():
    handlers = Handlers()
    asyncio.run(handlers.run(*ANSWERS))
    assert handlers.order() == ANSWERS
    turns = [turn for _, turn in handlers.begun]
    assert max(map(turns.count, turns)) <= PER_TURN
    assert turns[-1] - turns[0] <= len(ANSWERS) // PER_TURN + 2, "no iteration is left out"


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/admin/cluster"])
def test_health_probes_are_not_throttled(path):
    handlers = Handlers()
    asyncio.run(handlers.run(*ANSWERS, path))
    assert handlers.order().index(path) <= 2 * PER_TURN


def test_later_requests_queue_after_earlier_ones():
    handlers = Handlers()
    asyncio.run(handlers.run(*ANSWERS, later=("/v1/late",)))
    assert handlers.order() == [*ANSWERS, "/v1/late"]


def test_a_cancelled_waiting_request_occupies_no_place(monkeypatch):
    monkeypatch.setattr(request_throttle, "PER_TURN", 1)
    handlers = Handlers()

    async def run() -> None:
        app = RequestThrottle(handlers)
        tasks = [asyncio.ensure_future(handlers._call(app, f"/v1/{n}")) for n in range(5)]
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert handlers.order() == ["/v1/0", "/v1/4"]


def test_a_single_request_does_not_wait():
    handlers = Handlers()

    async def run() -> None:
        app = RequestThrottle(handlers)
        call = handlers._call(app, "/v1/completions")
        with pytest.raises(StopIteration):
            call.send(None)

    asyncio.run(run())


def test_the_arrival_time_precedes_the_wait() -> None:
    """The time limit of a request includes its wait. The clock here is the number of the
    iteration."""
    handlers = Handlers()
    came: list[float] = []
    begin = handlers.__call__

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        came.append(context_of(Request(scope)).arrived_s)
        await begin(scope, receive, send)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.time = lambda: float(handlers.turn)  # type: ignore[method-assign]
        app = RequestContextMiddleware(RequestThrottle(handler), 15.0)
        await handlers.run(*ANSWERS[: 4 * PER_TURN], app=app)

    asyncio.run(run())
    begun = [turn for _, turn in handlers.begun]
    assert begun[-1] - begun[0] >= 3, "the last one waited"
    assert max(came) == min(came) <= begun[0]
