"""Request and response bodies of `/v1/completions`.

`stop_reason`, `token_ids`, `prompt_token_ids`, `prompt_logprobs`, `routed_experts` and `timings`
are not part of OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from swell.cluster.api.answers.logprobs import CompletionLogprobs, PromptLogprobs
from swell.cluster.api.bodies.generation_body import GenerationBody
from swell.cluster.api.bodies.protocol_base import Body, Usage
from swell.cluster.api.bodies.routed_experts import RoutedExpertsBody
from swell.cluster.api.bodies.timings import Timings
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.prompt.generation_request import split_prompts
from swell.cluster.text.schema.chat_messages import missing_field
from swell.cluster.text.schema.known_fields import COMPLETIONS
from swell.cluster.text.schema.request_body import neutral

_IN_SESSIONS: Mapping[str, Any] = {
    "prompt_embeds": None,
    "n": 1,
    "best_of": 1,
    "echo": False,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
}
"""Fields that a chunk of a session may set only to these values."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions. Chat answers may fill the model's context instead."""


class CompletionRequest(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    """A text, texts, token ids, or lists of token ids; null only with `prompt_embeds`."""
    prompt_embeds: str | list[str] | None = None
    """Embeddings of one or several prompts in place of `prompt`, each the base64 of a safetensors
    file with one tensor [tokens, hidden size]. Only with `model.prompt_embeds: true`."""
    logprobs: int | None = None
    session_chunk: Annotated[int, Meta(ge=0)] | None = None
    """The number of chunks of the session that stay; this chunk replaces the later ones. None: all
    stay."""
    suffix: Annotated[str | None, neutral("")] = None

    ECOSYSTEM = COMPLETIONS
    TAKES_SESSIONS = True

    def check(self) -> None:
        super().check()
        if self.prompt_embeds is None:
            if self.prompt is None:
                raise missing_field("prompt")
        elif self.prompt not in (None, "", []):
            raise BadRequest(
                "prompt and prompt_embeds are both set; send one of them", "prompt_embeds"
            )

        self._check_session()

    def _check_session(self) -> None:
        if self.session is None:
            if self.session_chunk is not None:
                raise missing_field("session_id")
            return
        for name, usual in _IN_SESSIONS.items():
            if (value := getattr(self, name)) is not None and value != usual:
                problem = (
                    "is not supported with session_id: a chunk of a session has one prompt and "
                    "one answer"
                )
                raise bad_value(name, value, problem)
        if not isinstance(self.prompt, str) and len(split_prompts(self.prompt or [])) > 1:
            problem = "has several prompts, but a chunk of a session has exactly one"
            raise bad_value("prompt", self.prompt, problem)

    @property
    def has_no_answer(self) -> bool:
        """Whether no answer is requested: `max_tokens` may be 0 with `echo` or `session_id`."""
        return self.max_tokens == 0 and (bool(self.echo) or self.session is not None)

    def answer_max_tokens(self) -> int | None:
        if self.has_no_answer:
            return 1  # an engine samples at least one token; it is not shown
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def endpoint_sampling_params(self) -> Mapping[str, Any]:
        sampling: dict[str, Any] = {}
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                sampling["prompt_logprobs"] = self.logprobs
        return sampling


class CompletionChoice(Body, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: RoutedExpertsBody | UnsetType = UNSET


class Completion(Body, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None
    """Always null."""
    system_fingerprint: str | None = None
    """The version of weights and limits that computed the whole answer."""
    timings: Timings | UnsetType = UNSET


class CompletionChunkChoice(Body, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Set in the first chunk of a choice if `return_token_ids` is set."""
    routed_experts: RoutedExpertsBody | UnsetType = UNSET
    """Set in the last chunk of a choice if `return_routed_experts` is set."""


class CompletionChunk(Body, kw_only=True):
    """One event of a completion stream. `usage` is absent unless the request sets `include_usage`.
    Then it is null in all but the last event, unless `continuous_usage_stats` is set. With
    `include_timings`, the last event has the `timings`."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str | UnsetType = UNSET
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
