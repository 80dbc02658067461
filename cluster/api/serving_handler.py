"""From request parameters to their answer: children are submitted, what they give is gathered or
streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from swell.cluster.api.disconnect import with_cancellation
from swell.cluster.api.event_stream import EventStreamResponse
from swell.cluster.api.response_writer import ENGINES, ResponseWriter, first_output, usage_of
from swell.cluster.api.routing import json_response, request_id
from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.deadline import Deadline
from swell.cluster.client.outputs import RequestOutput, RequestOutputKind
from swell.cluster.client.parallel_sampling import best, children, merge_outputs
from swell.cluster.client.request_state import Outputs, Ticket, served_ranks
from swell.cluster.text.input_processor import RequestParams
from swell.cluster.text.offload import OffloadPool
from swell.cluster.text.sampling_params import BadRequest, to_core_request

TRACE_HEADERS = ("traceparent", "tracestate")
_SUBMIT_BATCH_TOKENS = 20_000
"""Prompt tokens that are submitted at once: some milliseconds."""
_BYTES_PER_TOKEN = 1
"""Of an answer, as work: a token is written faster than one is read."""
_CHILD_OVERHEAD_TOKENS = 500
"""What a child costs beside its prompt."""


class ServingHandler:
    """The engines behind the routes that answer. `ends` are the model's end tokens; `offload`
    writes long answers."""

    def __init__(self, llm: AsyncLLM, ends: list[int], offload: OffloadPool) -> None:
        self._llm = llm
        self._offload = offload
        self._eos_token_ids = ends

    async def answer(
        self, request: Request, request_params: RequestParams, answer: ResponseWriter
    ) -> Any:
        """Submit everything, then answer whole or as a stream. Raises TooManyWaiting."""
        self._llm.check_admission()
        return await self.handle_admitted(request, request_params, answer)

    async def handle_admitted(
        self, request: Request, request_params: RequestParams, answer: ResponseWriter
    ) -> Any:
        """The same for what was admitted before, perhaps by an ingress that is gone."""
        tickets: list[Ticket] = []
        timer: asyncio.TimerHandle | None = None
        try:
            await self._submit(request, request_params, tickets)
            timer = self._arm_deadline_timer(request, tickets)
            if not request_params.stream:
                outputs = await with_cancellation(request, self._gather(tickets))
                self._abort_all(tickets, timer)
                whole = await self._offload.run_sized(
                    _BYTES_PER_TOKEN * sum(map(_tokens, outputs)),
                    self._full_response,
                    request_params,
                    answer,
                    outputs,
                )
                return json_response(whole, headers=_served_by(tickets))
            # The status line waits for the first token: what fails before it has a status.
            stream = Outputs(tickets)
            for _, output in await with_cancellation(request, stream.first()):
                first_output(output)
            headers = _served_by(tickets)
            events = answer.stream(
                stream,
                len(tickets),
                sent_engines=headers[ENGINES],
                engines=lambda: served_ranks(tickets),
            )
            return EventStreamResponse(
                events, headers, on_end=lambda: self._abort_all(tickets, timer)
            )
        except BaseException:
            self._abort_all(tickets, timer)
            raise

    def _full_response(
        self, request_params: RequestParams, answer: ResponseWriter, outputs: list[RequestOutput]
    ) -> bytes:
        """The body as JSON; `outputs`: one a child, the children of each prompt in a row."""
        for output in outputs:
            first_output(output)
        count = len(outputs) // len(request_params.prompts)
        prompts = [
            merge_outputs(outputs[first : first + count]) for first in range(0, len(outputs), count)
        ]
        completion_tokens = sum(output.outputs[0].num_output_tokens for output in outputs)
        usage = usage_of(prompts, completion_tokens)
        if count > request_params.params.n:
            prompts = [best(output, request_params.params) for output in prompts]
        return msgspec.json.encode(answer.full_response(prompts, usage))

    async def _submit(
        self, request: Request, request_params: RequestParams, tickets: list[Ticket]
    ) -> None:
        """All children of all prompts, into `tickets`: whoever gives them ends those that are there
        if this is not done to its end. Others have their turn between."""
        self._check_rank(request_params.data_parallel_rank)
        headers = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
        kind = RequestOutputKind.DELTA if request_params.stream else RequestOutputKind.FINAL_ONLY
        child_params, work = children(request_params.params), 0
        for prompt, text, budget in zip(
            request_params.prompts,
            request_params.prompt_texts,
            request_params.max_tokens_per_prompt,
            strict=True,
        ):
            for index, params in enumerate(child_params):
                core = to_core_request(
                    params,
                    external_req_id=request_id(request),
                    prompt_token_ids=prompt,
                    max_tokens=budget,
                    eos_token_ids=self._eos_token_ids,
                    bad_words=request_params.bad_words,
                    grammar=request_params.grammar,
                    priority=request_params.priority,
                    cache_salt=request_params.cache_salt,
                    data_parallel_rank=request_params.data_parallel_rank,
                    client_index=self._llm.client_index,
                    trace_headers=headers or None,
                )
                tickets.append(
                    self._llm.submit(
                        core, params, kind, index, prompt=text, text_start=request_params.text_start
                    )
                )
                work += _CHILD_OVERHEAD_TOKENS + len(prompt)
                if work > _SUBMIT_BATCH_TOKENS:
                    work = 0
                    await asyncio.sleep(0)

    def _arm_deadline_timer(
        self, request: Request, tickets: Sequence[Ticket]
    ) -> asyncio.TimerHandle | None:
        """What ends the requests when their client waits no longer, if it said when."""
        deadline: Deadline | None = getattr(request.state, "deadline", None)
        if deadline is None:
            return None
        ids = [ticket.request.request_id for ticket in tickets]
        loop = asyncio.get_running_loop()
        return loop.call_at(deadline.at_s, self._llm.expire, ids, deadline.timeout_s)

    def _abort_all(self, tickets: Sequence[Ticket], timer: asyncio.TimerHandle | None) -> None:
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
    return {ENGINES: served_ranks(tickets)}
