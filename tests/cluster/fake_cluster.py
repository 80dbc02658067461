"""A cluster whose faults the test controls: a coordinator and engines on threads, real channels,
and one ingress with a real HTTP server.

An engine's token is a hash of the seed and the whole context, or comes from a script, so an answer
that was continued wrongly cannot look right. An engine runs only as many steps as it is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from swell.cluster.api.admin.protocol import ChangeResult
from swell.cluster.api.ingress import Ingress, build_ingress
from swell.cluster.api.server.http_server import EdgeServer
from swell.cluster.client.engine_core_client import AsyncEngineCoreClient
from swell.cluster.text.adapters import AdapterRefused, LoadedAdapters
from swell.configs.schema import Config, load
from swell.coordinator import roster as rosters
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.transport.channel import Inbox, make_keys
from swell.coordinator.wire import ClusterView, CoordinatorMessage, OtherIngressCounts, Subscribe
from swell.engine.wire import (
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    FinishReason,
    JourneyEvent,
    KeepAlive,
    KeepAliveReply,
)
from swell.engine.wire import JourneyEventType as Kind
from swell.worker.sampler_wire import Extra, PromptLogprobs, RoutedExperts, TokenLogprobs
from tests.engine.executor.fake_worker import next_token
from tests.support.deadlines import HANG_S

LOOK_S = 0.002
UNLIMITED_STEPS = 10**9


async def until(condition: Callable[[], object]) -> None:
    """Waits until the condition is true."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(LOOK_S)


