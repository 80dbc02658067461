"""Converts texts for pooling to what engines get: prompts, tokens, limits, activations.

A text may have a prompt of the model in front of it. The tokenizer's template joins a pair of texts
into one sequence. A text or pair that is truncated keeps the special tokens at its end; the tokens
between them are cut, in a pair first those of the longer text. An empty text has only its special
tokens, as in sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.params.sampling_params import SamplingParams, internal_request_id
from swell.cluster.text.params.validate_params import check_length
from swell.cluster.text.parsers.base import ContentParser
from swell.cluster.text.prompt.generation_request import MAX_PROMPTS, Prompt
from swell.cluster.text.prompt.input_processor import ProcessedRequest, check_priority
from swell.cluster.text.prompt.prompt_processor import PromptProcessor
from swell.cluster.text.prompt.truncation import (
    FIT_CONTEXT,
    PLAIN_TEXT,
    TokenizeOptions,
    Truncation,
)
from swell.cluster.text.tokens.detokenizer import TextStart
from swell.cluster.text.tokens.tokenizer import read_json_value
from swell.configs.pooling import DECODERS, PoolingSpec, read_pooling
from swell.configs.schema import ModelConfig
from swell.configs.serve import TruncatePrompts
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import Activation, PoolingParams, SamplerParams

Task = Literal["embed", "classify", "score"]
Input = Prompt | tuple[str, str]
"""A text, token ids, or a pair of texts."""
_QUERY, _DOCUMENT = ("query",), ("document", "passage", "corpus")
INPUT_TYPES: dict[str, tuple[str, ...]] = {
    "query": _QUERY,
    "search_query": _QUERY,
    "document": _DOCUMENT,
    "passage": _DOCUMENT,
    "search_document": _DOCUMENT,
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Maps an `input_type` of NIM, Cohere or Voyage to the names of the prompt that a model may have
for it. For queries and documents these are the names that sentence-transformers looks for, in its
order."""
_ACTIVATIONS = {"Identity": Activation.NONE, "Sigmoid": Activation.SIGMOID}
_OF_PROBLEMS = {
    "regression": Activation.NONE,
    "multi_label_classification": Activation.SIGMOID,
    "single_label_classification": Activation.SOFTMAX,
}


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one vector for each input."""

    task: Task
    inputs: Sequence[Input]
    fields: Sequence[str]
    """Names of the inputs in error messages; in a pair, of the second text."""
    first_fields: Sequence[str] = ()
    """Names of the first text of each pair."""
    activates: bool | None = None
    """Whether to normalize embeddings, or to turn scores into probabilities; None follows the
    model's files."""
    dimensions: int | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    """The type of the texts, instead of `prompt_name`: one of `INPUT_TYPES`."""
    truncate: TruncatePrompts | None = None
    """The handling of longer texts; None follows the server's configuration. The truncation in
    `tokenize_options` takes precedence."""
    tokenize_options: TokenizeOptions = PLAIN_TEXT
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    external_req_id: str = ""
    """The id that the client knows."""
    trace_headers: dict[str, str] | None = None
    """W3C trace headers of the HTTP request."""


def load_pooling(model: ModelConfig) -> PoolingSpec | None:
    """Returns how the model pools; None if it samples tokens. Raises ConfigError."""
    return read_pooling(
        model.runner,
        model.pooling,
        lambda name: read_json_value(model.path, name),
        model.classifier_tokens,
        model.pair_template,
    )


