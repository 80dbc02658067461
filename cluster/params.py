"""What a user may ask about an answer, checked, and turned into what an engine is told.

`SamplingParams` is the user's wish in text and numbers; an `EngineCoreRequest` is the same wish
in tokens and numbers. What only the text floor can do (stop strings, special tokens in the text)
stays here and is never sent.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from swell.engine.wire import EngineCoreRequest
from swell.worker.wire import SamplerParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
GREEDY_BELOW = 1e-5
"""Dividing logits by less overflows float32, and the answer would be the greedy one anyway."""
SEED_BITS = 63
SHOWN_CHARS = 80


class BadRequest(ValueError):
    """A wish that cannot be met: what, its value, the limit. A 400 at the HTTP edge.

    `param` is the path of the field, `code` a word for programs; both are OpenAI's.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one answer is drawn and when it ends."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that holds this much probability."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the largest probability."""
    seed: int | None = None
    """The same seed gives the same answer; None draws one."""
    max_tokens: int | None = 16
    """Longest answer, in tokens; None: up to the model's limit."""
    min_tokens: int = 0
    """No stop token and no stop string ends the answer before this many tokens."""
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    """The text keeps the stop string, or the stop token's text, that ended it."""
    skip_special_tokens: bool = True
    """Special tokens leave no text."""

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def shown(value: object) -> str:
    """A value as an error message shows it: its repr, shortened."""
    if isinstance(value, str | bytes) and len(value) > SHOWN_CHARS:
        value = value[:SHOWN_CHARS]
        return repr(value) + "..."
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict):
        return _shown_container(value)
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def _shown_container(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> str:
    """At most three elements of the outermost level, so that no value is too large to show."""
    kind = "object" if isinstance(value, dict) else "array"
    if any(isinstance(part, list | tuple | dict) for part in list(value)[:3]) or len(value) > 3:
        return f"an {kind} of {len(value)}"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"an {kind} of {len(value)}"


def validate(params: SamplingParams, *, vocab_size: int) -> None:
    """Check every field; raises `BadRequest` naming field, value and limit."""
    _number("temperature", params.temperature, 0, MAX_TEMPERATURE)
    _number("top_p", params.top_p, 0, 1, above_low=True)
    _number("min_p", params.min_p, 0, 1)
    _integer("top_k", params.top_k, -1, MAX_TOP_K)
    if params.seed is not None:
        _integer("seed", params.seed, -(2**63), 2**63 - 1)
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1, None)
    _integer("min_tokens", params.min_tokens, 0, None)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise BadRequest(
            f"min_tokens={params.min_tokens} is above max_tokens={params.max_tokens}", "min_tokens"
        )
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise BadRequest(f"{name}={shown(getattr(params, name))} must be true or false", name)
    _check_stop_strings(params.stop)
    _check_stop_tokens(params.stop_token_ids, vocab_size)


def check_token_ids(name: str, token_ids: list[int], vocab_size: int) -> None:
    """Refuse ids outside 0 .. vocab_size - 1, naming the first of them."""
    if not token_ids or (
        set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size
    ):
        return
    for index, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadRequest(
                f"{name}[{index}]={shown(token)} is no token id of this model; "
                f"they are 0 .. {vocab_size - 1}",
                f"{name}[{index}]",
            )


def _number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = is_number and low <= value <= high  # type: ignore[operator]  # false for NaN
    if not inside or (above_low and value == low):
        sign = "<" if above_low else "<="
        raise BadRequest(
            f"{name}={shown(value)} is out of range: {low:g} {sign} {name} <= {high:g}", name
        )


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name}={shown(value)} must be an integer", name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise BadRequest(f"{name}={shown(value)} must be {limit}", name)


def _check_stop_strings(stop: object) -> None:
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list):
        raise BadRequest(f"stop={shown(stop)} must be a string or a list of strings", "stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise BadRequest(
            f"stop holds {len(strings)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop"
        )
    for index, text in enumerate(strings):
        path = f"stop[{index}]" if isinstance(stop, list) else "stop"
        if not isinstance(text, str) or not text:
            raise BadRequest(f"{path}={shown(text)} must be a string that is not empty", path)
        if len(text) > MAX_STOP_CHARS:
            raise BadRequest(
                f"{path}={shown(text)} has {len(text)} characters; "
                f"at most {MAX_STOP_CHARS} are allowed",
                path,
            )


def _check_stop_tokens(token_ids: object, vocab_size: int) -> None:
    if not isinstance(token_ids, list):
        raise BadRequest(
            f"stop_token_ids={shown(token_ids)} must be a list of token ids", "stop_token_ids"
        )
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(
            f"stop_token_ids holds {len(token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed",
            "stop_token_ids",
        )
    check_token_ids("stop_token_ids", token_ids, vocab_size)


def internal_request_id(external_req_id: str) -> str:
    """A unique id for the engines: users may send the same id twice."""
    return f"{external_req_id}-{secrets.token_hex(4)}"


def to_core_request(
    params: SamplingParams,
    *,
    external_req_id: str,
    prompt_token_ids: list[int],
    max_tokens: int,
    eos_token_ids: list[int],
    priority: int = 0,
    cache_salt: str | None = None,
    data_parallel_rank: int | None = None,
    client_index: int = 0,
    arrival_time: float | None = None,
    trace_headers: dict[str, str] | None = None,
) -> EngineCoreRequest:
    """The engine's form of a validated wish.

    `max_tokens` is the resolved budget (`PromptProcessor.resolve_max_tokens`). A wish without
    a seed gets a random one here, once: a resubmission to another engine must continue the same
    random stream.
    """
    drawn = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
    sampler = SamplerParams(
        temperature=0.0 if params.temperature < GREEDY_BELOW else float(params.temperature),
        top_k=max(params.top_k, 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seed=drawn & (2**SEED_BITS - 1),
    )
    return EngineCoreRequest(
        request_id=internal_request_id(external_req_id),
        prompt_token_ids=prompt_token_ids,
        sampler=sampler,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        eos_token_ids=[] if params.ignore_eos else eos_token_ids,
        stop_token_ids=list(params.stop_token_ids),
        client_index=client_index,
        arrival_time=time.time() if arrival_time is None else arrival_time,
        priority=priority,
        cache_salt=cache_salt,
        data_parallel_rank=data_parallel_rank,
        trace_headers=trace_headers,
        external_req_id=external_req_id,
    )
