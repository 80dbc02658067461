"""Fields for sampling and routing, shared by all OpenAI-compatible endpoints."""

from __future__ import annotations

from typing import Any

from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.params.sampling_params import DERIVED_SALT, StructuredOutputs
from swell.cluster.text.params.validate_params import Integers
from swell.cluster.text.schema.request_body import RequestBody


class SamplingFields(RequestBody, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """OpenAI's API lacks most of the fields from here on; vLLM has them under the same names."""
    min_p: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Maps token ids to biases of -100 .. 100, which are added to their logits."""
    bad_words: list[str] | None = None
    """Texts that must not occur in the answer, as the tokenizer writes them."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that the answer may contain."""
    structured_outputs: StructuredOutputs | None = None
    """The format of the answer: json, json_object, regex, choice or grammar."""
    guided_json: dict[str, Any] | bool | str | None = None
    """This field and the next ones are other names of fields of `structured_outputs`."""
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    priority: int | None = None
    """Smaller values run first under `scheduler.policy: priority`."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    data_parallel_rank: int | None = None
    """The rank of the engine that must serve the request."""


MAX_SALT_CHARS = 1024
_PRIORITIES = Integers(-(2**31), 2**31 - 1, optional=True)


def check_routing(cache_salt: str | None, rank: int | None, priority: int | None) -> None:
    """Checks the fields of routing and scheduling, which do not change the answer. Raises
    BadRequest."""
    if cache_salt == "":
        raise bad_value("cache_salt", "", "must not be empty; leave it out")
    if cache_salt is not None and cache_salt.startswith(DERIVED_SALT):
        raise bad_value("cache_salt", cache_salt, "must not begin with the character NUL")
    if cache_salt is not None and len(cache_salt) > MAX_SALT_CHARS:
        raise BadRequest(
            f"cache_salt has {len(cache_salt)} characters; at most {MAX_SALT_CHARS} are allowed",
            "cache_salt",
        )
    if rank is not None and not 0 <= rank < 2**31:
        problem = "must be at least 0, and the rank of an active engine"
        raise bad_value("data_parallel_rank", rank, problem)
    _PRIORITIES.check("priority", priority)
