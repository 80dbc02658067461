"""Messages between an ingress and an engine.

An ingress sends `EngineCoreRequest`, `AbortRequests`, `UtilityCall`, `ReplaceClient` and
`KeepAlive`; an engine answers each ingress with at most one `EngineCoreOutputs` per step, and each
`KeepAlive` with a `KeepAliveReply`. The messages between the coordinator and an engine are in
`coordinator/wire.py`. Fields are only ever appended, and no default ever changes: what is default
at the end of a request does not travel (`coordinator/codec.py`).

Nothing is lost silently. Both sides count the messages of an ingress's connection to an engine, in
both directions, and each keep-alive and its reply carry the counts. A connection that was lost has
lost what was under way; when the counts show that, the ingress opens a new one (`ReplaceClient`),
and sends its requests again as their next attempts.
"""

from __future__ import annotations

import enum

import msgspec

from swell.configs.lora import Adapter
from swell.worker.sample.wire import Extra, PromptEmbeds, SamplerParams


class EngineCoreRequestType(enum.IntEnum):
    """First element of every message to an engine."""

    ADD = 0
    ABORT = 1
    KEEP_ALIVE = 2
    UTILITY = 3
    REPLACE_CLIENT = 4


class FinishReason(enum.IntEnum):
    """Why a request ended; `str` gives OpenAI's name."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    INVALID = 4
    """It cannot go on because of what its client asked for, as a grammar beyond its limits."""

    def __str__(self) -> str:
        return self.name.lower()


class JourneyEventType(enum.IntEnum):
    """What happens to a request on its way; `str` gives its name. An engine reports those from
    QUEUED to PREEMPTED, the ingress sees the others itself."""

    RECEIVED = 0
    ROUTED = 1
    """An attempt began: the request was sent to an engine."""
    QUEUED = 2
    """It reached the engine; or, without one, it waits in the ingress."""
    SCHEDULED = 3
    """It got a slot and blocks, and is in the next step."""
    PREEMPTED = 4
    """It lost them, and waits again."""
    FIRST_TOKEN = 5
    """The first token of an attempt reached the ingress."""
    RESUBMITTED = 6
    """The attempt ended without the request: another attempt follows."""
    FINISHED = 7

    def __str__(self) -> str:
        return self.name.lower()


class JourneyEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one attempt, as its engine reports it."""

    kind: JourneyEventType
    since_arrival_s: float
    """Seconds since the attempt arrived at the engine: a duration, since clocks of hosts differ."""


class PrefixHint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine at this rank has computed the first tokens of a prompt, for any ingress."""

    rank: int
    num_tokens: int


class EngineCoreRequest(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.ADD.value,
    array_like=True,
    omit_defaults=True,
    gc=False,
):
    """One request as an engine sees it: tokens and numbers, no text.

    Resumption: `output_token_ids` are outputs that exist already, from a preempted or lost run.
    The engine recomputes prompt and outputs and continues; `max_tokens` and `min_tokens` count
    from the first output ever.

    `max_tokens=0` samples nothing: the request ends with the step that computes its last token, and
    the extras of its steps are its answer.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampler: SamplerParams
    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: list[int] = []
    """Empty when the end of sequence is to be ignored."""
    stop_token_ids: list[int] = []
    output_token_ids: list[int] = []
    priority: int = 0
    """Smaller runs first under the policy `priority`."""
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    """Read by the ingress alone: the only rank that may serve it."""
    trace_headers: dict[str, str] | None = None
    """Read by the ingress alone: W3C headers of the HTTP request, under which it is traced."""
    external_req_id: str | None = None
    """Read by the ingress alone: the id that its client knows."""
    skip_prefix_cache: bool = False
    """Compute every prompt token, also those that the prefix cache has: each has log
    probabilities."""
    failed_attempts: int = 0
    """Engines that were lost while they computed it, in a row and before a token of it came."""
    attempt: int = 1
    """Number of this placement of the request on an engine, from 1. It stands in every output, so
    that a late output of an earlier attempt is recognised."""
    prompt_embeds: PromptEmbeds | None = None
    """The prompt, if it is given as embeddings: then `prompt_token_ids` has a 0 for each, and
    `cache_salt` a digest of them, since equal ids have other KV."""
    adapter: Adapter | None = None
    """The adapter (LoRA) with which it is computed; None: the model alone. With one, `cache_salt`
    is of it too: equal tokens have other KV. An engine that lacks it loads it."""
    waited_s: float = 0.0
    """Of a later attempt: how long ago the request arrived at its ingress, when this was sent. A
    duration, since clocks of hosts differ; the engine takes it for `Request.arrival_time`."""
    keep_blocks: bool = False
    """Its KV is evicted after that of other requests, since it is part of a session."""
    prefix_hint: PrefixHint | None = None
    """Read by the ingress alone: where the KV of a part of the prompt probably is."""
    hand_over: str = ""
    """The engine computes the prompt, which fills its blocks, writes their KV under this name, and
    ends the request with the one token that it may have: another engine continues."""
    handed_over: str = ""
    """The name under which another engine has written the KV of all full blocks before the prompt's
    last token; if it is not there, they are computed."""


