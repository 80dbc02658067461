"""A scripted server that answers like Swell: no model, no Ray, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class FakeServer:
    """A fake server. After a change is requested, it reports `phases` one after the other."""

    def __init__(self) -> None:
        self.url = ""
        self.engines = 1
        self.phases: list[str] = []
        self.error: str | None = None
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.fail_every = 0
        self.cut_short = False
        self.gap_s = 0.001

    def app(self) -> Starlette:
        def get(path: str, handler: Any) -> Route:
            return Route(path, handler, methods=["GET"])

        def post(path: str, handler: Any) -> Route:
            return Route(path, handler, methods=["POST"])

        return Starlette(
            routes=[
                get("/v1/models", self._models),
                post("/tokenize", self._tokenize),
                post("/v1/completions", self._complete),
                post("/v1/chat/completions", self._complete),
                get("/admin/cluster", self._cluster),
                post("/admin/scale", self._scale),
                post("/admin/drain", self._drain),
                get("/text", self._text),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        card = {"id": "fake", "object": "model", "created": 0, "owned_by": "x"}
        return JSONResponse({"object": "list", "data": [{**card, "max_model_len": 512}]})

    async def _tokenize(self, request: Request) -> Response:
        ids = list((await request.json())["prompt"].encode())
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": 512})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if self.fail_every and len(self.requests) % self.fail_every == 0:
            return JSONResponse({"error": {"message": "no engine is ready yet"}}, 503)
        headers = {"x-swell-engine": str(len(self.requests) % self.engines)}
        events = self._events(body, "messages" in body)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _events(self, body: dict[str, Any], chat: bool) -> AsyncIterator[bytes]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        head: dict[str, Any] = {"id": "1", "created": 0, "model": "fake"}
        count = body.get("max_tokens") or 3
        try:
            for _ in range(count):
                await asyncio.sleep(self.gap_s)
                part: dict[str, Any] = {"text": "ab "}
                if chat:
                    part = {"delta": {"content": "ab "}}
                part |= logprobs_of(body, 1)
                yield _event({**head, "choices": [{"index": 0, **part}]})
            if self.cut_short:
                return
            if body.get("stream_options"):
                prompt = len(body.get("prompt", [1]))
                usage = {
                    "prompt_tokens": prompt,
                    "completion_tokens": count,
                    "total_tokens": prompt + count,
                    "prompt_tokens_details": {"cached_tokens": 0},
                }
                yield _event({**head, "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            self.in_flight -= 1

    async def _cluster(self, request: Request) -> Response:
        phase = self.phases[0] if self.phases else "idle"
        if len(self.phases) > 1:
            self.phases.pop(0)
        engine = {"state": "active", "pid": 7, "node": "n", "kv_usage": 0.25, "workers": []}
        return JSONResponse(
            {
                "epoch": 3,
                "wave": 0,
                "state": "serving",
                "target": self.engines,
                "engines": [{"rank": rank, **engine} for rank in range(self.engines)],
                "coordinator": {"pid": 5},
                "rescale": {"phase": phase, "error": self.error},
            }
        )

    async def _scale(self, request: Request) -> Response:
        wanted = (await request.json())["engines"]
        if wanted > 4:
            message = f"engines={wanted} must be between 1 and 4"
            return JSONResponse({"error": {"message": message}}, 400)
        self.engines = wanted
        return JSONResponse({"status": "accepted"}, 202)

    async def _drain(self, request: Request) -> Response:
        self.engines -= 1
        return JSONResponse({"status": "accepted"}, 202)

    async def _text(self, request: Request) -> Response:
        return Response("hello\nworld", media_type="text/plain")


def logprobs_of(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Returns the logprobs of `tokens` tokens of a choice if the request asks for them."""
    if not body.get("logprobs"):
        return {}
    others = {"ab ": -0.125, "cd ": -2.5}
    if "messages" in body:
        top = [{"token": token, "logprob": value} for token, value in others.items()]
        token = {"token": "ab ", "logprob": -0.25, "top_logprobs": top}
        return {"logprobs": {"content": [token] * tokens}}
    columns = {"token_logprobs": [-0.25] * tokens, "top_logprobs": [others] * tokens}
    return {"logprobs": {"tokens": ["ab "] * tokens, **columns}}


def _event(value: Any) -> bytes:
    # Compact, as our own server writes.
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@contextlib.contextmanager
def running() -> Iterator[FakeServer]:
    """Runs a fake server on a free port, in a thread."""
    fake = FakeServer()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(fake.app(), log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield fake
        finally:
            server.should_exit = True
            thread.join()
