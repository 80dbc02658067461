"""Messages between an ingress and an engine.

An ingress sends `EngineCoreRequest`, `AbortRequests`, `UtilityCall`, `ReplaceClient` and
`KeepAlive`. An engine sends `EngineCoreOutputs`: one with the outputs of a step, one before a step
that starts requests of the ingress, and one for each answer to a `UtilityCall`. Requests that fail
outside of a step have one, too. It answers each `KeepAlive` with a `KeepAliveReply`. The messages
between the coordinator and an engine are in `coordinator/wire.py`. New fields must be appended, and
defaults must never change: trailing fields with default values are not sent
(`coordinator/transport/codec.py`).

Message loss is always detected. Both sides count the messages of an ingress's connection to an
engine, in both directions, and each keep-alive and its reply carry the counts. If a connection
breaks, messages in transit are lost. When the counts differ, the ingress opens a new connection
(`ReplaceClient`), and sends its requests again as their next attempts.
"""

from __future__ import annotations

import enum

import msgspec

from swell.configs.lora import Adapter
from swell.worker.sampler_wire import Extra, PromptEmbeds, SamplerParams


class EngineCoreRequestType(enum.IntEnum):
    """First element of every message to an engine."""

    ADD = 0
    ABORT = 1
    KEEP_ALIVE = 2
    UTILITY = 3
    REPLACE_CLIENT = 4


class FinishReason(enum.IntEnum):
    """Why a request finished; `str` returns OpenAI's name."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    INVALID = 4
    """The request cannot continue because of its own parameters, such as a grammar beyond the
    limits."""
    REPETITION = 5
    """The output repeated a pattern (`RepetitionPattern`)."""

    def __str__(self) -> str:
        return self.name.lower()


class JourneyEventType(enum.IntEnum):
    """Events in the life of a request; `str` returns the name. An engine reports those from QUEUED
    to PREEMPTED; the ingress observes the others itself."""

    RECEIVED = 0
    ROUTED = 1
    """An attempt began: the request was sent to an engine."""
    QUEUED = 2
    """The request reached the engine; or, if there is no engine, it waits in the ingress."""
    SCHEDULED = 3
    """The request got a slot and blocks, and is in the next step."""
    PREEMPTED = 4
    """The request lost its slot and blocks, and waits again."""
    FIRST_TOKEN = 5
    """The first token of an attempt reached the ingress."""
    RESUBMITTED = 6
    """The attempt failed before the request was finished: another attempt follows."""
    FINISHED = 7

    def __str__(self) -> str:
        return self.name.lower()


class JourneyEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event of one attempt, as its engine reports it."""

    kind: JourneyEventType
    since_arrival_s: float
    """Seconds since the attempt arrived at the engine: a duration, because the clocks of hosts
    differ."""


class PrefixHint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine at this rank has computed the first tokens of a prompt, for any ingress."""

    rank: int
    num_tokens: int


class RepetitionPattern(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Finish a request whose output ends with at least `min_count` copies of one pattern, one after
    another. Sizes are in tokens."""

    min_size: int
    max_size: int
    min_count: int