class AbortRequests(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.ABORT.value,
    array_like=True,
    gc=False,
):
    """The client has given these up: free everything within the step in flight, answer nothing."""

    request_ids: list[str]
    attempts: list[int] = []
    """The attempt of each request that ends, and with it earlier ones; a later attempt goes on.
    Empty: every attempt ends."""


class KeepAlive(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.KEEP_ALIVE.value,
    array_like=True,
    gc=False,
):
    """The ingress still waits. Sent every `cluster.heartbeat_s`; an ingress that sends nothing for
    `cluster.stall_timeout_s` is considered dead, and its requests are dropped."""

    sent: int = 0
    """Messages that it has sent through this connection before, keep-alives not counted."""


class ReplaceClient(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.REPLACE_CLIENT.value,
    array_like=True,
    gc=False,
):
    """The ingress has opened this connection in place of others, of which messages were lost: what
    came through these is dropped, and what may still come is ignored."""

    identities: list[bytes]
    """Identities of the connections that were replaced."""


class UtilityCall(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.UTILITY.value,
    array_like=True,
    gc=False,
):
    """Call a named service of the engine; answered by a `UtilityOutput` with the same id."""

    call_id: int
    method: str
    args: list[str | int | float | bool | None] = []


EngineMessage = EngineCoreRequest | AbortRequests | KeepAlive | UtilityCall | ReplaceClient


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The output of one step for one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token that ended it, or the message of an error."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; sent with the first output."""
    queue_s: float = 0.0
    """Time from arrival to first schedule; sent with the first output."""
    num_preemptions: int = 0
    extras: list[Extra] = []
    """Requested values beside tokens; an output may hold these alone."""
    attempt: int = 1
    """The request's attempt (see `EngineCoreRequest.attempt`)."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class UtilityOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Answer to a `UtilityCall`: the message of a failure, or a result as msgpack."""

    call_id: int
    failure_message: str | None = None
    result: msgspec.Raw = msgspec.Raw(b"\xc0")


class EngineCoreOutputs(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """All outputs of one step for one ingress."""

    outputs: list[EngineCoreOutput] = []
    utility_output: UtilityOutput | None = None
    seq: int = 0
    """Counts the messages with outputs through this connection, from 1: a gap means that some were
    lost, and a count that begins again that the engine has dropped its requests. 0: not counted.
    """
    started: list[str] = []
    """Requests that enter the step which the engine begins next, or whose adapter it loads next.
    This leaves before it begins: if the engine is lost in it, it is known who may be the reason,
    and who only waited."""
    started_attempts: list[int] = []
    """Attempts of the requests in `started`, in the same order."""
    journey_events: list[list[JourneyEvent]] = []
    """What has happened to each of them since it was in `started` before, or since it arrived;
    nothing while its adapter is loaded. The last event of each is that it was scheduled, just
    before this message was sent."""


class KeepAliveReply(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """The engine answers a `KeepAlive`, whether it is idle or not."""

    sent: int
    """As in the `KeepAlive`."""
    received: int
    """Messages of this connection that had come before the `KeepAlive`."""
    seq: int
    """`EngineCoreOutputs.seq` of the last message through this connection; 0: there was none."""
    waits_for_coordinator: bool = False
    """It computes nothing before a message of the coordinator, and that is silent."""


EngineAnswer = EngineCoreOutputs | KeepAliveReply
