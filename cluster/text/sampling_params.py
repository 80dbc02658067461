"""`SamplingParams`, which a user gives in text and numbers, and what an engine gets of them.

An `EngineCoreRequest` holds the same in tokens and numbers. What only this process can do (stop
strings, special tokens in the text) is never sent.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from swell.cluster.text.field_path import PathNames
from swell.configs.lora import Adapter
from swell.configs.shown import shown as shown
from swell.engine.wire import EngineCoreRequest
from swell.worker.sample.wire import Grammar, PoolingParams, PromptEmbeds, SamplerParams

SAMPLING_EPS = 1e-5
"""Dividing logits by less overflows float32, and the answer would be the greedy one anyway."""
SEED_BITS = 63
DERIVED_SALT = "\0"
"""How cache salts begin that are derived from more than a request's own `cache_salt`, which may not
begin so: else it could name what belongs to others."""


class Field(str):
    """The path of a field within the message of a `BadRequest`."""


class BadRequest(ValueError):
    """A request that cannot be served: which field, its value, the limit. HTTP status 400.

    `param` is the path of the field, `code` a name for programs; both are OpenAI's. A message is a
    text, or its parts: those that are a `Field` name fields of the request, and an API that has
    other names for them prints these (`renamed`). A message that begins with `param` names it.
    """

    def __init__(
        self, message: str | Sequence[str], param: str | None = None, code: str | None = None
    ) -> None:
        parts = [message] if isinstance(message, str) else message
        head, rest = parts[0], parts[0].removeprefix(param or "")
        if rest != head and not isinstance(head, Field) and not re.match(r"\w", rest):
            parts = [Field(param), rest, *parts[1:]]
        self.message = "".join(parts)
        super().__init__(self.message)
        self._parts = parts
        self.param = param
        self.code = code

    def renamed(self, names: PathNames) -> BadRequest:
        """The same error, whose fields have other names."""
        parts = [Field(names(part)) if isinstance(part, Field) else part for part in self._parts]
        return BadRequest(parts, None if self.param is None else names(self.param), self.code)

    def with_note(self, note: str) -> BadRequest:
        """The same error with a sentence more."""
        return BadRequest([*self._parts, note], self.param, self.code)

    def within(self, path: str) -> BadRequest:
        """The same error, of a part of the request that is at `path`."""
        param = path if self.param is None else f"{path}.{self.param}"
        return BadRequest([Field(path), f": {self.message}"], param, self.code)


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A form for the answer: exactly one of these."""

    json: dict[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """The whole answer matches it."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A context-free grammar, in EBNF as Lark or llama.cpp (GBNF) write it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one answer is sampled and when it ends."""

    temperature: float = 1.0
    """0 takes the argmax."""
    top_p: float = 1.0
    """Keep the smallest set of tokens that holds this much probability; 0: the argmax alone."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the largest probability."""
    seed: int | None = None
    """The same seed gives the same answer; None: a random one."""
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
    n: int = 1
    """Answers to the prompt; answer i samples with `seed + i`."""
    best_of: int | None = None
    """Sample this many answers and keep the n with the largest mean log probability."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each token that the answer has."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the answer has it."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer."""
    logit_bias: dict[int, float] = {}
    """Token id -> what is added to its logit, -100 .. 100."""
    bad_words: list[str] = []
    """Texts whose last token is never sampled after the others."""
    allowed_token_ids: list[int] | None = None
    """No other token is sampled."""
    logprobs: int | None = None
    """Return each token's log probability, and those of this many top tokens."""
    prompt_logprobs: int | None = None
    """The same of every prompt token after the first."""
    return_routed_experts: bool = False
    """Return the experts that computed each token. Needs `model.routed_experts`."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the answer must have."""
    stream_interval: int | None = None
    """Tokens between two outputs of a stream, at least; None: as the server is configured. The
    first token and the end come at once."""

    @property
    def num_children(self) -> int:
        """Answers that are sampled, each by a child: a request of its own to the engines."""
        return self.best_of or self.n

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def bad_value(path: str, value: object, problem: str, code: str | None = None) -> BadRequest:
    """A field whose value is wrong. `problem` follows the value, as "must be at least 1"."""
    return BadRequest(f"{path}={shown(value)} {problem}", path, code)


def child_sampling_params(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each child: child i samples with `seed + i`, within 63 bits, or, without a
    seed, with a random one of its own that is chosen later. Children that will be ranked return log
    probabilities."""
    if params.n == 1 and params.best_of is None:
        return [params]
    is_ranked = params.num_children > params.n and params.logprobs is None
    return [
        msgspec.structs.replace(
            params,
            n=1,
            best_of=None,
            seed=None if params.seed is None else (params.seed + i) % 2**SEED_BITS,
            logprobs=0 if is_ranked else params.logprobs,
        )
        for i in range(params.num_children)
    ]


def internal_request_id(external_req_id: str) -> str:
    """A unique id for the engines: users may send the same id twice."""
    return f"{external_req_id}-{secrets.token_hex(8)}"


def to_core_request(
    params: SamplingParams,
    *,
    external_req_id: str,
    prompt_token_ids: list[int],
    max_tokens: int,
    eos_token_ids: list[int],
    bad_words: list[list[int]] | None = None,
    grammar: Grammar | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    data_parallel_rank: int | None = None,
    trace_headers: dict[str, str] | None = None,
    pooling: PoolingParams | None = None,
    skip_prefix_cache: bool = False,
    prompt_embeds: PromptEmbeds | None = None,
    adapter: Adapter | None = None,
) -> EngineCoreRequest:
    """The engine's form of validated parameters.

    `max_tokens` is the resolved budget (`PromptProcessor.resolve_max_tokens`); `bad_words` and
    `grammar` are what `params` have as text. Without a seed the request gets a random one here,
    once: a resubmission to another engine must continue the same random stream.
    """
    seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
    sampler = SamplerParams(
        temperature=0.0 if params.temperature < SAMPLING_EPS else float(params.temperature),
        top_k=max(params.top_k, 0) if params.top_p else 1,
        top_p=float(params.top_p) or 1.0,
        min_p=float(params.min_p),
        seed=seed & (2**SEED_BITS - 1),
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        logit_bias=params.logit_bias,
        bad_words=bad_words or [],
        allowed_token_ids=params.allowed_token_ids or [],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=grammar,
        pooling=pooling,
        routed_experts=params.return_routed_experts,
    )
    return EngineCoreRequest(
        request_id=internal_request_id(external_req_id),
        prompt_token_ids=prompt_token_ids,
        sampler=sampler,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        eos_token_ids=[] if params.ignore_eos else eos_token_ids,
        stop_token_ids=list(params.stop_token_ids),
        priority=priority,
        cache_salt=cache_salt,
        data_parallel_rank=data_parallel_rank,
        trace_headers=trace_headers,
        external_req_id=external_req_id,
        skip_prefix_cache=skip_prefix_cache or params.prompt_logprobs is not None,
        prompt_embeds=prompt_embeds,
        adapter=adapter,
    )