class _Threaded:
    """Runs `turn` repeatedly on a thread until `close`. Calls from other threads run between two
    turns."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def turn(self) -> None:
        raise NotImplementedError

    def call(self, run: Callable[[], None]) -> None:
        self._calls.put(run)

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.is_set():
            while not self._calls.empty():
                self._calls.get()()
            self.turn()


class FakeCoordinator(_Threaded):
    """Sends every subscriber the view that a test sets. A successor can take over its keys and
    address."""

    def __init__(self, before: FakeCoordinator | None = None) -> None:
        super().__init__()
        self.keys = before.keys if before else make_keys()
        self.name = before.name if before else secrets.token_hex(8)
        port = int(before.inbox.address.tcp.rpartition(":")[2]) if before else 0
        self.inbox: Inbox[CoordinatorMessage] = Inbox(
            CoordinatorMessage, self.keys, name=self.name, port=port
        )
        self.address = self.inbox.address
        self.view = ClusterView(Roster())
        self.epochs_seen: list[int] = []
        self.is_silent = False
        """Whether it ignores subscribers."""
        self._subscribers: dict[bytes, None] = {}
        self._published: ClusterView | None = None
        self._thread.start()

    def publish(self, roster: Roster | None = None, **changes: Any) -> None:
        """Publishes another roster, or `changes` of the reports."""
        reports = msgspec.structs.replace(self.view.reports, **changes)
        self.view = ClusterView(roster or self.view.roster, reports)

    def turn(self) -> None:
        for peer, message in self.inbox.receive(LOOK_S):
            if isinstance(message, Subscribe) and not self.is_silent:
                self.epochs_seen.append(message.epoch)
                if message.counts:
                    self.inbox.send(peer, OtherIngressCounts({}))
                if peer not in self._subscribers:
                    self._subscribers[peer] = None
                    self.inbox.send(peer, self.view)
        view = self.view
        if view is not self._published:
            self._published = view
            for peer in self._subscribers:
                self.inbox.send(peer, view)

    def close(self) -> None:
        super().close()
        self.inbox.close()


class FakeEngine(_Threaded):
    """One incarnation of an engine."""

    incarnations = itertools.count(1)

    def __init__(
        self, keys: Any, rank: int, script: list[int] | None = None, vocab_size: int = 500
    ) -> None:
        super().__init__()
        self.inbox: Inbox[EngineMessage] = Inbox(EngineMessage, keys)
        self.member = Member(
            rank,
            self.inbox.address,
            max_model_len=2000,
            vocab_size=vocab_size,
            incarnation=next(self.incarnations),
        )
        self.credit_steps = 0
        self.tokens_at_once = 1
        """The tokens of a request in one output. The last output may have fewer."""
        self._losing = False
        """Whether messages are counted but not sent."""
        self.requests: dict[str, tuple[bytes, EngineCoreRequest, list[int]]] = {}
        self.arrived: list[EngineCoreRequest] = []
        self.unscheduled: list[tuple[bytes, EngineCoreRequest]] = []
        """(client, request) of requests for which no step has begun."""
        self.aborted: list[str] = []
        self.deaf_to_aborts = False
        """Whether aborts are recorded but not carried out."""
        self.keep_alives = 0
        self.counts: dict[bytes, int] = {}
        """Connection -> the number of messages with outputs."""
        self.received: Counter[bytes] = Counter()
        """Connection -> the number of received messages, without keep-alives."""
        self._script = script
        self._thread.start()

    def reply_with(self, script: list[int]) -> None:
        """Sets the tokens of the next requests. No request may be running."""
        self._script = script

    def allow(self, steps: int = UNLIMITED_STEPS) -> None:
        def add() -> None:
            self.credit_steps += steps

        self.call(add)

    def lose(self, steps: int) -> None:
        """Runs steps whose messages are lost, all before the next message from a client is handled,
        so that a resent request is never lost in the same steps."""

        def lose() -> None:
            self._losing = True
            for _ in range(steps):
                self._step()
            self._losing = False

        self.call(lose)

    def begin(self) -> None:
        """Begins a step with all requests without finishing it."""
        self.call(self._report_started)

    def _report_started(self) -> None:
        for peer, request in self.unscheduled:
            events = [JourneyEvent(kind, 0.0) for kind in (Kind.QUEUED, Kind.SCHEDULED)]
            self._send(
                peer,
                [],
                started=[request.request_id],
                started_attempts=[request.attempt],
                journey_events=[events],
            )
        self.unscheduled.clear()

    def fail(self, message: str) -> None:
        """Fails all requests with an error."""

        def end() -> None:
            held, self.requests = self.requests, {}
            for request_id, (peer, request, _tokens) in held.items():
                answer = EngineCoreOutput(
                    request_id, [], FinishReason.ERROR, message, attempt=request.attempt
                )
                self._send(peer, [answer])

        self.call(end)

    def disconnect_clients(self, *, recount: bool) -> None:
        """Drops all clients as if they were dead. If `recount`, the counts of their messages start
        again at zero."""

        def drop() -> None:
            held, self.requests = self.requests, {}
            if recount:
                self.counts.clear()
            for request_id, (peer, request, _tokens) in held.items():
                answer = EngineCoreOutput(
                    request_id, [], FinishReason.ABORT, attempt=request.attempt
                )
                self._send(peer, [answer])

        self.call(drop)

    def turn(self) -> None:
        for peer, message in self.inbox.receive(LOOK_S):
            self.received[peer] += not isinstance(message, KeepAlive)
            match message:
                case EngineCoreRequest():
                    before = self.requests.get(message.request_id)
                    assert before is None or before[1].attempt < message.attempt
                    self.arrived.append(message)
                    self.unscheduled.append((peer, message))
                    self.requests[message.request_id] = (
                        peer,
                        message,
                        list(message.output_token_ids),
                    )
                case AbortRequests():
                    self._abort(message)
                case KeepAlive():
                    self.keep_alives += 1
                    counts = self.received[peer], self.counts.get(peer, 0)
                    self.inbox.send(peer, KeepAliveReply(message.sent, *counts))
        if self.credit_steps and self.requests:
            self.credit_steps -= 1
            self._step()

    def close(self) -> None:
        if self._thread.is_alive():
            super().close()
            self.inbox.close()

    def _abort(self, message: AbortRequests) -> None:
        for request_id, attempt in zip(message.request_ids, message.attempts, strict=True):
            known = self.requests.get(request_id)
            if known is not None and known[1].attempt <= attempt and not self.deaf_to_aborts:
                del self.requests[request_id]
            self.aborted.append(request_id)  # last: tests wait for it

    def _step(self) -> None:
        self._report_started()
        outputs: dict[bytes, list[EngineCoreOutput]] = {}
        for request_id, (peer, request, tokens) in list(self.requests.items()):
            reason, found, new = None, [], 0
            while reason is None and new < self.tokens_at_once:
                tokens.append(self._draw(request, tokens))
                new += 1
                reason = _finish_reason(request, tokens)
                found += _extras(request, tokens)
            if reason is not None:
                del self.requests[request_id]
            answer = EngineCoreOutput(
                request_id,
                tokens[len(tokens) - new :],
                reason,
                extras=found,
                attempt=request.attempt,
            )
            outputs.setdefault(peer, []).append(answer)
        for peer, answers in outputs.items():
            self._send(peer, answers)

    def _draw(self, request: EngineCoreRequest, tokens: list[int]) -> int:
        if self._script is None:
            return next_token([*request.prompt_token_ids, *tokens], request.sampler.seed)
        assert tokens == self._script[: len(tokens)]
        return self._script[len(tokens)]

    def _send(self, peer: bytes, outputs: list[EngineCoreOutput], **fields: Any) -> None:
        self.counts[peer] = self.counts.get(peer, 0) + 1
        if self._losing:
            return
        seq = self.counts[peer]
        self.inbox.send(peer, EngineCoreOutputs(outputs, seq=seq, **fields))


def _finish_reason(request: EngineCoreRequest, tokens: list[int]) -> FinishReason | None:
    ends = tokens[-1] in (*request.eos_token_ids, *request.stop_token_ids)
    if ends and len(tokens) >= request.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= request.max_tokens else None


def experts_of(token: int) -> bytes:
    """Returns the expert ids of a token: two layers with two experts each."""
    return bytes([token % 7, 8, token % 5, 9])


def _extras(request: EngineCoreRequest, tokens: list[int]) -> list[Extra]:
    """Returns the extras that belong to the last of the output `tokens`: logprobs, in which every
    token is certain, and the routed experts of the tokens before it."""
    found: list[Extra] = []
    prompt, sampler = request.prompt_token_ids, request.sampler
    if sampler.prompt_logprobs is not None and len(tokens) == 1:
        certain = [0.0] * (1 + sampler.prompt_logprobs)
        rows = [[token] * len(certain) for token in prompt[1:]]
        found.append(PromptLogprobs(1, rows, [certain] * len(rows), [1] * len(rows)))
    if sampler.routed_experts:
        is_first = len(tokens) == len(request.output_token_ids) + 1
        start = 0 if is_first else len(prompt) + len(tokens) - 2
        routed = [*prompt, *tokens[:-1]][start:]
        found.append(RoutedExperts(start, [1, 3], 2, False, b"".join(map(experts_of, routed))))
    if sampler.logprobs is not None:
        count = 1 + sampler.logprobs
        found.append(TokenLogprobs(tokens[-1:] * count, [0.0] * count, 1))
    return found


class FakeManager:
    """A manager that records its calls and answers as the test sets."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}
        """Method name -> the arguments of its last call."""
        self.refusal: str | None = None
        self.is_stored = True
        self.adapters: LoadedAdapters | None = None

    def __getattr__(self, name: str) -> Any:
        async def remote(*arguments: Any) -> Any:
            self.calls.append(name)
            self.arguments[name] = arguments
            waits = name == "not_ready_reason"
            if self.adapters is not None and name in ("load_adapter", "unload_adapter"):
                try:
                    getattr(self.adapters, name.removesuffix("_adapter"))(*arguments)
                except AdapterRefused as refused:
                    return ChangeResult(2, str(refused))
            change = ChangeResult(2, self.refusal, is_stored=self.is_stored)
            return ("engine 0: reads weights", False) if waits else change

        return type("Method", (), {"remote": staticmethod(remote)})


