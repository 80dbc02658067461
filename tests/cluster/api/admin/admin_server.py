"""An ingress of a fake cluster on a thread, for tests that send many blocking requests, and the
bodies that its admin routes accept, derived from the routes."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import msgspec
from msgspec import inspect
from starlette.routing import Route

from swell.cluster.api.admin.admin_routes import AdminRoutes
from swell.cluster.api.bodies.protocol_base import ErrorBody
from swell.cluster.api.live.event_routes import EventRoutes
from swell.cluster.api.openapi.operations import OPERATIONS, Operation
from swell.cluster.text.schema.request_body import RequestBody
from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.text import tokenizers_for_tests
from tests.support.deadlines import HANG_S

JSON = {"content-type": "application/json"}
SAMPLES: dict[type, str] = {
    inspect.IntType: "1",
    inspect.FloatType: "1.5",
    inspect.DictType: '{"model":{"path":"/m"}}',
    inspect.StrType: '"/m"',
    inspect.NoneType: "null",
}
"""A valid value of each type that a field of the admin API has. A field of another type needs a new
entry."""


class AdminRoute(NamedTuple):
    """One method of one admin route."""

    method: str
    path: str
    body: type[RequestBody] | None

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def fields(self) -> tuple[inspect.Field, ...]:
        return () if self.body is None else inspect.type_info(self.body).fields  # type: ignore[attr-defined]

    def valid(self, **values: str) -> str:
        """Returns an accepted body as JSON. `values` maps field names to JSON texts and overrides
        the samples."""
        parts = {one.name: sample_of(one) for one in self.fields if one.required} | values
        return "{" + ",".join(f'"{name}":{value}' for name, value in parts.items()) + "}"


def types_of(field: inspect.Field) -> set[type]:
    return {type(one) for one in getattr(field.type, "types", (field.type,))}


def sample_of(field: inspect.Field) -> str:
    return SAMPLES[sorted(types_of(field) - {inspect.NoneType}, key=str)[0]]


def admin_routes(routes: Any) -> list[AdminRoute]:
    """Returns the admin routes of a route table, each with the body type that `OPERATIONS`
    documents."""
    documented = {(one.method.upper(), one.path): one for one in OPERATIONS}
    found = []
    for route in routes:
        if isinstance(route, Route) and route.path.startswith("/admin"):
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                operation: Operation = documented[method, path]
                found.append(AdminRoute(method, path, operation.body))
    return found


_SERVICES: Any = SimpleNamespace(access=None, manager=None)
ROUTES = admin_routes([*AdminRoutes(_SERVICES).routes(), *EventRoutes(_SERVICES).routes()])
POSTS = [route for route in ROUTES if route.method == "POST"]
GETS = [route for route in ROUTES if route.method == "GET"]


class AdminServer:
    """A running server. Requests to it block until they are answered."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.port = cluster.edge.port
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=HANG_S)

    def changes(self) -> list[str]:
        """Returns and clears the calls that the manager received since the last call of this
        method."""
        calls = [call for call in self.cluster.manager.calls if call != "describe"]
        self.cluster.manager.calls.clear()
        return calls

    def post(
        self, path: str, body: str | bytes | Iterator[bytes], **headers: str
    ) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
        return self.client.post(path, content=content, headers={**JSON, **named})

    def send(self, data: bytes) -> bytes:
        """Sends raw bytes on a new connection and returns everything that the server sends until it
        closes."""
        with socket.create_connection(("127.0.0.1", self.port), HANG_S) as sock:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                parts = []
                while part := sock.recv(65536):
                    parts.append(part)
            return b"".join(parts)

    def refused(self, answer: httpx.Response, status: int = 400) -> Any:
        """Returns the error of a refusal. Checks that it changed nothing and has the documented
        form."""
        assert self.changes() == []
        assert answer.status_code == status, answer.text[:500]
        assert answer.headers["content-type"] == "application/json"
        assert len(answer.content) < 4000
        return msgspec.convert(answer.json(), ErrorBody, strict=True).error


@contextlib.contextmanager
def admin_server(folder: Path, **settings: Any) -> Iterator[AdminServer]:
    """Starts an `AdminServer`. `folder` must be empty: a tokenizer is written into it."""
    tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(folder, settings, ready)))
    thread.start()
    cluster, stop = ready.get(timeout=HANG_S)
    server = AdminServer(cluster)
    try:
        yield server
    finally:
        server.client.close()
        stop()
        thread.join()


async def _serve(folder: Path, settings: dict[str, Any], ready: queue.SimpleQueue[Any]) -> None:
    async with FakeCluster(folder, **settings).serving() as cluster:
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        ready.put((cluster, lambda: loop.call_soon_threadsafe(ending.set)))
        await ending.wait()
