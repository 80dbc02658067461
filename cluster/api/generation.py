"""From an ask to its answer: children are submitted, what they give is gathered or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from swell.cluster.api.http import EventStream, json_response, request_id, unless_gone
from swell.cluster.api.response_writer import ENGINES, Answer, checked, usage_of
from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.deadline import Deadline
from swell.cluster.client.outputs import RequestOutput, RequestOutputKind
from swell.cluster.client.parallel_sampling import best, children, fold
from swell.cluster.client.request_state import Outputs, Ticket, engines_of
from swell.cluster.text.input_processor import Ask
from swell.cluster.text.offload import Offload
from swell.cluster.text.sampling_params import BadRequest, to_core_request

TRACE_HEADERS = ("traceparent", "tracestate")
_TURN_TOKENS = 20_000
"""Prompt tokens that are submitted at once: some milliseconds."""
_TOKEN_BYTES = 1
"""Of an answer, as work: a token is written faster than one is read."""
_CHILD_TOKENS = 500
"""What a child costs beside its prompt."""


class Generator:
    """The engines behind the routes that answer. `ends` are the model's end tokens; `offload`
    writes long answers."""

    def __init__(self, llm: AsyncLLM, ends: list[int], offload: Offload) -> None:
        self._llm = llm
        self._offload = offload
        self._ends = ends

    async def answer(self, request: Request, ask: Ask, answer: Answer) -> Any:
        """Submit everything, then answer whole or as a stream. Raises TooManyWaiting."""
        self._llm.check_room()
        return await self.answer_admitted(request, ask, answer)

    async def answer_admitted(self, request: Request, ask: Ask, answer: Answer) -> Any:
        """The same for what was admitted before, perhaps by an ingress that is gone."""
        tickets: list[Ticket] = []
        timer: asyncio.TimerHandle | None = None
        try:
            await self._submit(request, ask, tickets)
            timer = self._end_at_deadline(request, tickets)
            if not ask.stream:
                outputs = await unless_gone(request, self._gather(tickets))
                self._leave(tickets, timer)
                whole = await self._offload.run_sized(
                    _TOKEN_BYTES * sum(map(_tokens, outputs)), self._whole, ask, answer, outputs
                )
                return json_response(whole, headers=_served_by(tickets))
            # The status line waits for the first token: what fails before it has a status.
            stream = Outputs(tickets)
            for _, output in await unless_gone(request, stream.first()):
                checked(output)
            headers = _served_by(tickets)
            events = answer.events(
                stream, len(tickets), told=headers[ENGINES], engines=lambda: engines_of(tickets)
            )
            return EventStream(events, headers, on_end=lambda: self._leave(tickets, timer))
        except BaseException:
            self._leave(tickets, timer)
            raise

    def _whole(self, ask: Ask, answer: Answer, outputs: list[RequestOutput]) -> bytes:
        """The body as JSON; `outputs`: one a child, the children of each prompt in a row."""
        for output in outputs:
            checked(output)
        count = len(outputs) // len(ask.prompts)
        prompts = [fold(outputs[first : first + count]) for first in range(0, len(outputs), count)]
        drawn = sum(output.outputs[0].num_output_tokens for output in outputs)
        usage = usage_of(prompts, drawn)
        if count > ask.params.n:
            prompts = [best(output, ask.params) for output in prompts]
        return msgspec.json.encode(answer.whole(prompts, usage))

    async def _submit(self, request: Request, ask: Ask, tickets: list[Ticket]) -> None:
        """All children of all prompts, into `tickets`: whoever gives them ends those that are there
        if this is not done to its end. Others have their turn between."""
        self._check_rank(ask.data_parallel_rank)
        headers = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
        kind = RequestOutputKind.DELTA if ask.stream else RequestOutputKind.FINAL_ONLY
        wishes, work = children(ask.params), 0
        for prompt, text, budget in zip(ask.prompts, ask.prompt_texts, ask.budgets, strict=True):
            for index, params in enumerate(wishes):
                core = to_core_request(
                    params,
                    external_req_id=request_id(request),
                    prompt_token_ids=prompt,
                    max_tokens=budget,
                    eos_token_ids=self._ends,
                    bad_words=ask.bad_words,
                    grammar=ask.grammar,
                    priority=ask.priority,
                    cache_salt=ask.cache_salt,
                    data_parallel_rank=ask.data_parallel_rank,
                    client_index=self._llm.client_index,
                    trace_headers=headers or None,
                )
                tickets.append(
                    self._llm.submit(core, params, kind, index, prompt=text, opening=ask.opening)
                )
                work += _CHILD_TOKENS + len(prompt)
                if work > _TURN_TOKENS:
                    work = 0
                    await asyncio.sleep(0)

    def _end_at_deadline(
        self, request: Request, tickets: Sequence[Ticket]
    ) -> asyncio.TimerHandle | None:
        """What ends the requests when their client waits no longer, if it said when."""
        deadline: Deadline | None = getattr(request.state, "deadline", None)
        if deadline is None:
            return None
        ids = [ticket.request.request_id for ticket in tickets]
        loop = asyncio.get_running_loop()
        return loop.call_at(deadline.at_s, self._llm.expire, ids, deadline.timeout_s)

    def _leave(self, tickets: Sequence[Ticket], timer: asyncio.TimerHandle | None) -> None:
        """Nobody reads these any more; what has ended is left alone."""
        if timer is not None:
            timer.cancel()
        self._llm.abort([ticket.request.request_id for ticket in tickets])

    async def _gather(self, tickets: Sequence[Ticket]) -> list[RequestOutput]:
        return [await ticket.collector.get() for ticket in tickets]

    def _check_rank(self, rank: int | None) -> None:
        active = self._llm.active_ranks
        if rank is not None and active and rank not in active:
            raise BadRequest(
                f"data_parallel_rank={rank} takes no requests; the engines are {active}",
                "data_parallel_rank",
            )


def _tokens(output: RequestOutput) -> int:
    """How much an answer may tell."""
    return len(output.prompt_token_ids) + output.outputs[0].num_output_tokens


def _served_by(tickets: Sequence[Ticket]) -> Mapping[str, str]:
    """The ranks that served so far. A stream's headers leave with its first token, and uvicorn
    sends no trailers: ranks that come later are told by a comment at the stream's end."""
    return {ENGINES: engines_of(tickets)}
