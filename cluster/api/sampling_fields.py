"""Fields for sampling and routing: the same at every endpoint of OpenAI's kind."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from swell.cluster.text.sampling_params import BadRequest, StructuredOutputs, shown
from swell.cluster.text.schema.request_body import RequestBody

STRUCTURED_OUTPUT_ALIASES = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Earlier names of vLLM, and those of SGLang -> the same field of `structured_outputs`."""
_alias_values = attrgetter(*STRUCTURED_OUTPUT_ALIASES)
_NO_ALIAS = (None,) * len(STRUCTURED_OUTPUT_ALIASES)


class SamplingFields(RequestBody, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """OpenAI has few of the fields from here on; vLLM has them under the same names."""
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
    """Token id -> -100 .. 100, added to its logit."""
    bad_words: list[str] | None = None
    """Texts that the answer must not hold, as the tokenizer writes them."""
    allowed_token_ids: list[int] | None = None
    """The answer has no other tokens."""
    structured_outputs: StructuredOutputs | None = None
    """A form for the answer: json, json_object, regex, choice or grammar."""
    guided_json: dict[str, Any] | bool | str | None = None
    """This and the next fields are other names of those of `structured_outputs`."""
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    priority: int | None = None
    """Smaller runs first under `scheduler.policy: priority`."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of equal salt."""
    data_parallel_rank: int | None = None
    """Ask for one engine."""

    def forms(self) -> dict[str, StructuredOutputs]:
        """The forms that are given, by the path of the field that gives each."""
        found: dict[str, StructuredOutputs] = {}
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs
        values = _alias_values(self)
        if values == _NO_ALIAS:
            return found
        for (name, own), value in zip(STRUCTURED_OUTPUT_ALIASES.items(), values, strict=True):
            if value is not None and (own, value) != ("json_object", False):
                found[name] = StructuredOutputs(**{own: value})
        return found


MAX_SALT_CHARS = 1024


def check_routing(cache_salt: str | None, rank: int | None, priority: int | None) -> None:
    """The fields that say where and when, not what."""
    if cache_salt == "":
        raise BadRequest("cache_salt='' must not be empty; leave it out", "cache_salt")
    if cache_salt is not None and len(cache_salt) > MAX_SALT_CHARS:
        raise BadRequest(
            f"cache_salt has {len(cache_salt)} characters; at most {MAX_SALT_CHARS} are allowed",
            "cache_salt",
        )
    if rank is not None and not 0 <= rank < 2**31:
        raise BadRequest(
            f"data_parallel_rank={shown(rank)} must be at least 0 and name an engine that serves",
            "data_parallel_rank",
        )
    if priority is not None and not -(2**31) <= priority < 2**31:
        raise BadRequest(
            f"priority={shown(priority)} must be between {-(2**31)} and {2**31 - 1}", "priority"
        )
