"""The fields that completion and chat requests share."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar, Literal

from swell.cluster.api.bodies.sampling_fields import SamplingFields, check_routing
from swell.cluster.api.bodies.timings import IncludeTimings
from swell.cluster.text.errors import BadRequest, Field, bad_value
from swell.cluster.text.json_types import JsonSchema, JsonValue
from swell.cluster.text.params.sampling_params import (
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
)
from swell.cluster.text.prompt.generation_request import Conversation, GenerationRequest, Prompt
from swell.cluster.text.prompt.truncation import FIT_CONTEXT, TokenizeOptions, Truncation
from swell.cluster.text.schema.request_body import RequestBody
from swell.configs.error_text import shown

SESSION_PREFIX = "sess_"
"""The prefix of session ids."""


class StreamOptions(RequestBody, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Report with every output how many tokens its choice has so far."""
    include_obfuscation: bool | None = None
    """Accepted; the answer is never padded."""


class JsonSchemaFormat(RequestBody, kw_only=True):
    """A JSON schema for the answer. It is always enforced, also with `strict: false`."""

    name: str
    description: str | None = None
    schema: JsonSchema | None = None
    strict: bool | None = None


class ResponseFormat(RequestBody, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def structured(self) -> StructuredOutputs | None:
        """Returns this format as `StructuredOutputs`; None: any text."""
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema is None:
                raise BadRequest(
                    "response_format.type='json_schema' needs response_format.json_schema.schema",
                    "response_format.json_schema",
                    "missing_field",
                )
            return StructuredOutputs(json=self.json_schema.schema)
        if self.json_schema is not None:
            raise BadRequest(
                f"response_format.type={self.type!r} does not allow response_format.json_schema; "
                "send type='json_schema'",
                "response_format",
            )
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class GenerationBody(SamplingFields, kw_only=True):
    model: str | None = None
    """None: the model that is served."""
    max_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    """Ends an answer that repeats itself, with the finish reason `repetition`."""
    skip_special_tokens: bool | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    """Return the log probability of each prompt token, and those of this many top tokens."""
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    """Minimum number of tokens between two events of the stream; `serve.stream_interval` is a lower
    bound."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Write `token_id:N` instead of a token's text in log probabilities."""
    return_routed_experts: bool | None = None
    """Return the experts that computed each token, at the end of a stream. Needs
    `model.routed_experts`."""
    best_of: int | None = None
    """Sample this many answers and return the n with the largest mean log probability."""
    echo: bool | None = None
    """The answer begins with the prompt, or with the message that it continues."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own special tokens, such as BOS, to a text."""
    truncate_prompt_tokens: int | None = None
    """How many tokens of a longer prompt are kept; -1: as many as fit together with the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """left (default): the last tokens of the prompt are kept; right: the first."""
    include_timings: IncludeTimings = None
    session_id: str | None = None
    """The prompt is the next chunk of this session (`POST /v1/sessions`): it follows all earlier
    chunks and their answers. An id that does not begin with `SESSION_PREFIX` is a hint for the
    routers of vLLM and SGLang, and is ignored."""

    user: Any = None
    """This field and the next ones do not change the answer."""
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    TAKES_SESSIONS: ClassVar[bool] = False

    @property
    def session(self) -> str | None:
        """The id of the session that this request continues; None: it is not a chunk of a
        session."""
        is_ours = self.session_id is not None and self.session_id.startswith(SESSION_PREFIX)
        return self.session_id if is_ours else None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    def check(self) -> None:
        self.refuse_unsupported()
        if self.session is not None and not self.TAKES_SESSIONS:
            problem = (
                "is only supported by /v1/completions; to continue a conversation, use "
                "previous_response_id of /v1/responses"
            )
            raise bad_value("session_id", self.session, problem)
        self._check_stream()
        tokens = self.truncate_prompt_tokens
        if tokens is not None and tokens < 1 and tokens != FIT_CONTEXT:
            problem = "must be at least 1, or -1 for the model's context length"
            raise bad_value("truncate_prompt_tokens", tokens, problem)
        check_routing(self.cache_salt, self.data_parallel_rank, self.priority)
        self.form()

    def _check_stream(self) -> None:
        if not self.stream:
            if self.stream_options is not None:
                raise BadRequest(
                    "stream_options is only allowed with stream=true", "stream_options"
                )
            return
        if self.continuous_usage and not self.include_usage:
            raise BadRequest(
                "stream_options.continuous_usage_stats=true also needs "
                "stream_options.include_usage=true",
                "stream_options.continuous_usage_stats",
            )
        if self.prompt_logprobs is not None:
            problem = "is not supported with stream=true; leave out one of them"
            raise bad_value("prompt_logprobs", self.prompt_logprobs, problem)
        n = self.n or 1
        if (1 if self.best_of is None else self.best_of) > n:
            raise bad_value(
                "best_of",
                self.best_of,
                f"is above n={n}, which is not supported with stream=true, because the best "
                "answers are only known at the end; leave out stream=true",
            )

    def answer_max_tokens(self) -> int | None:
        """Returns the explicit limit of the answer's tokens, or the endpoint's default."""
        return self.max_tokens

    def tokenize_options(self, *, add_special_tokens: bool) -> TokenizeOptions:
        """Returns how the prompt is tokenized. `add_special_tokens` is the endpoint's default."""
        truncation = None
        if self.truncate_prompt_tokens is not None:
            answer = max(self.answer_max_tokens() or 1, 1)
            side = self.truncation_side or "left"
            truncation = Truncation(self.truncate_prompt_tokens, side, answer)
        given = self.add_special_tokens
        return TokenizeOptions(add_special_tokens if given is None else given, truncation)

    def forms(self) -> dict[str, StructuredOutputs]:
        """Returns the formats that the request sets for the answer, by the path of the field that
        sets each."""
        found: dict[str, StructuredOutputs] = {}
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs
        values = _alias_values(self)
        if values != _NO_ALIAS:
            for (name, own), value in zip(STRUCTURED_OUTPUT_ALIASES.items(), values, strict=True):
                if value is not None and (own, value) != ("json_object", False):
                    found[name] = StructuredOutputs(**{own: value})
        given = self.response_format.structured() if self.response_format else None
        if given is not None:
            schema = given.json is not None
            found["response_format.json_schema.schema" if schema else "response_format"] = given
        return found

    def form(self) -> StructuredOutputs | None:
        """Returns the format of the answer; None: any text. Raises `BadRequest` if two fields set
        one."""
        forms = self.forms()
        if len(forms) > 1:
            one, other, *_ = (path.split(".")[0] for path in forms)
            raise BadRequest(
                [
                    Field(other),
                    " and ",
                    Field(one),
                    " both set the format of the answer; send one of them",
                ],
                one,
            )
        return next(iter(forms.values()), None)

    def endpoint_sampling_params(self) -> Mapping[str, JsonValue]:
        """Returns the sampling parameters that this endpoint spells in its own way."""
        return {}

    def param_names(self) -> Mapping[str, str]:
        """Returns the fields of `SamplingParams` that have another name at this endpoint, with that
        name."""
        return {}

    def generation_request(
        self,
        prompt: list[Prompt] | Conversation,
        defaults: Mapping[str, object] | None,
        *,
        add_special_tokens: bool,
        **own: Any,
    ) -> GenerationRequest:
        """Returns this body as a `GenerationRequest`. `own` holds fields that only this endpoint
        has; the other arguments are those of `sampling_params` and `tokenize_options`. Raises
        `BadRequest`."""
        form_field = next(iter(self.forms()), None)
        return GenerationRequest(
            prompt=prompt,
            params=self.sampling_params(defaults),
            param_names=self.param_names(),
            structured_outputs_field=None if form_field == "structured_outputs" else form_field,
            tokenize_options=self.tokenize_options(add_special_tokens=add_special_tokens),
            stream=bool(self.stream),
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            data_parallel_rank=self.data_parallel_rank,
            **own,
        )

    def sampling_params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Returns the `SamplingParams`, which the caller must check with `validate`. `defaults` are
        the model's, for fields that the request leaves out."""
        sampling: dict[str, Any] = dict(defaults or {})
        for name, value in zip(SHARED_FIELDS, _shared_values(self), strict=True):
            if value is not None:
                sampling[name] = value
        if sampling.get("stop") == "":
            del sampling["stop"]
        if self.logit_bias:
            sampling["logit_bias"] = _bias(self.logit_bias)
        sampling.update(self.endpoint_sampling_params())
        return SamplingParams(
            **sampling, max_tokens=self.answer_max_tokens(), structured_outputs=self.form()
        )


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
"""Earlier names of vLLM, and names of SGLang -> the equivalent field of `structured_outputs`."""
_alias_values = attrgetter(*STRUCTURED_OUTPUT_ALIASES)
_NO_ALIAS = (None,) * len(STRUCTURED_OUTPUT_ALIASES)

_CONVERTED_FIELDS = {"max_tokens", "logit_bias", "structured_outputs", "logprobs"}
SHARED_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationBody.__struct_fields__ and name not in _CONVERTED_FIELDS
)
"""Fields that have the same meaning in a request and in `SamplingParams`."""
_shared_values = attrgetter(*SHARED_FIELDS)


_SHOWN_KEYS = 8
"""The most invalid keys that an error message names."""


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Converts the keys to token ids: JSON has only string keys. Raises `BadRequest`."""
    numbers, wrong = {}, []
    for token, value in bias.items():
        try:
            numbers[int(token)] = value
        except ValueError:
            wrong.append(token)
    if wrong:
        named = ", ".join(map(shown, wrong[:_SHOWN_KEYS]))
        more = f" and {len(wrong) - _SHOWN_KEYS} more" if len(wrong) > _SHOWN_KEYS else ""
        what = "is not a token id" if len(wrong) == 1 else "are not token ids"
        raise BadRequest(f"logit_bias: {named}{more} {what}", "logit_bias")
    return numbers