class PoolingProcessor(msgspec.Struct, frozen=True):
    """Converts a `PoolingRequest` to a `ProcessedRequest` for one model, for HTTP and for `LLM`.
    Safe to call from several threads."""

    prompts: PromptProcessor
    spec: PoolingSpec
    max_children: int | None = None
    policy: str = "priority"
    """The scheduler's policy."""
    truncate: TruncatePrompts = "none"
    """The value of `serve.truncate_prompts`."""

    def check_task(self, task: Task) -> None:
        """Raises `BadRequest` if the model does not support the task."""
        spec = self.spec
        if task == "embed" and not spec.embeds:
            raise _wrong_task("is a classifier and returns no embeddings; use POST /classify")
        if task == "classify" and spec.embeds:
            raise _wrong_task("returns embeddings and has no classes; use POST /v1/embeddings")
        if task == "score" and not spec.embeds and spec.size != 1:
            raise _wrong_task(
                f"has {spec.size} classes, but a score of a pair of texts needs a model with one "
                "class; use POST /classify"
            )

    def process(self, request: PoolingRequest) -> ProcessedRequest:
        """Converts a request. Raises `BadRequest`."""
        self.check_task(request.task)
        check_priority(request.priority, self.policy)
        limit = min(MAX_PROMPTS, self.max_children or MAX_PROMPTS)
        check_length(request.fields[-1].partition("[")[0], request.inputs, "texts", limit)
        prefix, options = self._prefix(request), self._tokenize_options(request)
        pooling = PoolingParams(self._activation(request), self._dimensions(request))
        requests = []
        for one, *fields in zip(
            request.inputs, request.first_fields or request.fields, request.fields, strict=True
        ):
            ids, segment_start = self._token_ids(one, prefix, options, *fields)
            sampler = SamplerParams(
                pooling=msgspec.structs.replace(pooling, segment_start=segment_start)
            )
            requests.append(self._engine_request(request, ids, sampler))
        return ProcessedRequest(
            requests=requests,
            prompt_texts=[None] * len(requests),
            text_start=TextStart.VERBATIM,
            params=SamplingParams(),
            make_parser=ContentParser,
            stream=False,
        )

    def _engine_request(
        self, request: PoolingRequest, token_ids: list[int], sampler: SamplerParams
    ) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=internal_request_id(request.external_req_id),
            prompt_token_ids=token_ids,
            sampler=sampler,
            max_tokens=0,
            priority=request.priority,
            cache_salt=request.cache_salt,
            data_parallel_rank=request.data_parallel_rank,
            trace_headers=request.trace_headers,
            external_req_id=request.external_req_id,
            # The prefix cache does not contain the hidden states of its tokens.
            skip_prefix_cache=self.spec.method != "last",
        )

    def _prefix(self, request: PoolingRequest) -> str:
        """Returns the prompt that is put in front of each text."""
        known, name = self.spec.prompts, request.prompt_name
        if request.input_type is not None:
            name = self._prompt_for(request.input_type)
        if name is None:
            name = self.spec.default_prompt
            return known.get(name, "") if name is not None else ""
        if name not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise bad_value(
                "prompt_name", name, f"is not the name of a prompt of the model; available: {names}"
            )
        return known[name]

    def _prompt_for(self, input_type: str) -> str | None:
        """Returns the name of the model's prompt for texts of this type; None if the model lacks
        one."""
        names = INPUT_TYPES.get(input_type.lower())
        if names is None:
            rule = f"is not supported; send one of {', '.join(INPUT_TYPES)}"
            raise bad_value("input_type", input_type, rule)
        known = {name.lower(): name for name in self.spec.prompts}
        return next((known[name] for name in names if name in known), None)

    def _tokenize_options(self, request: PoolingRequest) -> TokenizeOptions:
        """Returns the options with the truncation of the request or, without one, of the server."""
        options, truncate = request.tokenize_options, request.truncate
        if options.truncation is not None:
            return options
        if truncate is None and self._may_cut(request.inputs):
            truncate = self.truncate
        if truncate in (None, "none"):
            return options
        side: Literal["left", "right"] = "left" if truncate == "start" else "right"
        return options._replace(truncation=Truncation(FIT_CONTEXT, side, reserved_tokens=0))

    def _may_cut(self, inputs: Sequence[Input]) -> bool:
        """Returns whether inputs of this kind can be truncated. If not, the server's default is
        ignored, since it must not cause a refusal."""
        if all(isinstance(one, list) for one in inputs):
            return True
        if getattr(self.prompts.tokenizer, "backend_tokenizer", None) is None:
            return False
        return self.spec.pair_template is None or not isinstance(inputs[0], tuple)

    def _dimensions(self, request: PoolingRequest) -> int:
        count = request.dimensions
        if count is not None and not 1 <= count <= self.spec.size:
            rule = f"must be between 1 and {self.spec.size}, the size of the model's embeddings"
            raise bad_value("dimensions", count, rule)
        return count or 0

    def _activation(self, request: PoolingRequest) -> Activation:
        spec = self.spec
        if spec.embeds and request.task == "score":
            return Activation.NORMALIZE  # the score of two embeddings is always their cosine
        if request.activates is False:
            return Activation.NONE
        if spec.embeds:
            normalizes = spec.normalize or request.activates
            return Activation.NORMALIZE if normalizes else Activation.NONE
        one = Activation.SIGMOID if spec.size == 1 else Activation.SOFTMAX
        if request.task == "score":
            return _ACTIVATIONS.get(spec.score_activation or "", one)
        return _OF_PROBLEMS.get(spec.problem or "", one)

    def _token_ids(
        self, one: Input, prefix: str, options: TokenizeOptions, first_field: str, field: str
    ) -> tuple[list[int], int]:
        """Returns the token ids of an input, and the position of a second segment."""
        if isinstance(one, list):
            return self.prompts.encode(one, options, field), 0
        first, second = (one, None) if isinstance(one, str) else one
        if self.spec.lower_case:
            prefix, first, second = prefix.lower(), first.lower(), second and second.lower()
        fields = (first_field, field)
        if second is None or self.spec.pair_template is None:
            return self._tokenize(prefix + first, second, options, fields)
        if options.truncation is not None:
            rule = "would cut the template of a pair (model.pair_template); leave it out"
            raise bad_value("truncate_prompt_tokens", options.truncation.tokens, rule)
        begin, between, end = self.spec.pair_template
        order = slice(None, None, -1 if self.spec.pair_is_reversed else 1)
        ids = self.prompts.fill_template(
            (prefix + begin, between, end),
            (first, second)[order],
            options._replace(can_truncate=False),
            fields[order],
        )
        return ids, 0

    def _tokenize(
        self, first: str, second: str | None, options: TokenizeOptions, fields: tuple[str, str]
    ) -> tuple[list[int], int]:
        """Returns the ids of a text or a pair, and the position of a second segment."""
        field = fields[-1]
        backend = getattr(self.prompts.tokenizer, "backend_tokenizer", None)
        if second is None and options.truncation is None:
            options = options._replace(can_truncate=backend is not None)
            return self.prompts.encode(first, options, field), 0
        if backend is None:
            rule = (
                "is a pair or needs truncation, which the model's slow (Python) tokenizer does "
                "not support"
            )
            raise bad_value(field, first, rule, "unsupported_value")
        parts = []
        for text, name in zip((first, second), fields, strict=True):
            if text is None:
                continue
            self.prompts.check_text(text, options, name)
            parts += backend.encode_batch_fast([text], add_special_tokens=False)
        longest = fields[max(range(len(parts)), key=lambda index: len(parts[index]))]
        adds = options.add_special_tokens
        if options.truncation is not None:
            special = backend.num_special_tokens_to_add(second is not None) if adds else 0
            room = self.prompts.kept_tokens(options.truncation) - special
            if room < len(parts):
                rule = f"leaves no token of each text in addition to {special} special tokens"
                count = options.truncation.tokens
                raise bad_value("truncate_prompt_tokens", count, rule)
            for part, count in zip(parts, kept_of_each([len(p) for p in parts], room), strict=True):
                part.truncate(count, direction=_direction(options))
        whole = backend.post_process(*parts, add_special_tokens=adds)
        self.prompts.check_ids(list(whole.ids), longest)
        types = whole.type_ids if second is not None else []
        return list(whole.ids), types.index(1) if 1 in types else 0