class FakeCluster:
    """A fake cluster. Use it as `async with FakeCluster(folder).serving() as cluster`."""

    def __init__(
        self,
        folder: Path,
        script: list[int] | None = None,
        vocab_size: int = 500,
        **settings: object,
    ) -> None:
        source = {"model": {"path": str(folder), "name": "fake"}, "cache": {"block_tokens": 4}}
        settings.setdefault("cluster.heartbeat_s", 0.05)
        self.config: Config = load(source, settings)
        self.coordinator = FakeCoordinator()
        self.manager = FakeManager()
        self.store: Any = None
        self.drain_s = 5.0
        """Seconds that answers may continue after the ingress begins to stop."""
        self.engines: list[FakeEngine] = []
        self.ingress: Ingress
        self.edge: EdgeServer
        self.client: httpx.AsyncClient
        self._script = script
        self._vocab_size = vocab_size

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeCluster]:
        connect = partial(AsyncEngineCoreClient, self.coordinator.address, self.coordinator.keys)
        self.ingress = await build_ingress(self.config, connect, self.manager, self.store)
        self.edge = edge = EdgeServer(
            self.ingress.app, "127.0.0.1", 0, self.drain_s, self.config.serve
        )
        await edge.start()
        try:
            url = f"http://127.0.0.1:{edge.port}"
            async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as self.client:
                yield self
        finally:
            for part in (*self.engines, self.coordinator):
                part.close()
            await edge.stop()
            await self.ingress.stop()

    @contextlib.asynccontextmanager
    async def another_ingress(self, store: Any) -> AsyncIterator[tuple[Ingress, str]]:
        """Starts a second ingress with its own handle of the store. Yields it and its URL."""
        connect = partial(AsyncEngineCoreClient, self.coordinator.address, self.coordinator.keys)
        ingress = await build_ingress(self.config, connect, self.manager, store)
        edge = EdgeServer(ingress.app, "127.0.0.1", 0, 5, self.config.serve)
        await edge.start()
        try:
            await until(lambda: ingress.llm.view.roster.epoch >= self.coordinator.view.roster.epoch)
            yield ingress, f"http://127.0.0.1:{edge.port}"
        finally:
            await edge.stop()
            await ingress.stop()

    async def change(self, step: Callable[[Roster], Roster], **changes: Any) -> None:
        """Changes the roster and waits until the ingress knows it."""
        roster = step(self.coordinator.view.roster)
        self.coordinator.publish(roster=roster, **changes)
        await until(lambda: self.ingress.llm.view.roster.epoch >= roster.epoch)

    def start(self, rank: int, steps: int = UNLIMITED_STEPS) -> FakeEngine:
        """Starts an engine without adding it to the roster, with credit for `steps` steps."""
        engine = FakeEngine(self.coordinator.keys, rank, self._script, self._vocab_size)
        engine.allow(steps)
        self.engines.append(engine)
        return engine

    async def join(self, rank: int, steps: int = UNLIMITED_STEPS) -> FakeEngine:
        engine = self.start(rank, steps)
        await self.change(lambda now: rosters.join(now, [engine.member]))
        return engine

    async def mark(self, rank: int, state: MemberState) -> None:
        await self.change(lambda now: rosters.update_members(now, [rank], state=state))

    async def remove(self, rank: int) -> None:
        await self.change(lambda now: rosters.remove(now, [rank]))

    async def detach(self, rank: int) -> None:
        await self.change(lambda now: rosters.detach(now, [rank]))

    async def kill(self, engine: FakeEngine) -> None:
        await asyncio.to_thread(engine.close)
        await self.remove(engine.member.rank)

    async def metric(self, name: str) -> float:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(name + " ")))


