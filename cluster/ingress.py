"""The HTTP routes of one ingress, and what they share: tokenizer, engines, keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.admin import AdminRoutes
from swell.cluster.answers import ENGINES, Answer, ChatAnswer, CompletionAnswer, checked
from swell.cluster.async_llm import AsyncLLM
from swell.cluster.detokenizer import Detokenizer
from swell.cluster.http import (
    EventStream,
    HTTPError,
    KeyRing,
    json_response,
    no_such_route,
    read_json_body,
    route,
    unless_gone,
)
from swell.cluster.metrics import PrometheusStats
from swell.cluster.openai import responses as api
from swell.cluster.openai.admin import Readiness
from swell.cluster.openai.decode import decode
from swell.cluster.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    RequestBody,
    TokenizeRequest,
)
from swell.cluster.openapi import openapi_document
from swell.cluster.outputs import RequestOutput, RequestOutputKind
from swell.cluster.params import BadRequest, to_core_request, validate
from swell.cluster.prompt import PromptProcessor, end_token_ids, load_tokenizer
from swell.cluster.routing.router import NoEngine
from swell.cluster.tickets import Ticket, chain, engines_of, merge
from swell.configs.schema import Config
from swell.coordinator.channel import ChannelAddress, ChannelKeys
from swell.coordinator.metrics import ViewCollector

_ASK_S = 5.0
"""How long a probe waits for what the manager knows."""


class Ingress:
    """One ingress replica without its shell. `manager` answers the admin routes."""

    def __init__(
        self, config: Config, coordinator: ChannelAddress, keys: ChannelKeys, manager: Any
    ) -> None:
        self._config = config
        self._model = config.model.served_name
        self._manager = manager
        self._coordinator = coordinator
        self._keys = keys
        self._metrics = PrometheusStats()
        self._users = KeyRing(config.serve.api_keys_file, "serve.api_keys_file")
        self._prompts: PromptProcessor | None = None
        self._ends: list[int] = []
        self.llm: AsyncLLM
        self.app = Starlette(
            routes=self._routes(), exception_handlers={404: no_such_route, 405: no_such_route}
        )

    async def start(self) -> None:
        """Load the tokenizer, listen to the cluster, and learn who is here: a replica that takes
        the place of another one must not refuse what it would have served."""
        path = self._config.model.path
        tokenizer = await asyncio.to_thread(load_tokenizer, path)
        self._ends = end_token_ids(path, tokenizer)
        self._prompts = PromptProcessor(
            tokenizer, self._config.model.max_model_len or 1, 1, self._model
        )
        self.llm = AsyncLLM(
            Detokenizer(tokenizer),
            self._config,
            self._coordinator,
            self._keys,
            self._metrics,
            self._learn_limits,
        )
        self._metrics.registry.register(ViewCollector(lambda: self.llm.view))
        await self.llm.wait_for_view()

    async def stop(self) -> None:
        self.llm.close()

    def _learn_limits(self, max_model_len: int, vocab_size: int) -> None:
        """What the engines can take is known once the first is there."""
        if self._prompts is not None:
            self._prompts.set_limits(max_model_len, vocab_size)

    def _routes(self) -> list[Route]:
        serve = self._config.serve
        admins = KeyRing(serve.admin_keys_file or serve.api_keys_file, "serve.admin_keys_file")
        admin = AdminRoutes(
            admins, self._manager, lambda: self.llm, max_body_bytes=serve.max_body_bytes
        )
        return [
            route("/health", self._health, "GET"),
            route("/ready", self._ready, "GET"),
            route("/metrics", self._show_metrics, "GET"),
            route("/openapi.json", self._openapi, "GET"),
            route("/v1/models", self._models, "GET"),
            route("/v1/models/{model:path}", self._one_model, "GET"),
            route("/v1/completions", self._completions, "POST"),
            route("/v1/chat/completions", self._chat, "POST"),
            route("/tokenize", self._tokenize, "POST"),
            route("/detokenize", self._detokenize, "POST"),
            *admin.routes(),
        ]

    # ---------------------------------------------------------------- generation

    async def _completions(self, request: Request) -> Any:
        body = await self._body(request, CompletionRequest)
        prompts = await self._in_thread_if_long(
            body.prompt, self._ready_prompts().completion_prompts
        )
        answer = CompletionAnswer(
            "cmpl",
            self._model,
            include_usage=body.include_usage,
            return_token_ids=bool(body.return_token_ids),
        )
        return await self._generate(request, body, prompts, answer, "prompt")

    async def _chat(self, request: Request) -> Any:
        body = await self._body(request, ChatCompletionRequest)
        prompt = await self._in_thread_if_long(body.messages, self._ready_prompts().chat_prompt)
        answer = ChatAnswer(
            "chatcmpl",
            self._model,
            include_usage=body.include_usage,
            return_token_ids=bool(body.return_token_ids),
        )
        return await self._generate(request, body, [prompt], answer, "messages")

    async def _generate(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: list[list[int]],
        answer: Answer,
        field: str,
    ) -> Any:
        """Submit every prompt, then answer whole or as a stream."""
        kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
        tickets = self._submit(body, prompts, kind, answer.id, field)
        try:
            if not body.stream:
                outputs = await unless_gone(request, self._gather(tickets))
                return json_response(answer.whole(outputs), headers=_served_by(tickets))
            # The status line waits for the first token: what fails before it has a status.
            merged = merge(self.llm.outputs, tickets)
            first = await unless_gone(request, anext(merged))
            checked(first[1])
            headers = _served_by(tickets)
            events = answer.events(
                chain(first, merged),
                len(tickets),
                told=headers[ENGINES],
                engines=lambda: engines_of(tickets),
            )
            return EventStream(events, headers)
        except BaseException:
            self.llm.abort([ticket.request.request_id for ticket in tickets])
            raise

    def _submit(
        self,
        body: GenerationRequest,
        prompts: list[list[int]],
        kind: RequestOutputKind,
        external_id: str,
        field: str,
    ) -> list[Ticket]:
        """All prompts or none."""
        processor = self._ready_prompts()
        params = body.sampling_params()
        validate(params, vocab_size=processor.vocab_size)
        requests = [
            to_core_request(
                params,
                external_req_id=external_id,
                prompt_token_ids=prompt,
                max_tokens=processor.resolve_max_tokens(
                    len(prompt), params.max_tokens, min_tokens=params.min_tokens, field=field
                ),
                eos_token_ids=self._ends,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                data_parallel_rank=body.data_parallel_rank,
                client_index=self.llm.client_index,
            )
            for prompt in prompts
        ]
        self._check_rank(body.data_parallel_rank)
        return [self.llm.submit(core, params, kind) for core in requests]

    async def _gather(self, tickets: Sequence[Ticket]) -> list[RequestOutput]:
        return [await ticket.collector.get() for ticket in tickets]

    def _check_rank(self, rank: int | None) -> None:
        active = self.llm.active_ranks
        if rank is not None and active and rank not in active:
            raise BadRequest(
                f"data_parallel_rank={rank} takes no requests; the engines are {active}",
                "data_parallel_rank",
            )

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        """A checked body for this model. Raises BadRequest, HTTPError."""
        self._users.check(request)
        raw = await read_json_body(request, self._config.serve.max_body_bytes)
        body: RequestBody = decode(raw, kind)
        model = getattr(body, "model", None)
        if model is not None and model != self._model:
            raise BadRequest(
                f"the model {model!r} does not exist; this server has {self._model!r}",
                "model",
                "model_not_found",
            )
        return body

    def _ready_prompts(self) -> PromptProcessor:
        """The prompt processor, once an engine has told its limits; NoEngine before. While none
        is here any more, requests wait for the next."""
        if self._prompts is None or not self.llm.met_engine:
            raise NoEngine("no engine is ready yet")
        return self._prompts

    async def _in_thread_if_long(self, prompt: Any, tokenize: Any) -> Any:
        """Long texts must not hold up everybody else's tokens."""
        if self._ready_prompts().is_long(prompt):
            return await asyncio.to_thread(tokenize, prompt)
        return tokenize(prompt)

    # ---------------------------------------------------------------- the rest

    async def _models(self, request: Request) -> Response:
        self._users.check(request)
        return json_response(api.ModelList(data=[self._card()]))

    async def _one_model(self, request: Request) -> Response:
        self._users.check(request)
        model = request.path_params["model"]
        if model != self._model:
            raise BadRequest(f"the model {model!r} does not exist", "model", "model_not_found")
        return json_response(self._card())

    def _card(self) -> api.ModelCard:
        longest = self._prompts.max_model_len if self._prompts else 0
        return api.ModelCard(id=self._model, created=0, max_model_len=longest)

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeRequest)
        prompts = self._ready_prompts()
        if body.messages is not None:
            tokenize = partial(
                prompts.chat_prompt, add_generation_prompt=body.add_generation_prompt
            )
        else:
            tokenize = partial(prompts.encode, add_special_tokens=body.add_special_tokens)
        ids = await self._in_thread_if_long(body.messages or body.prompt, tokenize)
        words = prompts.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return json_response(
            api.TokenizeResponse(
                tokens=ids, count=len(ids), max_model_len=prompts.max_model_len, token_strs=words
            )
        )

    async def _detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeRequest)
        return json_response(
            api.DetokenizeResponse(prompt=self._ready_prompts().decode(body.tokens))
        )

    async def _health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """200 if an engine can make progress. A silent coordinator alone is no reason against it:
        serving goes on with the engines that were there."""
        state = self.llm.readiness.look(time.monotonic())
        if state.ranks:
            coordinator = "silent" if state.coordinator_silent else "ok"
            return json_response(Readiness(engines=state.ranks, coordinator=coordinator))
        if state.reason:
            raise HTTPError(503, state.reason, "no_progress", "server_error")
        try:
            async with asyncio.timeout(_ASK_S):
                reason, failed = await self._manager.waiting_for.remote()
        except Exception as error:  # whatever keeps the manager from answering
            raise HTTPError(
                503, f"no engine, and no word of the manager: {error!r}", "starting", "server_error"
            ) from None
        code = "cluster_failed" if failed else "starting"
        raise HTTPError(503, reason, code, "server_error")

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> Response:
        return json_response(openapi_document())


def _served_by(tickets: Sequence[Ticket]) -> dict[str, str]:
    """The ranks that served so far. A stream's headers leave with its first token, and uvicorn
    sends no trailers: ranks that come later are told by a comment at the stream's end."""
    return {ENGINES: engines_of(tickets)}
