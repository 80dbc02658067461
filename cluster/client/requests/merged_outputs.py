"""Merges the outputs of all requests that answer one HTTP request, or one call of `LLM`.

Each answer to a prompt is sampled by a child: an ordinary request (see `sampler_params`). Usage
counts the prompt once, and the tokens of every sampled answer, including those that
`select_best_of` leaves out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from swell.cluster.client.requests.outputs import (
    CompletionOutput,
    Event,
    RequestOutput,
    RequestOutputKind,
)
from swell.cluster.client.requests.request_state import RequestFailed, RequestInvalid, RequestState
from swell.cluster.text.params.sampling_params import SamplingParams

OutputBatch = list[tuple[int, RequestOutput]]
"""Outputs, each with the number of its request."""


class MergedOutputs:
    """An async iterator over batches; each batch has all outputs that are available. Only one task
    may read it.

    `states` has the child requests of each prompt in a row; `params` are their sampling parameters.
    With DELTA, an output is the new part of one child. With CUMULATIVE, it has the answers so far
    of every child of the prompt that has begun. With FINAL_ONLY, it has all answers to the prompt.
    If answers are ranked, there is one output for each prompt, for every kind.

    If one request fails, no output of its prompt follows. The caller aborts the others.
    """

    def __init__(
        self, states: Sequence[RequestState], params: SamplingParams, kind: RequestOutputKind
    ) -> None:
        self._states = states
        self._params = params
        self._is_delta = kind == RequestOutputKind.DELTA
        self._is_best_of = params.num_children > params.n
        self._is_whole = self._is_best_of or kind == RequestOutputKind.FINAL_ONLY
        """Whether there is nothing to return before all answers to a prompt are complete."""
        self._children = params.num_children
        """Number of child requests per prompt."""
        self._running = [self._children] * (len(states) // self._children)
        """The number of unfinished children of each prompt."""
        self._outputs: dict[int, RequestOutput] = {}
        """All output of each request; with deltas that are passed on, only the last one."""
        self.failed_output: RequestOutput | None = None
        """The last output of a request that failed, which names the error."""
        self._ready = Event()
        self._ready.set()  # outputs may be there already
        self._first: OutputBatch | None = None
        self._released = False
        self._error: Exception | None = None
        self._unfinished = {}
        for number, state in enumerate(states):
            state.queue.share_event(self._ready)
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
        return sum(output.outputs[0].num_output_tokens for output in self._outputs.values())

    async def whole(self) -> list[RequestOutput]:
        """Returns all answers to each prompt (for kind FINAL_ONLY). Raises the error of a request
        that failed."""
        outputs: dict[int, RequestOutput] = {}
        async for batch in self:
            for number, output in batch:
                outputs[number // self._children] = output
        return [outputs[prompt] for prompt in range(len(self._running))]

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
            batch = self.take()
        return batch

    def take(self) -> OutputBatch:
        """Returns the outputs that are available now; an error is raised by the next `anext`."""
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
        answer, error = output.outputs[0], _failure(output.outputs[0])
        if error is not None:
            self.failed_output = self.failed_output or output
            if not (self._is_delta and answer.text):
                raise error
            # The reader was late, and the failure was merged with the text before it.
            before = msgspec.structs.replace(answer, finish_reason=None, stop_reason=None)
            output = msgspec.structs.replace(output, finished=False, outputs=[before])
        merged = self._merge(number, output)
        if merged is not None:
            batch.append((number, merged))
        if error is not None:
            raise error

    def _merge(self, number: int, output: RequestOutput) -> RequestOutput | None:
        """Adds an output of one request; returns what the client gets, or None."""
        prompt = number // self._children
        self._running[prompt] -= output.finished
        finished = not self._running[prompt]
        if self._is_delta and not self._is_best_of:
            self._outputs[number] = output
            if output.finished == finished:
                return output
            return msgspec.structs.replace(output, finished=finished)
        known = self._outputs.get(number)
        if known is not None and self._is_delta:
            known.add(output, aggregate=True)
        else:
            self._outputs[number] = output
        if self._is_whole and not finished:
            return None
        first = prompt * self._children
        numbers = range(first, first + self._children)
        whole = merge_outputs([self._outputs[one] for one in numbers if one in self._outputs])
        whole.finished = finished
        return select_best_of(whole, self._params) if self._is_best_of else whole


def _failure(answer: CompletionOutput) -> Exception | None:
    """Returns the error of an answer that failed."""
    match answer.finish_reason:
        case "invalid":
            return RequestInvalid(str(answer.stop_reason))
        case "error":
            return RequestFailed(str(answer.stop_reason or "the request failed"))
    return None


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

    def take(self) -> OutputBatch:
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


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Merges the outputs of the children of one prompt, in any order, into one output with the
    answers sorted by index. The number of cached prompt tokens is the minimum over the children."""
    completions = [completion for output in outputs for completion in output.outputs]
    return msgspec.structs.replace(
        outputs[0],
        outputs=sorted(completions, key=lambda completion: completion.index),
        finished=all(output.finished for output in outputs),
        num_cached_tokens=min(output.num_cached_tokens for output in outputs),
    )


def select_best_of(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """Returns the `n` answers with the largest mean log probability per token (OpenAI's definition
    of `best_of`), best first, with new indices. If two are equal, the earlier child comes first.
    Log probabilities that only the ranking needed are removed."""
    ranked = sorted(output.outputs, key=_mean_logprob, reverse=True)
    best = [
        msgspec.structs.replace(completion, index=index)
        for index, completion in enumerate(ranked[: params.n])
    ]
    if params.logprobs is None:
        for completion in best:
            completion.logprobs = completion.cumulative_logprob = None
    return msgspec.structs.replace(output, outputs=best)


def _mean_logprob(completion: CompletionOutput) -> float:
    """Returns the mean log probability per token; an answer without tokens ranks last."""
    assert completion.cumulative_logprob is not None, "ranked answers have log probabilities"
    if not completion.token_ids:
        return -float("inf")
    return completion.cumulative_logprob / len(completion.token_ids)