def kept_of_each(lengths: Sequence[int], room: int) -> list[int]:
    """Returns how many tokens of a text, or of each of two, are kept if `room` tokens fit: the
    longer text is cut first (`longest_first` of the tokenizers library)."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    short, long = sorted(lengths)
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return [long, short] if lengths[0] > lengths[1] else [short, long]


def _direction(options: TokenizeOptions) -> str:
    """Returns the side that is cut off, which the tokenizers library names as we do."""
    assert options.truncation is not None
    return options.truncation.side


def _wrong_task(problem: str) -> BadRequest:
    return BadRequest(f"the served model {problem}", "model", "unsupported_value")


def generation_refusal(spec: PoolingSpec) -> BadRequest:
    """Returns the error for a request for generated text."""
    return _wrong_task(
        "is a pooling model and generates no text; use POST "
        + ("/v1/embeddings" if spec.embeds else "/classify")
        + (", or serve it with model.runner=generate" if _can_generate(spec) else "")
    )


def _can_generate(spec: PoolingSpec) -> bool:
    """Returns whether the model has a head that samples tokens: encoders and classifiers do not."""
    return spec.family in DECODERS and (spec.embeds or spec.token_ids is not None)


def pooling_refusal() -> BadRequest:
    """Returns the error of a model that samples tokens for a pooling request."""
    return _wrong_task(
        "generates text and does not support pooling; serve an embedding model or, if the "
        f"architecture is one of {', '.join(DECODERS)}, serve this model with model.runner=pooling"
    )
