"""Streams of known requests, and whether each answer is that of a cluster without faults.

The answer to a request depends only on its body: greedy, or sampled with a seed. So the answers of
an undisturbed cluster are the oracle, and a fault may change only the time, and not a bit of a log
probability.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

_ANSWER_S = 120.0
"""An answer that takes longer has failed; replacing a process takes a fraction of this."""
_CONNECT_S = 10.0
"""The time in which one of all addresses must accept a connection."""
_CUT = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""The errors of a connection that existed and was lost. This includes one that is reset while the
client still waits for its confirmation: the kernel of the dead process had accepted it."""
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
]
"""Keep-alive options. A reader sends nothing, so without them it would wait forever for a lost
host."""
_EXAMPLES = 12
_REFERENCE_STREAMS = 8
"""The number of concurrent requests that compute the oracle."""
_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "kitten", "moon")


class Shape(msgspec.Struct, frozen=True):
    """The sizes of prompts and answers; both are sampled uniformly from a range."""

    prompt_words: tuple[int, int]
    output_tokens: tuple[int, int]


DECODE = Shape((2, 12), (150, 350))
"""Long answers, so that a fault hits them in the middle."""
SHORT_DECODE = Shape((2, 12), (50, 120))
"""Shorter answers for rows in which many answers follow one another."""
PREFILL = Shape((120, 200), (4, 24))
"""Long prompts: about six bytes a word, and nano's tokens are bytes."""


class LoadRequest(msgspec.Struct, frozen=True):
    """A path and a body."""

    path: str
    body: dict[str, Any]


def make_requests(model: str, count: int, shape: Shape, seed: int) -> list[LoadRequest]:
    """Returns chats and completions, half of each greedy and half sampled; some stop at a string,
    some are not streamed, and some have log probabilities. The same seed makes the same
    requests."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        text = " ".join(rng.choices(_WORDS, k=rng.randint(*shape.prompt_words)))
        prompt = rng.choice(("repeat 5 times: ", "sort: ", "reverse: ", "upper: ")) + text
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": rng.randint(*shape.output_tokens),
            "ignore_eos": True,
            "temperature": 0,
        }
        if index // 2 % 2:
            body |= {"temperature": round(rng.uniform(0.8, 1.0), 2), "seed": index}
        if index % 5 == 3:
            body["stop"] = [rng.choice(_WORDS)[:3], "zz"]
        if index % 3 != 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        has_logprobs = index % 7 < 3
        if index % 2:
            body |= {"logprobs": 2} if has_logprobs else {}
            requests.append(LoadRequest("/v1/completions", {**body, "prompt": prompt}))
        else:
            body |= {"logprobs": True, "top_logprobs": 2} if has_logprobs else {}
            messages = [{"role": "user", "content": prompt}]
            requests.append(LoadRequest("/v1/chat/completions", {**body, "messages": messages}))
    return requests


@dataclass
class Answer:
    """The answer to one request, with times on the monotonic clock."""

    request_index: int
    began_s: float
    """The time at which it was sent to the address that accepted it."""
    url: str = ""
    text: str = ""
    finish_reason: str | None = None
    usage: tuple[int, int] | None = None
    """The numbers of prompt and completion tokens."""
    logprobs: list[list[float | None]] = field(default_factory=list)
    """The log probabilities of each token, if requested: its own, then those of the most likely
    tokens."""
    engines: str = ""
    """The header `x-swell-engine`."""
    version: str = ""
    """The header `x-swell-version`."""
    chunks_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str | None = None
    cut: bool = False
    """Whether the connection was lost. Otherwise, `error` is the server's error or a timeout."""
    refused: bool = False
    """Whether there was no connection, so that no server knows of the request."""

    @property
    def pause_s(self) -> float:
        """Returns the longest wait of the reader, starting at the request; 0 for an answer that is
        not streamed."""
        times = [self.began_s, *self.chunks_s, self.ended_s] if self.chunks_s else []
        return max((later - time_s for time_s, later in itertools.pairwise(times)), default=0.0)

    def next_chunk_s(self, since_s: float, after_s: float) -> float | None:
        """Returns the time from `since_s`, or from the request if it was later, to the first chunk
        after `after_s`; None if there was none."""
        begin_s = max(since_s, self.began_s)
        later = (chunk for chunk in self.chunks_s if chunk > after_s)
        return next((chunk - begin_s for chunk in later), None)


# ---------------------------------------------------------------- one request


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _TokenLogprob(msgspec.Struct, frozen=True):
    logprob: float
    top_logprobs: list[_TokenLogprob] = []


