"""`python -m tests.benchmarks.tokens`: the cost of a streamed token in an ingress, in microseconds
of processor time.

The measurement goes from the bytes of an engine's step to the bytes for the HTTP server, through
the ingress's own routes, without sockets: decoding the message, statistics, text, stops, events.
Two of its parts are also measured separately: text, and one event's bytes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from swell.cluster.api.chat.writer import ChatStream
from swell.cluster.api.ingress import build_ingress
from swell.cluster.client.engine_connection import EngineId, EngineListener
from swell.cluster.client.engine_core_client import MetricsExchange
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.cluster.text.tokens.tokenizer import load_tokenizer
from swell.configs.schema import load
from swell.coordinator.roster import Member, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import ClusterView
from swell.engine.wire import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

NANO = Path(__file__).parents[2] / "configs/models/nano"
STREAMS = (1, 64)
STEPS = 300
WARMUP_STEPS = 30
_TEXT = "The quick brown fox jumps over the lazy dog; sphinx of black quartz, judge my vow. "
_BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": [5, 6, 7]},
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


class StubEngine:
    """A stub for an ingress's connections; each message has a token of every request."""

    def __init__(
        self,
        token_ids: list[int],
        client_index: int,
        listener: EngineListener,
        metrics: MetricsExchange,
        *,
        heartbeat_s: float,
        silence_s: float,
    ) -> None:
        self.requests: list[str] = []
        self._token_ids = token_ids
        self._rng = random.Random(0)
        self._listener = listener
        self._decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        member = Member(0, ChannelAddress("", "", ""), max_model_len=1 << 20, vocab_size=1 << 20)
        asyncio.get_running_loop().call_soon(
            listener.on_view, ClusterView(Roster(1, (member,))), []
        )

    def send(self, engine: EngineId, message: Any) -> None:
        if isinstance(message, EngineCoreRequest):
            self.requests.append(message.request_id)

    def close(self) -> None:
        pass

    def message(self) -> bytes:
        """Returns the encoded outputs of one step."""
        ids = self._rng.choices(self._token_ids, k=len(self.requests))
        pairs = zip(self.requests, ids, strict=True)
        outputs = [EngineCoreOutput(request, [token]) for request, token in pairs]
        return msgspec.msgpack.encode(EngineCoreOutputs(outputs))

    def deliver(self, message: bytes) -> None:
        self._listener.on_outputs(self._decoder.decode(message))


class Stream:
    """One request to an ASGI app; its events are counted and dropped."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self.bodies = 0
        """The number of bodies that were sent; the first tokens may share one with the start of the
        stream."""
        content = msgspec.json.encode({"model": "nano", "stream": True, **body})
        self._received = [{"type": "http.request", "body": content, "more_body": False}]
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/v1/{path}",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._received:
            return self._received.pop()
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message
        self.bodies += message["type"] == "http.response.body"


async def _step_us(path: str, streams: int) -> AsyncIterator[float]:
    """Yields the processor time of each step, divided by its tokens."""
    tokenizer = load_tokenizer(str(NANO))
    engines: list[StubEngine] = []

    def connect(
        client_index: int, listener: EngineListener, metrics: MetricsExchange, **periods: float
    ) -> StubEngine:
        ids = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
        engines.append(StubEngine(ids, client_index, listener, metrics, **periods))
        return engines[0]

    ingress = await build_ingress(load(str(NANO)), connect, manager=None)
    body = {"max_tokens": 1 << 19, **_BODIES[path]}
    requests = [Stream(ingress.app, path, body) for _ in range(streams)]
    while len(engines[0].requests) < streams:
        await asyncio.sleep(0)
    for _ in range(STEPS):
        message = engines[0].message()
        before = [stream.bodies for stream in requests]
        started = time.thread_time_ns()
        engines[0].deliver(message)
        while any(stream.bodies <= n for stream, n in zip(requests, before, strict=True)):
            await asyncio.sleep(0)
        yield (time.thread_time_ns() - started) / 1000 / streams
    for stream in requests:
        stream.task.cancel()
    await asyncio.gather(*(stream.task for stream in requests), return_exceptions=True)
    await ingress.stop()


async def _token_us(path: str, streams: int) -> float:
    """Returns the mean, since rare work counts too."""
    times = [us async for us in _step_us(path, streams)][WARMUP_STEPS:]
    return sum(times) / len(times)


def _text_us() -> float:
    tokenizer = load_tokenizer(str(NANO))
    ids = tokenizer(_TEXT * 500, add_special_tokens=False)["input_ids"]
    text = Detokenizer(tokenizer).start()
    started = time.thread_time_ns()
    for token_id in ids:
        text.push(token_id)
    return (time.thread_time_ns() - started) / 1000 / len(ids)


def _event_us() -> float:
    events, count = ChatStream("chatcmpl-0", 0, "nano"), 50_000
    started = time.thread_time_ns()
    for _ in range(count):
        events.chunk(" word")
    return (time.thread_time_ns() - started) / 1000 / count


def measure_tokens() -> dict[str, float]:
    """Returns the microseconds of a token, by measurement."""
    figures = {
        f"{path}, {streams} streams": uvloop.run(_token_us(path, streams))
        for path in _BODIES
        for streams in STREAMS
    }
    return {**figures, "text alone": _text_us(), "event alone": _event_us()}


def main() -> None:
    for name, microseconds in measure_tokens().items():
        print(f"{name:32} {microseconds:6.2f} us a token")


if __name__ == "__main__":
    main()
