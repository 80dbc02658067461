"""The outputs of a request, and the one-element queue in which they wait for their reader."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import msgspec

from swell.cluster.client.requests.routed_experts import RoutedExpertsTable
from swell.cluster.text.tokens.token_texts import Texts, TokenTexts
from swell.worker.sampler_wire import TokenLogprobs


class RequestOutputKind(enum.IntEnum):
    """How much of the answer each `RequestOutput` holds."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only what is new since the last output."""
    FINAL_ONLY = 2
    """Everything, once, when the request has finished."""


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log probability of one token at one position."""

    logprob: float
    """Natural logarithm of the token's probability under the unmodified logits of the model, or the
    value that `model.logprobs_mode` selects; may be -inf."""
    rank: int
    """1 is the most probable token."""
    decoded_token: str


@dataclass(slots=True)
class LogprobTable(Sequence[dict[int, Logprob] | None]):
    """Log probabilities at consecutive positions, as columns of equal length.

    As a sequence, it maps at each position a token id to its `Logprob`: first the token at the
    position, then the most probable ones, best first. An element is None where nothing is known.
    The dict is built when it is read, so a table that is only passed on costs no more than its
    columns.
    """

    texts: TokenTexts = field(repr=False, compare=False)
    token_ids: list[list[int]] = field(default_factory=list)
    """The ids per position: the token at the position, then the most probable ones."""
    logprobs: list[list[float]] = field(default_factory=list)
    """Log probabilities of the same tokens; empty where nothing is known."""
    ranks: list[int] = field(default_factory=list)
    """Rank of the token at the position."""
    offsets: list[int] = field(default_factory=list)
    """Number of characters of text before the token at the position; tokens that share a character
    have the same offset."""
    at_beginning: int = 0
    """Number of leading positions whose tokens have the text that they have at the beginning of a
    text."""

    def append(self, token: TokenLogprobs, offset: int, *, at_beginning: bool = False) -> None:
        self.token_ids.append(token.token_ids)
        self.logprobs.append(token.logprobs)
        self.ranks.append(token.rank)
        self.offsets.append(offset)
        self.at_beginning += at_beginning

    def extend(self, newer: LogprobTable) -> None:
        self.token_ids += newer.token_ids
        self.logprobs += newer.logprobs
        self.ranks += newer.ranks
        self.offsets += newer.offsets
        self.at_beginning += newer.at_beginning

    def texts_at(self, index: int) -> Texts:
        """Returns the texts of the tokens that are possible at the position."""
        return self.texts.at_beginning if index < self.at_beginning else self.texts

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> LogprobTable: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | LogprobTable | None:
        if isinstance(index, slice):
            kept = range(len(self))[index]
            return LogprobTable(
                self.texts,
                self.token_ids[index],
                self.logprobs[index],
                self.ranks[index],
                self.offsets[index],
                min(len(kept), max(0, self.at_beginning - kept.start)),
            )
        if not self.logprobs[index]:
            return None
        ranks = (self.ranks[index], *range(1, len(self.token_ids[index])))
        texts, table = self.texts_at(index), dict[int, Logprob]()
        for token_id, logprob, rank in zip(
            self.token_ids[index], self.logprobs[index], ranks, strict=True
        ):
            if token_id not in table:
                table[token_id] = Logprob(logprob, rank, texts.text(token_id))
        return table


class ContentLimit(msgspec.Struct, frozen=True):
    """How much of an answer's content may be shown, if a stop string may cut it."""

    chars: int
    """Number of characters of content, from the beginning of the answer."""
    is_end: bool = False
    """Whether a stop string that is shown ends here: nothing else of the answer follows, of any
    kind."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer, whole or in part (see `RequestOutputKind`)."""

    index: int
    text: str
    token_ids: list[int]
    num_output_tokens: int
    """Number of tokens of the answer so far, for every `RequestOutputKind`."""
    logprobs: LogprobTable | None = None
    """Log probabilities of `token_ids`, if requested."""
    cumulative_logprob: float | None = None
    """Sum over the tokens of the answer so far, for every `RequestOutputKind`."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `repetition`, `error` or `invalid`."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the answer, `repetition_detected`, or an error
    message."""
    content_limit: ContentLimit | None = None
    """Limit on all content returned so far; None if `text` is cut already, or cannot be cut."""
    pooled: bytes = b""
    """The vector of a pooling request: float32, little-endian."""
    routed_experts: RoutedExpertsTable | None = None
    """Experts of all tokens of prompt and answer except the last token, which no expert has
    computed. Set when the answer has finished, if requested."""

    def add(self, newer: CompletionOutput) -> None:
        """Appends the next delta."""
        self.text += newer.text
        self.token_ids.extend(newer.token_ids)
        self.num_output_tokens = newer.num_output_tokens
        if self.logprobs is not None and newer.logprobs is not None:
            self.logprobs.extend(newer.logprobs)
        self.cumulative_logprob = newer.cumulative_logprob
        self.finish_reason = newer.finish_reason
        self.stop_reason = newer.stop_reason
        self.content_limit = newer.content_limit
        self.routed_experts = newer.routed_experts