class _Logprobs(msgspec.Struct, frozen=True):
    """The log probabilities: chats use `content`, completions the other fields."""

    content: list[_TokenLogprob] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []

    @property
    def values(self) -> list[list[float | None]]:
        chat: list[list[float | None]] = [
            [token.logprob, *(other.logprob for other in token.top_logprobs)]
            for token in self.content
        ]
        columns = zip(self.token_logprobs, self.top_logprobs, strict=True)
        return chat + [[own, *(others or {}).values()] for own, others in columns]


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    delta: _Message = _Message()
    message: _Message = _Message()
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None

    @property
    def content(self) -> str:
        return self.text or self.delta.content or self.message.content or ""


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Body(msgspec.Struct, frozen=True):
    """An answer or a chunk of one, of chats or completions."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Refused(RuntimeError):
    """The server reported an error."""


async def send_request(
    answer: Answer, client: httpx.AsyncClient, url: str, request: LoadRequest
) -> None:
    """Sends one request and records everything that arrives; failures are recorded too and never
    raised."""
    answer.url, answer.began_s = url, time.monotonic()
    answer.error, answer.refused = None, False
    try:
        async with (
            asyncio.timeout(_ANSWER_S),
            client.stream("POST", url + request.path, json=request.body) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise _Refused(f"{response.status_code}: {text[:300]}")
            answer.engines = response.headers.get("x-swell-engine", "")
            answer.version = response.headers.get("x-swell-version", "")
            if request.body.get("stream"):
                await _read_events(answer, response)
            else:
                _take(answer, await response.aread())
    except (TimeoutError, httpx.TimeoutException) as error:
        answer.error = f"no end after {time.monotonic() - answer.began_s:.0f} s"
        answer.refused = isinstance(error, httpx.ConnectTimeout)
    except (httpx.TransportError, msgspec.MsgspecError, _Refused) as error:
        os_error = _find_os_error(error)
        answer.error = f"{type(error).__name__}: {error}" + (f" ({os_error})" if os_error else "")
        answer.cut = isinstance(error, _CUT) or isinstance(os_error, ConnectionResetError)
        answer.refused = isinstance(error, httpx.ConnectError) and not answer.cut
    answer.ended_s = time.monotonic()


def _find_os_error(error: BaseException) -> OSError | None:
    """Returns the operating system's error that caused `error`."""
    os_error = error.__cause__ or error.__context__
    while os_error is not None:
        if isinstance(os_error, OSError) and os_error.errno is not None:
            return os_error
        os_error = os_error.__cause__ or os_error.__context__
    return None


_RANKS = ": x-swell-engine "
"""The comment in a stream that moved, or whose headers were sent before its engine was known."""


async def _read_events(answer: Answer, response: httpx.Response) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith(_RANKS):
            answer.engines = line.removeprefix(_RANKS)
        if line.startswith("data: "):
            answer.chunks_s.append(time.monotonic())
            _take(answer, line[6:].encode())
    raise _Refused("the stream ended in order, but before its [DONE]")


def _take(answer: Answer, data: bytes) -> None:
    body = msgspec.json.decode(data, type=_Body)
    if body.error is not None:
        raise _Refused(str(body.error))
    for choice in body.choices:
        answer.text += choice.content
        answer.finish_reason = choice.finish_reason or answer.finish_reason
        answer.logprobs += choice.logprobs.values if choice.logprobs else []
    if body.usage is not None:
        answer.usage = (body.usage.prompt_tokens, body.usage.completion_tokens)


# ---------------------------------------------------------------- many requests


class Load:
    """`streams` requests in flight over `urls`; each is followed by the next, at once or in the
    next burst. Between bursts the processors are free for processes that start; a single request in
    flight would keep an engine busy.

    Every request has a connection of its own. So ingresses that share a port share the requests,
    and one that dies only loses those it was answering. An address that accepts no connection is
    skipped.
    """

    def __init__(
        self,
        urls: Sequence[str],
        requests: Sequence[LoadRequest],
        streams: int,
        burst_every_s: float = 0.0,
    ) -> None:
        """`burst_every_s`: the time from one burst to the next, in which each stream that is idle
        begins a request; 0: a request follows the one before at once."""
        self.answers: list[Answer] = []
        """The finished answers, failed or not."""
        self.open: dict[int, Answer] = {}
        """The answers in flight, by their stream."""
        self._urls = urls
        self._requests = requests
        self.streams = streams
        self._burst_every_s = burst_every_s
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._stopping = False

    def start(self, rounds: int | None = None) -> None:
        """Starts a request of every stream, and further ones until `finish`, or `rounds` requests
        of each."""
        self._tasks += [
            asyncio.create_task(self._run_stream(index, rounds)) for index in range(self.streams)
        ]

    @property
    def busy(self) -> bool:
        """Whether any stream is still running."""
        return any(not task.done() for task in self._tasks)

    @property
    def streaming(self) -> int:
        """Returns the number of requests in flight whose answer has begun."""
        return sum(bool(answer.chunks_s) for answer in self.open.values())

    async def finish(self) -> list[Answer]:
        """Submits nothing more, waits for the requests in flight, and returns every answer."""
        self._stopping = True
        return await self.ended()

    async def ended(self) -> list[Answer]:
        """Waits until all rounds are over, and returns every answer."""
        await asyncio.gather(*self._tasks)
        return self.answers

    async def _run_stream(self, index: int, rounds: int | None) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeouts = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S / len(self._urls))
        # Our servers speak plain HTTP; reading certificates would cost CPU time for every stream.
        transport = httpx.AsyncHTTPTransport(
            limits=limits, verify=False, socket_options=_KEEP_ALIVE
        )
        async with httpx.AsyncClient(
            transport=transport, timeout=timeouts, trust_env=False
        ) as client:
            for _round in itertools.count() if rounds is None else range(rounds):
                if self._stopping:
                    return
                number = next(self._numbers)
                answer = Answer(number % len(self._requests), time.monotonic())
                self.open[index] = answer
                await self._send(answer, client, number)
                self.answers.append(self.open.pop(index))
                if self._burst_every_s:
                    await asyncio.sleep(-time.monotonic() % self._burst_every_s)

    async def _send(self, answer: Answer, client: httpx.AsyncClient, number: int) -> None:
        """Sends a request to one address after the other, as a load balancer does, until one
        accepts it."""
        for turn in range(len(self._urls)):
            url = self._urls[(number + turn) % len(self._urls)]
            await send_request(answer, client, url, self._requests[answer.request_index])
            if not answer.refused:
                return


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the smallest value that at least `share` of the values do not exceed; None if there
    are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


