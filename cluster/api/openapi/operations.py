"""Lists every route: its methods, its bodies, and the statuses of its errors."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from swell.cluster.api import cancel, tokenize
from swell.cluster.api.admin import change_requests as changes
from swell.cluster.api.admin import protocol as admin
from swell.cluster.api.admin.live_protocol import LiveEvent
from swell.cluster.api.bodies.protocol_base import ErrorBody
from swell.cluster.api.chat import protocol as chat
from swell.cluster.api.completions import protocol as completions
from swell.cluster.api.live.event_routes import MAX_STREAM_S
from swell.cluster.api.messages import protocol as anthropic
from swell.cluster.api.messages.message import Message, MessagesError, StreamEvent, TokenCount
from swell.cluster.api.pooling import protocol as pooling
from swell.cluster.api.responses import protocol as responses
from swell.cluster.api.responses.events import ResponseEvent
from swell.cluster.api.responses.response import ResponseBody, ResponseDeleted, ResponseItemList
from swell.cluster.api.sessions import protocol as sessions
from swell.cluster.api.web.page_routes import Welcome
from swell.cluster.text.schema.request_body import RequestBody

JSON = "application/json"
_KEY_ERRORS = (400, 401, 403)
_BODY_ERRORS = (*_KEY_ERRORS, 408, 413, 415)
_STREAM_SECONDS = {
    "name": "seconds",
    "in": "query",
    "required": False,
    "description": "How long the stream lasts. 0: it ends after one event.",
    "schema": {"type": "integer", "minimum": 0, "maximum": MAX_STREAM_S, "default": 0},
}
_ANSWER_ERRORS = (*_BODY_ERRORS, 404, 409, 422, 429, 500)


class Operation(NamedTuple):
    """One method of one route. `answer` is a type, or the media type of an answer that has no
    type."""

    method: str
    path: str
    summary: str
    answer: type | str
    body: type[RequestBody] | None = None
    chunk: Any = None
    """The type of one event, if the answer may be streamed."""
    errors: tuple[int, ...] = ()
    status: int = 200
    error: type = ErrorBody
    events: str = (
        "With `stream: true`: events `data: JSON`, each a chunk or, after a failure, an error. "
        "The last event is `data: [DONE]`. The server sends comments (`: ping`) while the stream "
        "waits."
    )
    named_events: bool = False
    """Whether the stream has `event:` lines with the type of each event; such streams do not send
    `[DONE]`."""
    query: tuple[dict[str, Any], ...] = ()
    """The parameters of the query."""
    may_wait: bool = False
    """Whether the request waits for an engine, so that an early head may be sent."""


_show = partial(Operation, "get", errors=_KEY_ERRORS)
_answer = partial(Operation, "post", errors=(*_ANSWER_ERRORS, 503), may_wait=True)
_stored = partial(Operation, errors=(*_KEY_ERRORS, 404, 503))
_convert = partial(Operation, "post", errors=(*_BODY_ERRORS, 404, 503), may_wait=True)
_change = partial(Operation, "post", answer=admin.Accepted, errors=(*_BODY_ERRORS, 503), status=202)

OPERATIONS = (
    Operation("get", "/health", "Check whether the process is up.", admin.Health),
    Operation(
        "get",
        "/ready",
        "Check whether an engine can make progress.",
        admin.Readiness,
        errors=(503,),
    ),
    Operation("get", "/metrics", "Get the metrics for Prometheus.", "text/plain"),
    Operation("get", "/ping", "Same as `/health`.", admin.Health),
    Operation("post", "/ping", "Same as `/health`.", admin.Health),
    Operation("get", "/version", "Get the version of the server.", admin.Version),
    Operation("get", "/load", "Get the number of requests in the engines.", admin.ServerLoad),
    _show("/server_info", "Get the served model, its limits and its parsers.", admin.ServerInfo),
    Operation("get", "/openapi.json", "Get this document.", JSON),
    Operation("get", "/", "Get this document's address; a browser gets the page.", Welcome),
    Operation("get", "/docs", "Get this document as a page.", "text/html"),
    Operation("get", "/ui/{name}", "Get a file of the page.", "text/*", errors=(404,)),
    _show("/v1/models", "List the served models.", admin.ModelList),
    _show(
        "/v1/models/{model}", "Get one served model.", admin.ModelCard, errors=(*_KEY_ERRORS, 404)
    ),
    _answer(
        "/v1/completions",
        "Continue texts or token ids.",
        completions.Completion,
        completions.CompletionRequest,
        completions.CompletionChunk,
    ),
    _answer(
        "/v1/chat/completions",
        "Answer a conversation.",
        chat.ChatCompletion,
        chat.ChatCompletionRequest,
        chat.ChatChunk,
    ),
    _answer(
        "/v1/responses",
        "Answer a conversation of items, and store the answer for later requests.",
        ResponseBody,
        responses.ResponsesRequest,
        ResponseEvent,
        events="With `stream: true`: events `event: TYPE` and `data: JSON`; the last one is "
        "`response.completed`, `response.incomplete` or `response.failed`.",
        named_events=True,
    ),
    _stored(
        "get",
        "/v1/responses/{id}",
        "Get a stored response, or the status of one that runs in the background.",
        ResponseBody,
    ),
    _stored("delete", "/v1/responses/{id}", "Delete a stored response.", ResponseDeleted),
    _stored(
        "post",
        "/v1/responses/{id}/cancel",
        "Cancel a response that runs in the background.",
        ResponseBody,
    ),
    _stored(
        "get",
        "/v1/responses/{id}/input_items",
        "List the input items of a stored response, in pages.",
        ResponseItemList,
    ),
    Operation(
        "post",
        "/v1/sessions",
        "Create a session: a prompt that grows by chunks. Each chunk is a request to "
        "`/v1/completions`.",
        sessions.SessionBody,
        sessions.CreateSessionRequest,
        errors=(*_BODY_ERRORS, 429, 503),
    ),
    _stored(
        "get",
        "/v1/sessions/{id}",
        "Get the number of chunks and tokens of a session.",
        sessions.SessionBody,
    ),
    _stored("delete", "/v1/sessions/{id}", "Delete a session.", sessions.SessionDeleted),
    _answer(
        "/v1/messages",
        "Answer a conversation, as Anthropic's API does.",
        Message,
        anthropic.MessagesRequest,
        StreamEvent,
        errors=(*_ANSWER_ERRORS, 529),
        error=MessagesError,
        events="With `stream: true`: events `event: TYPE` and `data: JSON`; after a failure the "
        "last one is an error.",
        named_events=True,
    ),
    _convert(
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        TokenCount,
        anthropic.CountTokensRequest,
        errors=(*_BODY_ERRORS, 404, 529),
        error=MessagesError,
    ),
    _answer(
        "/v1/embeddings",
        "Compute embeddings of texts, with an embedding model.",
        pooling.EmbeddingList,
        pooling.EmbeddingRequest,
    ),
    *(
        _answer(
            path,
            "Compute the class probabilities of texts, with a classification model.",
            pooling.ClassificationList,
            pooling.ClassifyRequest,
        )
        for path in ("/classify", "/v1/classify")
    ),
    *(
        _answer(
            path,
            "Score pairs of texts, with a cross-encoder or by the cosine of their embeddings.",
            pooling.ScoreList,
            pooling.ScoreRequest,
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        _answer(
            path,
            "Sort documents by their scores with a query, the best first.",
            pooling.RerankResponse,
            pooling.RerankRequest,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    _convert(
        "/tokenize",
        "Get the token ids of a text or a conversation.",
        tokenize.TokenizeResponse,
        tokenize.TokenizeRequest,
    ),
    _convert(
        "/detokenize",
        "Get the text of token ids.",
        tokenize.DetokenizeResponse,
        tokenize.DetokenizeRequest,
    ),
    Operation(
        "post",
        "/v1/cancel",
        "Cancel requests by the ids of their answers or by their `x-request-id`, no matter which "
        "ingress serves them.",
        cancel.CancelResults,
        cancel.CancelRequest,
        errors=(*_BODY_ERRORS, 404, 503),
    ),
    Operation(
        "post",
        "/abort_requests",
        "Same as `/v1/cancel`, with vLLM's body, and with status 200 for unknown ids.",
        cancel.CancelResults,
        cancel.AbortRequest,
        errors=(*_BODY_ERRORS, 503),
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Load a LoRA adapter; requests to any ingress can then use its name as their model.",
        "text/plain",
        changes.LoadAdapterRequest,
        errors=(*_BODY_ERRORS, 503),
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Unload a LoRA adapter. Requests that already use it finish with it.",
        "text/plain",
        changes.UnloadAdapterRequest,
        errors=(*_BODY_ERRORS, 404, 503),
    ),
    _show(
        "/admin/idle",
        "Check that all engines are idle: every slot and KV block is free.",
        admin.IdleReport,
    ),
    _show(
        "/admin/cluster",
        "Get the state of the cluster.",
        admin.ClusterState,
        errors=(*_KEY_ERRORS, 503),
    ),
    _show(
        "/admin/requests/{id}",
        "Get the timeline of a request that runs or finished recently, by the id of its response "
        "or its `x-request-id`, no matter which ingress served it.",
        admin.RequestStories,
        errors=(*_KEY_ERRORS, 404, 503),
    ),
    _show(
        "/admin/events",
        "Get the state of the cluster as an event `state`; with `seconds=N`, one each second.",
        "text/event-stream",
        chunk=LiveEvent,
        errors=(*_KEY_ERRORS, 503),
        events="Events `event: state` and `data: JSON`. The first has everything that is kept, the "
        "others what is new.",
        named_events=True,
        query=(_STREAM_SECONDS,),
    ),
    _change("/admin/scale", "Change the number of engines.", body=changes.ScaleRequest),
    _change(
        "/admin/drain",
        "Remove one engine after it has finished its requests.",
        body=changes.DrainRequest,
    ),
    _change(
        "/admin/upgrade",
        "Replace the engines by engines with another configuration, one after the other.",
        body=changes.UpgradeRequest,
    ),
    _change(
        "/admin/update_weights",
        "Load the weights of another folder into the running engines, one after the other.",
        body=changes.WeightsRequest,
    ),
    _change("/admin/pause", "Pause all engines. Their requests wait.", body=changes.SwitchRequest),
    _change("/admin/resume", "Resume all paused engines.", body=changes.SwitchRequest),
    _change(
        "/admin/sleep",
        "Put all engines to sleep: they stop and free memory until they are woken up.",
        body=changes.SleepRequest,
    ),
    _change(
        "/admin/reset_prefix_cache",
        "Let later requests compute their whole prompts again.",
        body=changes.SwitchRequest,
    ),
    _change("/admin/wake", "Wake up the sleeping engines.", body=changes.SwitchRequest),
)
