"""`SamplingParams`, which users set in text and numbers, and their conversion for engines.

An `EngineCoreRequest` holds the same in tokens and numbers. Parameters that only this process
handles (stop strings, special tokens in the text) are never sent.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from swell.worker.sampler_wire import SamplerParams

SAMPLING_EPS = 1e-5
"""Lower temperatures become 0: dividing logits by them overflows float32, and the answer would be
greedy anyway."""
SEED_BITS = 63
DERIVED_SALT = "\0"
"""Prefix of cache salts that are derived from more than a request's own `cache_salt`. A client's
`cache_salt` must not begin with it: otherwise it could name the salts of others."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer: exactly one of these fields."""

    json: dict[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that matches the whole answer."""
    choice: list[str] | None = None
    """The allowed texts of the answer."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, or in llama.cpp's (GBNF)."""


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends an answer whose last tokens are copies of one pattern, one after another."""

    max_pattern_size: int = 0
    """The largest size of a pattern, in tokens; 0: nothing is detected."""
    min_pattern_size: int = 0
    """The smallest size, in tokens; 0 means 1."""
    min_count: int = 0
    """The number of copies that end the answer, at least 2."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters for the sampling of one answer, and for its end."""

    temperature: float = 1.0
    """Temperature; 0 selects the argmax."""
    top_p: float = 1.0
    """Keeps the smallest set of tokens with at least this probability; 0 keeps only the argmax."""
    top_k: int = 0
    """Keeps the k most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keeps tokens with at least this share of the largest probability."""
    seed: int | None = None
    """The same seed results in the same answer; None uses a random seed."""
    max_tokens: int | None = 16
    """Maximum number of tokens of the answer; None allows up to the model's limit."""
    min_tokens: int = 0
    """Minimum number of tokens before a stop token or stop string can end the answer."""
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    repetition_detection: RepetitionDetection | None = None
    include_stop_str_in_output: bool = False
    """Whether the text includes the stop string, or the stop token's text, that ended it."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    n: int = 1
    """Number of answers to the prompt; answer i samples with `seed + i`."""
    best_of: int | None = None
    """Samples this many answers and keeps the n with the largest mean log probability."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that occurs in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each occurrence in the answer."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the answer."""
    logit_bias: dict[int, float] = {}
    """Maps a token id to a number that is added to its logit, -100 .. 100."""
    bad_words: list[str] = []
    """Texts that must not occur: the last token of each is never sampled after its other tokens."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens are sampled; None allows all."""
    logprobs: int | None = None
    """Number of top tokens whose log probabilities are returned, besides each sampled token's own;
    None returns none."""
    prompt_logprobs: int | None = None
    """The same for every prompt token after the first."""
    return_routed_experts: bool = False
    """Whether the experts that computed each token are returned. Needs `model.routed_experts`."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the answer must have."""
    stream_interval: int | None = None
    """Minimum number of tokens between two outputs of a stream; None uses the server's
    configuration. The first token and the finish are sent at once."""

    @property
    def num_children(self) -> int:
        """Number of answers that are sampled, each by a child: a separate request to the
        engines."""
        return self.best_of or self.n

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def internal_request_id(external_req_id: str) -> str:
    """Returns a unique id for the engines: users may send the same id twice."""
    return f"{external_req_id}-{secrets.token_hex(8)}"


def random_seed() -> int:
    """Returns the seed of a request that does not set one."""
    return secrets.randbits(SEED_BITS)


def sampler_params(
    params: SamplingParams, child_index: int = 0, bad_words: list[list[int]] | None = None
) -> SamplerParams:
    """Returns the engine's form of validated parameters, for one child. `bad_words` are those of
    `params` as token ids.

    Child i samples with `seed + i`, modulo 2**63. Without a seed it gets a random one here, once: a
    resubmission to another engine must continue the same random stream. Children whose answers will
    be ranked return log probabilities.
    """
    is_ranked = params.num_children > params.n and params.logprobs is None
    return SamplerParams(
        temperature=0.0 if params.temperature < SAMPLING_EPS else float(params.temperature),
        top_k=max(params.top_k, 0) if params.top_p else 1,
        top_p=float(params.top_p) or 1.0,
        min_p=float(params.min_p),
        seed=(random_seed() if params.seed is None else (params.seed + child_index) % 2**SEED_BITS),
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        logit_bias=params.logit_bias,
        bad_words=bad_words or [],
        allowed_token_ids=params.allowed_token_ids or [],
        logprobs=0 if is_ranked else params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        routed_experts=params.return_routed_experts,
    )