class ReferenceFailed(RuntimeError):
    """An undisturbed cluster did not answer."""


async def reference(url: str, requests: Sequence[LoadRequest]) -> list[Answer]:
    """Returns the answer to each request, in order. Raises ReferenceFailed."""
    load = Load([url], requests, _REFERENCE_STREAMS)
    load.start(rounds=-(-len(requests) // _REFERENCE_STREAMS))
    answers = {answer.request_index: answer for answer in await load.ended()}
    for answer in answers.values():
        if answer.error:
            raise ReferenceFailed(f"request {answer.request_index}: {answer.error}")
    return [answers[index] for index in range(len(requests))]


# ---------------------------------------------------------------- comparison


class LoadResult(msgspec.Struct, frozen=True):
    """Counts of answers; `cut` answers lost their connection, `failed` ones failed in any other
    way."""

    answers: int
    failed: int
    cut: int
    wrong: int
    pause_s: float
    """The longest wait of any reader."""
    moved: int
    """The number of answers that name more than one engine."""
    examples: list[str] = []
    """The first few that failed or are wrong."""


def compare(expected: Sequence[Answer], answers: Sequence[Answer]) -> LoadResult:
    """Compares every answer with the expected one; the received part of a cut answer must be
    right."""
    wrong = [
        line for answer in answers if (line := difference(expected[answer.request_index], answer))
    ]
    cut = [answer for answer in answers if answer.cut]
    failed = [answer for answer in answers if answer.error and not answer.cut]
    origin_s = min((answer.began_s for answer in answers), default=0.0)
    lines = [
        f"request {answer.request_index} to {answer.url} (engines {answer.engines}), "
        f"{answer.began_s - origin_s:.1f} to {answer.ended_s - origin_s:.1f} s: {answer.error}"
        for answer in (*failed, *cut)
    ]
    return LoadResult(
        answers=len(answers),
        failed=len(failed),
        cut=len(cut),
        wrong=len(wrong),
        pause_s=max((answer.pause_s for answer in answers), default=0.0),
        moved=sum("," in answer.engines for answer in answers),
        examples=(wrong[:_EXAMPLES] + lines[:_EXAMPLES]),
    )


def difference(expected: Answer, got: Answer) -> str | None:
    """Returns the field that differs, and where; None if all are equal."""
    if got.error:
        pairs: list[tuple[str, Any, Any]] = [
            ("text", expected.text[: len(got.text)], got.text),
            ("logprobs", expected.logprobs[: len(got.logprobs)], got.logprobs),
        ]
    else:
        names = ("text", "finish_reason", "usage", "logprobs")
        pairs = [(name, getattr(expected, name), getattr(got, name)) for name in names]
    for name, right, actual in pairs:
        if right != actual:
            where = f"request {got.request_index} (engines {got.engines})"
            return f"{where}: {name} {_where(right, actual)}"
    return None


def _where(right: Any, actual: Any) -> str:
    if isinstance(right, list) and isinstance(actual, list):
        both = itertools.zip_longest(right, actual)
        index, pair = next((i, pair) for i, pair in enumerate(both) if pair[0] != pair[1])
        return f"{pair[1]!r} for {pair[0]!r} at token {index}"
    if not isinstance(right, str) or not isinstance(actual, str):
        return f"{actual!r} for {right!r}"
    pairs = zip(right, actual, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return f"{actual[same : same + 12]!r} for {right[same : same + 12]!r} at character {same}"