class EngineCoreRequest(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.ADD.value,
    array_like=True,
    omit_defaults=True,
    gc=False,
):
    """One request as an engine sees it: tokens and numbers, no text.

    Resumption: `output_token_ids` are outputs of an earlier run that was preempted or lost. The
    engine recomputes prompt and outputs and continues; `max_tokens` and `min_tokens` count from the
    first output of the first run.

    `max_tokens=0` samples nothing: the request finishes with the step that computes its last token,
    and the extras of its steps are its answer.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampler: SamplerParams
    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: list[int] = []
    """Empty if the end of sequence must be ignored."""
    stop_token_ids: list[int] = []
    output_token_ids: list[int] = []
    priority: int = 0
    """Requests with smaller values run first under the policy `priority`."""
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    """Used only by the ingress: the only rank that may serve the request."""
    trace_headers: dict[str, str] | None = None
    """Used only by the ingress: W3C trace headers of the HTTP request."""
    external_req_id: str | None = None
    """Used only by the ingress: the id that the client knows."""
    skip_prefix_cache: bool = False
    """Compute every prompt token, also those in the prefix cache, so that each has log
    probabilities."""
    failed_attempts: int = 0
    """Number of engines in a row that were lost while they computed the request, without a token of
    it in between."""
    attempt: int = 1
    """Number of this placement of the request on an engine, from 1. Every output contains it, so
    that a late output of an earlier attempt is recognized."""
    prompt_embeds: PromptEmbeds | None = None
    """The prompt, if it consists of embeddings: then `prompt_token_ids` has a 0 for each of them,
    and `cache_salt` is a digest of them, because equal ids have different KV."""
    adapter: Adapter | None = None
    """The LoRA adapter of the request; None: only the base model. `cache_salt` depends on it too,
    because equal tokens have different KV. An engine that lacks the adapter loads it."""
    waited_s: float = 0.0
    """For a later attempt: the time from the request's arrival at its ingress until this was sent.
    A duration, because the clocks of hosts differ; the engine computes `Request.arrival_time` from
    it."""
    keep_blocks: bool = False
    """Evict its KV after that of other requests, because it belongs to a session."""
    prefix_hint: PrefixHint | None = None
    """Used only by the ingress: which engine probably has the KV of a part of the prompt."""
    hand_over: str = ""
    """The engine computes the prompt, which fills its blocks, writes their KV to a file of this
    name, and finishes the request after one token: another engine continues."""
    handed_over: str = ""
    """The name under which another engine has written the KV of all full blocks before the prompt's
    last token. If the file does not exist, the blocks are computed."""
    repetition: RepetitionPattern | None = None


class AbortRequests(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.ABORT.value,
    array_like=True,
    gc=False,
):
    """The client has cancelled these requests: free everything within the step in flight, and
    answer nothing."""

    request_ids: list[str]
    attempts: list[int] = []
    """The attempt of each request that is aborted, together with earlier ones; a later attempt
    continues. Empty: every attempt is aborted."""


class KeepAlive(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.KEEP_ALIVE.value,
    array_like=True,
    gc=False,
):
    """The ingress is alive. Sent every `cluster.heartbeat_s`; an ingress that sends nothing for
    `cluster.stall_timeout_s` counts as dead, and its requests are dropped."""

    sent: int = 0
    """Number of messages that it has sent on this connection before, without keep-alives."""


class ReplaceClient(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.REPLACE_CLIENT.value,
    array_like=True,
    gc=False,
):
    """The ingress has opened this connection to replace others, which have lost messages: requests
    on those are dropped, and their late messages are ignored."""

    identities: list[bytes]
    """Identities of the replaced connections."""


class UtilityCall(
    msgspec.Struct,
    frozen=True,
    tag=EngineCoreRequestType.UTILITY.value,
    array_like=True,
    gc=False,
):
    """Call a named function of the engine; answered by a `UtilityOutput` with the same id."""

    call_id: int
    method: str
    args: list[str | int | float | bool | None] = []


EngineMessage = EngineCoreRequest | AbortRequests | KeepAlive | UtilityCall | ReplaceClient


REPETITION_DETECTED = "repetition_detected"
"""The stop reason of a repetition, as in vLLM."""


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The output of one step for one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token that finished it, `REPETITION_DETECTED`, or an error message."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache; sent with the first output."""
    queue_s: float = 0.0
    """Time from arrival to first schedule, in seconds; sent with the first output."""
    num_preemptions: int = 0
    extras: list[Extra] = []
    """Requested values in addition to tokens; an output may contain only these."""
    attempt: int = 1
    """The request's attempt (see `EngineCoreRequest.attempt`)."""
    num_nans_in_logits: int = 0
    """The number of NaN in the logits of a failed request; 0 if they are not counted
    (`model.compute_nans_in_logits`)."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


OutputsByClient = dict[bytes, list[EngineCoreOutput]]
"""Ingress -> outputs for it."""


class UtilityOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The answer to a `UtilityCall`: an error message, or a result as msgpack."""

    call_id: int
    failure_message: str | None = None
    result: msgspec.Raw = msgspec.Raw(b"\xc0")


class EngineCoreOutputs(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """All outputs of one step for one ingress, the requests that start in the next step, or the
    answer to a call."""

    outputs: list[EngineCoreOutput] = []
    utility_output: UtilityOutput | None = None
    seq: int = 0
    """Counts the messages with outputs on this connection, from 1. A gap means that some were lost;
    a restart from 1 means that the engine has dropped its requests. 0: not counted."""
    started: list[str] = []
    """Requests that get their slots in the engine's next step, or whose adapter it loads next. This
    is sent before the step begins: if the engine is lost in the step, the ingress knows which
    requests may be the cause, and which ones only waited."""
    started_attempts: list[int] = []
    """Attempts of the requests in `started`, in the same order."""
    journey_events: list[list[JourneyEvent]] = []
    """Events of each of these requests since it was last in `started`, or since it arrived; empty
    while its adapter is loaded. The last event of each is SCHEDULED, just before this message was
    sent."""


class KeepAliveReply(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """The answer to a `KeepAlive`, from an idle or busy engine."""

    sent: int
    """The value in the `KeepAlive`."""
    received: int
    """Number of messages that arrived on this connection before the `KeepAlive`."""
    seq: int
    """`EngineCoreOutputs.seq` of the last message on this connection; 0: there was none."""
    waits_for_coordinator: bool = False
    """Whether the engine must wait for the coordinator before it computes, and the coordinator is
    silent or has formed the newest group without this engine."""


EngineAnswer = EngineCoreOutputs | KeepAliveReply
