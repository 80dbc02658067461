"""Turns processed requests into answers: submits their engine requests, and gathers or streams the
outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
from starlette.responses import Response

from swell.cluster.api.answers.answer_identity import AnswerIdentity, new_identity
from swell.cluster.api.answers.disconnect import run_until_disconnect
from swell.cluster.api.answers.event_stream import EventStreamResponse
from swell.cluster.api.answers.request_recorder import RequestRecorder
from swell.cluster.api.answers.response_writer import (
    ENGINES,
    VERSION,
    AnswerWriter,
    ResponseWriter,
    usage_of,
)
from swell.cluster.api.endpoints import json_response
from swell.cluster.api.request_context import RequestContext
from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.requests.answer_version import AnswerVersion
from swell.cluster.client.requests.merged_outputs import MergedOutputs, OutputsInTurn
from swell.cluster.client.requests.outputs import (
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
    TokenQueue,
)
from swell.cluster.client.requests.request_history import RequestRecord
from swell.cluster.client.requests.request_state import RequestCancelled, RequestState
from swell.cluster.text.errors import bad_value
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.cluster.text.prompt.thread_offload import OffloadPool

_SUBMIT_BATCH_TOKENS = 20_000
"""Prompt tokens that are submitted without yielding to other tasks: some milliseconds of work."""
_CHILD_OVERHEAD_TOKENS = 500
"""The fixed cost of submitting a child, in prompt tokens."""


class ServingHandler:
    """Answers requests with the engines. Long answers are encoded in `offload`."""

    def __init__(self, llm: AsyncLLM, offload: OffloadPool, recorder: RequestRecorder) -> None:
        self._llm = llm
        self._offload = offload
        self._recorder = recorder

    async def pool(
        self, context: RequestContext, processed: ProcessedRequest, answer: AnswerWriter
    ) -> Response:
        """Submits everything, then returns the whole answer. Raises TooManyWaiting."""
        self._llm.check_admission()
        states: list[RequestState] = []
        kind = RequestOutputKind.FINAL_ONLY
        with ExitStack() as ending:
            identity = new_identity(context)
            await self._begin(context, processed, kind, answer, states, ending, identity)
            outputs = MergedOutputs(states, processed.params, kind)
            return await self._whole(context, outputs, answer, ending)

    async def answer(
        self,
        context: RequestContext,
        processed: ProcessedRequest,
        answer: ResponseWriter,
        identity: AnswerIdentity,
    ) -> Response:
        """Submits everything, then returns the whole answer or a stream. Raises TooManyWaiting."""
        self._llm.check_admission()
        return await self.handle_admitted(context, processed, answer, identity)

    async def handle_admitted(
        self,
        context: RequestContext,
        processed: ProcessedRequest,
        answer: ResponseWriter,
        identity: AnswerIdentity,
    ) -> Response:
        """Answers a request that was admitted before, perhaps by an ingress that has terminated:
        submits everything, then returns the whole answer or a stream."""
        states: list[RequestState] = []
        kind = RequestOutputKind.DELTA if processed.stream else RequestOutputKind.FINAL_ONLY
        with ExitStack() as ending:
            await self._begin(context, processed, kind, answer, states, ending, identity)
            merge = OutputsInTurn if identity.is_repeatable else MergedOutputs
            outputs = merge(states, processed.params, kind)
            if not processed.stream:
                return await self._whole(context, outputs, answer, ending)
            # The status line waits for the first token, so that an earlier failure gets a status of
            # its own, but it waits at most `serve.keep_alive_s`.
            keep_alive = context.keep_alive
            if keep_alive is not None:
                keep_alive.call_on_head(outputs.release_first)
            await run_until_disconnect(context.receive, outputs.first())
            # The headers are sent with the first token, and uvicorn sends no trailers: a comment at
            # the end of the stream lists the ranks that served later.
            is_early = keep_alive is not None and keep_alive.head_left is not None
            ranks = "" if is_early else outputs.served_ranks
            events = answer.stream(
                outputs, len(states), sent_engines=ranks, engines=lambda: outputs.served_ranks
            )
            return EventStreamResponse(
                events,
                _headers(outputs),
                on_end=ending.pop_all().close,
                has_failed=lambda: answer.failed,
            )

    async def _begin(
        self,
        context: RequestContext,
        processed: ProcessedRequest,
        kind: RequestOutputKind,
        answer: AnswerWriter,
        states: list[RequestState],
        ending: ExitStack,
        identity: AnswerIdentity,
    ) -> None:
        """Records and submits everything. Closing `ending` aborts the requests that have not
        finished."""
        end = self._llm.abort if answer.has_abort_reason else self._llm.cancel

        def abort() -> bool:
            is_submitting = len(states) < len(processed.requests)
            return end([state.request_id for state in states]) or is_submitting

        record = self._recorder.record(context, processed, answer, abort, ending)
        # Nobody reads the outputs of unfinished requests after `ending` is closed.
        ending.callback(lambda: self._llm.abort([state.request_id for state in states]))
        await self._submit(processed, kind, states, record, identity)
        self._arm_deadline_timer(context, states, ending)

    async def _whole(
        self,
        context: RequestContext,
        outputs: MergedOutputs,
        answer: AnswerWriter,
        ending: ExitStack,
    ) -> Response:
        """Returns the response once all outputs are complete."""
        prompts = await run_until_disconnect(context.receive, outputs.whole())
        ending.close()
        usage = usage_of(prompts, outputs.num_output_tokens)
        whole = await self._offload.run_sized(
            answer.token_bytes * sum(map(_tokens, prompts)),
            lambda: msgspec.json.encode(answer.full_response(prompts, usage)),
        )
        return json_response(whole, headers=_headers(outputs))

    async def _submit(
        self,
        processed: ProcessedRequest,
        kind: RequestOutputKind,
        states: list[RequestState],
        record: RequestRecord,
        identity: AnswerIdentity,
    ) -> None:
        """Submits all engine requests and appends their states to `states`, so that the caller can
        abort them if this fails halfway. Other tasks run in between."""
        self._check_rank(processed.requests[0].data_parallel_rank)
        work, version = 0, AnswerVersion(identity.begun_version)
        collector = TokenQueue if identity.is_repeatable else RequestOutputCollector
        for number, one in enumerate(processed.requests):
            prompt, child = divmod(number, processed.params.num_children)
            states.append(
                self._llm.submit(
                    one,
                    processed.params,
                    kind,
                    child,
                    prompt=processed.prompt_texts[prompt],
                    text_start=processed.text_start,
                    answer_version=version,
                    collector=collector,
                    make_content_parser=processed.make_content_parser,
                )
            )
            record.journeys.append(states[-1].journey)
            work += _CHILD_OVERHEAD_TOKENS + len(one.prompt_token_ids)
            if work > _SUBMIT_BATCH_TOKENS:
                work = 0
                await asyncio.sleep(0)
                if record.is_cancelled:
                    raise RequestCancelled

    def _arm_deadline_timer(
        self, context: RequestContext, states: Sequence[RequestState], ending: ExitStack
    ) -> None:
        """Terminates the requests at their client's deadline, if it has one."""
        if (deadline := context.deadline) is not None:
            ids = [state.request_id for state in states]
            loop = asyncio.get_running_loop()
            timer = loop.call_at(deadline.at_s, self._llm.expire, ids, deadline.timeout_s)
            ending.callback(timer.cancel)

    def _check_rank(self, rank: int | None) -> None:
        active = self._llm.active_ranks
        if rank is not None and active and rank not in active:
            problem = f"is not an engine that accepts requests; the active engines are {active}"
            raise bad_value("data_parallel_rank", rank, problem)


def _headers(outputs: MergedOutputs) -> dict[str, str]:
    version = {VERSION: outputs.version} if outputs.version else {}
    return {ENGINES: outputs.served_ranks, **version}


def _tokens(output: RequestOutput) -> int:
    """Returns the size of the answers to one prompt, in tokens. A byte of a vector counts as one
    token, because it is encoded as fast."""
    answers = sum(part.num_output_tokens + len(part.pooled) for part in output.outputs)
    return len(output.prompt_token_ids) + answers
