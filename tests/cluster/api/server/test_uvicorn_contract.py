"""The parts of uvicorn that the HTTP server uses although they are not documented.

An upgrade of uvicorn that removes or renames one of them fails here. The tables are compared with
our source code, so they are complete.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from swell.cluster.api.server import connection, http_server
from tests.support.deadlines import HANG_S
from tests.support.paths import ROOT

FOLDER = ROOT / "cluster/api/server"

CALLED_BY_UVICORN = {"_start_asgi_task", "on_response_complete"}
CALLED_BY_THE_PARSER = {
    *("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
}
CALLED_BY_THE_TRANSPORT = {
    *("connection_made", "connection_lost", "data_received", "eof_received", "pause_writing"),
}
OVERRIDDEN = {"__init__"} | CALLED_BY_UVICORN | CALLED_BY_THE_PARSER | CALLED_BY_THE_TRANSPORT

OF_A_CONNECTION = {
    *("loop", "transport", "parser", "flow", "connections", "timeout_keep_alive", "scope", "url"),
    *("headers", "cycle", "pipeline", "_unset_keepalive_if_required", "resume_writing"),
}
OF_A_FLOW = {"write_paused", "read_paused", "resume_reading"}
OF_A_CYCLE = {
    *("scope", "disconnected", "message_event", "keep_alive", "more_body", "response_started"),
    *("response_complete", "waiting_for_100_continue", "chunked_encoding"),
    "expected_content_length",
}
OF_A_SERVER = {
    *("config", "server_state", "lifespan", "servers", "should_exit", "on_tick", "started"),
    "serve",
}
OVERRIDDEN_OF_A_SERVER = {"__init__", "startup", "main_loop", "capture_signals"}


class Transport(asyncio.Transport):
    """A transport without a socket."""

    def __init__(self) -> None:
        super().__init__({"peername": ("1.2.3.4", 5), "sockname": ("1.2.3.4", 80)})
        self.written = b""
        self._closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def recording(name: str, called: set[str]) -> Any:
    """Returns uvicorn's method of this name, which also notes that it was called."""

    def method(self: HttpToolsProtocol, *args: Any) -> Any:
        called.add(name)
        return getattr(HttpToolsProtocol, name)(self, *args)

    return method


def served() -> tuple[HttpToolsProtocol, RequestResponseCycle, set[str]]:
    """Returns a connection after one request, the request, and the methods that were called."""
    called: set[str] = set()
    finished = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == {"type": "http.request", "body": b"x", "more_body": False}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"y"})
        finished.set()

    names = CALLED_BY_UVICORN | CALLED_BY_THE_PARSER
    members = {name: recording(name, called) for name in names}
    recorded: type[HttpToolsProtocol] = type("Recorded", (HttpToolsProtocol,), members)

    async def run() -> HttpToolsProtocol:
        config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
        one = recorded(config=config, server_state=ServerState(), app_state={})
        one.connection_made(Transport())
        one.data_received(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx")
        await asyncio.wait_for(finished.wait(), HANG_S)
        return one

    one = asyncio.run(run())
    assert isinstance(one.transport, Transport) and b"y" in one.transport.written
    return one, one.cycle, called


def names_in(file: str, *owners: str, of_class: str | None = None) -> Iterator[str]:
    """Yields the attributes that a file reads or writes on expressions such as `self` or
    `self.flow`."""
    tree: ast.AST = ast.parse((FOLDER / file).read_text())
    if of_class is not None:
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        (tree,) = (node for node in classes if node.name == of_class)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners:
            yield node.attr


def of_ours(file: str, kind: type) -> set[str]:
    """Returns the names that the class defines itself: methods, annotations, and attributes that
    its methods set for the first time."""
    tree = ast.parse((FOLDER / file).read_text())
    (body,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    set_here = {
        target.attr
        for node in ast.walk(body)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr.startswith("_")
    }
    return {*vars(kind), *vars(kind).get("__annotations__", {}), *set_here}


def test_the_overridden_methods_exist_in_uvicorn() -> None:
    ours = {name for name, value in vars(connection.LimitedConnection).items() if callable(value)}
    assert {name for name in ours if hasattr(HttpToolsProtocol, name)} == OVERRIDDEN
    server = vars(http_server._Server)
    assert {name for name in server if hasattr(uvicorn.Server, name)} - {
        *("__module__", "__doc__", "__firstlineno__", "__static_attributes__"),
    } == OVERRIDDEN_OF_A_SERVER


def test_uvicorn_and_its_parser_call_the_overridden_methods() -> None:
    _, _, called = served()
    assert called == CALLED_BY_UVICORN | CALLED_BY_THE_PARSER


def test_a_uvicorn_connection_has_the_attributes_that_swell_uses() -> None:
    ours = of_ours("connection.py", connection.LimitedConnection)
    used = {*names_in("connection.py", "self", of_class="LimitedConnection")}
    assert {name for name in used - ours if not name.startswith("__")} == OF_A_CONNECTION
    one, _, _ = served()
    assert {name for name in OF_A_CONNECTION if not hasattr(one, name)} == set()
    assert {*names_in("connection.py", "self.flow")} == OF_A_FLOW
    assert {name for name in OF_A_FLOW if not hasattr(one.flow, name)} == set()
    assert [type(one.headers), type(one.url), type(one.scope)] == [list, bytes, dict]


def test_a_uvicorn_request_has_the_attributes_that_swell_uses() -> None:
    owners = (
        *("cycle", "self.cycle", "response.cycle"),
        *("self._answering", "answering", "refused", "newest"),
    )
    files = ("connection.py", "half_close.py", "response_framing.py")
    assert {name for file in files for name in names_in(file, *owners)} == OF_A_CYCLE
    _, cycle, _ = served()
    assert {name for name in OF_A_CYCLE if not hasattr(cycle, name)} == set()


def test_a_uvicorn_server_has_the_attributes_that_swell_uses() -> None:
    ours = of_ours("http_server.py", http_server._Server)
    used = {*names_in("http_server.py", "self", of_class="_Server")} - ours
    used |= {*names_in("http_server.py", "self._server", of_class="EdgeServer")} - ours
    assert used == OF_A_SERVER

    async def serve() -> uvicorn.Server:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError

        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, port=0))
        server.should_exit = True  # it starts, and ends before its loop
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                server, "capture_signals", http_server._Server.capture_signals.__get__(server)
            )
            await asyncio.wait_for(server.serve(sockets=[]), HANG_S)
        return server

    server = asyncio.run(serve())
    assert {name for name in OF_A_SERVER if not hasattr(server, name)} == set()
    assert server.started
