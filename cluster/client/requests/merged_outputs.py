"""Merges the outputs of all requests that answer one HTTP request into one stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from swell.cluster.client.requests.outputs import Event, RequestOutput, RequestOutputKind
from swell.cluster.client.requests.parallel_sampling import ParentRequest
from swell.cluster.client.requests.request_state import RequestFailed, RequestInvalid, RequestState
from swell.cluster.text.params.sampling_params import SamplingParams

OutputBatch = list[tuple[int, RequestOutput]]
"""Outputs, each with the number of its request."""


class MergedOutputs:
    """An async iterator over batches; each batch has all outputs that are available. Only one task
    may read it.

    `states` has the child requests of each prompt in a row; `params` are their sampling
    parameters.
    """

    def __init__(
        self, states: Sequence[RequestState], params: SamplingParams, kind: RequestOutputKind
    ) -> None:
        self._states = states
        self._children = params.num_children
        """Number of child requests per prompt."""
        self._parents = [ParentRequest(params, kind) for _ in range(len(states) // self._children)]
        self._ready = Event()
        self._ready.set()  # outputs may be there already
        self._first: OutputBatch | None = None
        self._released = False
        self._error: Exception | None = None
        self._unfinished = {}
        for number, state in enumerate(states):
            assert state.queue is not None, "the outputs of the request go elsewhere"
            state.queue.ready = self._ready
            self._unfinished[number] = state.queue

    @property
    def served_ranks(self) -> str:
        """The ranks that served so far, in order, comma-separated. With several requests, each rank
        occurs once."""
        ranks = [rank for state in self._states for rank in state.ranks]
        if len(self._states) > 1:
            ranks = list(dict.fromkeys(ranks))
        return ",".join(map(str, ranks))

    @property
    def version(self) -> str:
        """The version of the engines that served so far; empty if none has served, or if it is
        unknown."""
        return self._states[0].answer_version.version or ""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens sampled so far by all requests."""
        return sum(parent.num_output_tokens for parent in self._parents)

    async def whole(self) -> list[RequestOutput]:
        """Returns all answers to each prompt (for kind FINAL_ONLY). Raises the error of a request
        that failed."""
        outputs: dict[int, RequestOutput] = {}
        async for batch in self:
            for number, output in batch:
                outputs[number // self._children] = output
        return [outputs[prompt] for prompt in range(len(self._parents))]

    async def first(self) -> OutputBatch:
        """Returns the first batch, which the iterator then returns again, or an empty one if
        `release_first` was called before. Raises the error of a request that failed."""
        batch = await self._next(or_released=True)
        if batch:
            self._first = batch
        return batch

    def release_first(self) -> None:
        """Ends the wait of `first`: the caller no longer needs the first batch."""
        self._released = True
        self._ready.set()

    def __aiter__(self) -> MergedOutputs:
        return self

    async def __anext__(self) -> OutputBatch:
        """Returns the next batch. Raises the error of a request that failed, after all outputs
        before it."""
        first, self._first = self._first, None
        return await self._next() if first is None else first

    async def _next(self, *, or_released: bool = False) -> OutputBatch:
        batch: OutputBatch = []
        while not batch and not (or_released and self._released):
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            await self._ready.wait()
            batch = self._take()
        return batch

    def _take(self) -> OutputBatch:
        batch: OutputBatch = []
        for number, queue in list(self._unfinished.items()):
            try:
                output = queue.get_nowait()
                if output is not None:
                    self._add(number, output, batch)
            except Exception as error:
                self._error = self._error or error
        return batch

    def _add(self, number: int, output: RequestOutput, batch: OutputBatch) -> None:
        if output.finished:
            del self._unfinished[number]
        answer = output.outputs[0]
        if answer.finish_reason == "error":
            raise RequestFailed(str(answer.stop_reason or "the request failed"))
        if answer.finish_reason == "invalid":
            raise RequestInvalid(str(answer.stop_reason))
        merged = self._parents[number // self._children].add(output)
        if merged is not None:
            batch.append((number, merged))


class OutputsInTurn(MergedOutputs):
    """Merges outputs in an order that depends only on the answers: round-robin, one output of each
    unfinished request (with `TokenQueue`s). A request that waits for its next token holds up the
    others."""

    def __init__(
        self, states: Sequence[RequestState], params: SamplingParams, kind: RequestOutputKind
    ) -> None:
        super().__init__(states, params, kind)
        self._turns = deque(self._unfinished)
        """Numbers of the unfinished requests, the next one first."""

    def _take(self) -> OutputBatch:
        batch: OutputBatch = []
        try:
            while self._turns:
                number = self._turns[0]
                output = self._unfinished[number].get_nowait()
                if output is None:
                    break
                self._turns.popleft()
                if not output.finished:
                    self._turns.append(number)
                self._add(number, output, batch)
        except Exception as error:
            self._error = error
        return batch