def truth(prompt: list[int], count: int, seed: int = 3) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


def body(prompt: list[int], count: int, **extra: object) -> dict[str, Any]:
    payload = {"model": "fake", "prompt": prompt, "max_tokens": count, "seed": 3}
    return {**payload, "ignore_eos": True, "return_token_ids": True, **extra}


class Stream:
    """One streamed answer, read as it comes."""

    def __init__(self, cluster: FakeCluster, payload: dict[str, Any]) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.headers = httpx.Headers()
        self.comments: list[str] = []
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self.num_events = 0
        """The number of events with tokens."""
        self.done = asyncio.create_task(self._read(cluster.client, {**payload, "stream": True}))

    async def _read(self, client: httpx.AsyncClient, payload: dict[str, Any]) -> Stream:
        async with client.stream("POST", "/v1/completions", json=payload) as answer:
            assert answer.status_code == 200, await answer.aread()
            self.headers = answer.headers
            async for line in answer.aiter_lines():
                if line.startswith(":"):
                    if line != ": ping":  # sent if the machine is slow
                        self.comments.append(line)
                elif line.startswith("data: {"):
                    self._take(json.loads(line[6:]))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error", self.error)
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.ids += choice["token_ids"]
            self.num_events += bool(choice["token_ids"])
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    async def has(self, tokens: int) -> None:
        """Waits until at least this many tokens have arrived."""
        await until(lambda: len(self.ids) >= tokens or self.done.done())
        assert len(self.ids) >= tokens, self.error