class RequestOutput(msgspec.Struct, kw_only=True):
    request_id: str
    """The client's own id."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt: str | None = None
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    version: str = ""
    """Version of the engines that produced the output; empty if unknown."""
    prompt_logprobs: LogprobTable | None = None
    """Log probabilities of `prompt_token_ids`, if requested; the first token has none. Of deltas,
    only the first one holds them."""

    def add(self, newer: RequestOutput, *, aggregate: bool) -> None:
        """Merges a later output of the same answer into this one: appends a delta (`aggregate`), or
        replaces the answers."""
        self.finished = self.finished or newer.finished
        self.num_cached_tokens, self.version = newer.num_cached_tokens, newer.version
        if newer.prompt_logprobs is not None:
            self.prompt_logprobs = newer.prompt_logprobs
        if aggregate:
            self.outputs[0].add(newer.outputs[0])
        else:
            self.outputs = newer.outputs


class Event:
    """Wakes the one task that waits for it. Each `wait` clears it. Cheaper than `asyncio.Event`,
    which keeps a list of waiting tasks."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Waits for a `set` after the last `wait`; returns at once if there was one already."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_set = False


class RequestOutputCollector:
    """A one-element queue between the loop over engine outputs and one reading task.

    The producer never waits: an output that the reader has not taken is merged with the next one.
    An exception is delivered after the output before it, and again by every later read. Both sides
    run in one event loop.
    """

    takes_each_token = False
    """Whether each token gets its own output, no matter how many tokens an engine sends at once."""

    def __init__(self, kind: RequestOutputKind, request_id: str = "") -> None:
        self.request_id = request_id
        self.ready = Event()
        """Set when there is a new output."""
        self.kind = kind
        self._output: RequestOutput | None = None
        self._error: Exception | None = None

    def share_event(self, ready: Event) -> None:
        """Uses the event of the task that reads this queue and others, from now on."""
        self.ready = ready

    def put(self, output: RequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            self._error = self._error or output
        elif self._output is None:
            self._output = output
        else:
            self._output.add(output, aggregate=self.kind == RequestOutputKind.DELTA)
        self.ready.set()

    def get_nowait(self) -> RequestOutput | None:
        """Returns the next output, or None if there is none. Raises a delivered exception."""
        output, self._output = self._output, None
        if self._error is None:
            return output
        if output is None:
            raise self._error
        self.ready.set()  # the exception is next, and nothing follows it
        return output


class TokenQueue(RequestOutputCollector):
    """A collector that does not merge: the outputs depend only on the answer, not on how fast the
    reader is. It holds at most one output for each token of the answer."""

    takes_each_token = True

    def __init__(self, kind: RequestOutputKind, request_id: str = "") -> None:
        super().__init__(kind, request_id)
        self._outputs: deque[RequestOutput] = deque()

    def put(self, output: RequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            super().put(output)
        else:
            self._outputs.append(output)
            self.ready.set()

    def get_nowait(self) -> RequestOutput | None:
        return self._outputs.popleft() if self._outputs else super().get_nowait()
