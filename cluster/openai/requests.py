"""What a client may send. An unknown field is refused.

A field of OpenAI's API (or of our contract) that is not served yet is known all the same: its
neutral value passes, and any other is refused by name, so that nobody gets an answer that
silently ignores a wish. Such fields stand in the `NOT_YET` table of their Struct.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from swell.cluster.params import BadRequest, SamplingParams, shown

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; chat answers may fill the model's length."""

TEXT_FORMAT = {"type": "text"}

Role = Literal["system", "developer", "user", "assistant", "tool"]


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of every request body."""

    NOT_YET: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """field -> values that change nothing."""

    def check(self) -> None:
        """The rules between fields; raises `BadRequest`."""

    def refuse_unsupported(self, path: str = "") -> None:
        for name, neutral in self.NOT_YET.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise BadRequest(
                    f"{path}{name}={shown(value)} is not supported yet"
                    + (f"; leave it out or send {neutral[0]!r}" if neutral else "; leave it out"),
                    f"{path}{name}",
                    "unsupported_value",
                )


class StreamOptions(RequestBody, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; the answer is never padded."""


class GenerationRequest(RequestBody, kw_only=True):
    """The fields that completions and chat share."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    """Smaller runs first under `scheduler.policy: priority`."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of equal salt."""
    data_parallel_rank: int | None = None
    """Ask for one engine."""
    return_token_ids: bool | None = None

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None

    user: Any = None
    """This and the next fields change nothing in the answer."""
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    COMMON_NOT_YET: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "n": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "response_format": (TEXT_FORMAT,),
        "prompt_logprobs": (),
        "bad_words": ([],),
        "allowed_token_ids": (),
    }

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        self.refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed with stream=true", "stream_options")
        if self.cache_salt == "":
            raise BadRequest("cache_salt='' must not be empty; leave it out", "cache_salt")
        if self.data_parallel_rank is not None and not 0 <= self.data_parallel_rank < 2**31:
            raise BadRequest(
                f"data_parallel_rank={shown(self.data_parallel_rank)} must be at least 0 and "
                "name an engine that serves",
                "data_parallel_rank",
            )
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise BadRequest(
                f"priority={shown(self.priority)} must be between {-(2**31)} and {2**31 - 1}",
                "priority",
            )

    def answer_max_tokens(self) -> int | None:
        """The explicit limit, or the endpoint's default."""
        return self.max_tokens

    def sampling_params(self) -> SamplingParams:
        """The wish in our own form; to be checked with `params.validate`."""
        wishes: dict[str, Any] = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        return SamplingParams(**wishes, max_tokens=self.answer_max_tokens())


_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in GenerationRequest.__struct_fields__ and name != "max_tokens"
)


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """Text, texts, token ids, or lists of token ids."""

    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    NOT_YET = {
        **GenerationRequest.COMMON_NOT_YET,
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "suffix": ("",),
    }

    def answer_max_tokens(self) -> int | None:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class ContentPart(RequestBody, kw_only=True):
    """One part of a message; parts other than text are refused by name."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None
    refusal: Any = None


class ChatMessage(RequestBody, kw_only=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    NOT_YET = {
        "tool_calls": ([],),
        "function_call": (),
        "audio": (),
    }

    def check_at(self, path: str) -> None:
        self.refuse_unsupported(path + ".")
        if self.content is None and self.role != "assistant":
            raise BadRequest(
                f"{path}.content is missing: a message of role {self.role!r} needs text",
                f"{path}.content",
            )
        if isinstance(self.content, list):
            for index, part in enumerate(self.content):
                _check_part(part, f"{path}.content[{index}]")

    @property
    def text(self) -> str:
        """The content as one text; parts stand on lines of their own."""
        if isinstance(self.content, list):
            return "\n".join(part.text or "" for part in self.content)
        return self.content or ""


def _check_part(part: ContentPart, path: str) -> None:
    if part.type != "text":
        raise BadRequest(
            f"{path}.type={shown(part.type)} is not supported yet; only 'text' parts are",
            f"{path}.type",
            "unsupported_value",
        )
    if part.text is None:
        raise BadRequest(
            f"the required field '{path}.text' is missing", f"{path}.text", "missing_field"
        )


def check_messages(messages: list[ChatMessage]) -> None:
    if not messages:
        raise BadRequest("messages=[] must hold at least one message", "messages")
    for index, message in enumerate(messages):
        message.check_at(f"messages[{index}]")


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """OpenAI's newer name of `max_tokens`."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    store: bool | None = None

    NOT_YET = {
        **GenerationRequest.COMMON_NOT_YET,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "store": (False,),
    }

    def check(self) -> None:
        super().check()
        check_messages(self.messages)
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) == 2:
            raise BadRequest(
                f"max_tokens={shown(self.max_tokens)} and max_completion_tokens="
                f"{shown(self.max_completion_tokens)} differ; send one of them",
                "max_tokens",
            )

    def answer_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(RequestBody, kw_only=True):
    """A `prompt`, or `messages` as they would be sent for an answer."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    """For a prompt only: a chat template writes its own."""
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("send either 'prompt' or 'messages'", "prompt")
        if self.messages is not None:
            check_messages(self.messages)


class DetokenizeRequest(RequestBody, kw_only=True):
    model: str | None = None
    tokens: list[int]
