"""Converts prompts to token ids, once: router, prefix hash, engine and any retry reuse them.

All reasons to refuse a prompt are checked here, before an engine receives it. A text that cannot
fit is refused by its length in bytes, without tokenizing it: a token covers at most as many bytes
as the longest token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Literal

import msgspec
from tokenizers import Tokenizer

from swell.cluster.text.errors import BadRequest, Field, bad_value
from swell.cluster.text.params.validate_params import check_token_ids, num_utf8_bytes
from swell.cluster.text.prompt.chat_template import ChatTemplate, TemplateOptions
from swell.cluster.text.prompt.generation_request import Prompt
from swell.cluster.text.prompt.template_texts import Change, own_segments
from swell.cluster.text.prompt.truncation import (
    MAX_TRUNCATED_BYTES,
    PLAIN_TEXT,
    TEMPLATE_TEXT,
    TokenizeOptions,
    Truncation,
    kept_tokens,
    truncate,
)
from swell.cluster.text.schema.chat_messages import ChatMessage, check_messages
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.request_body import RequestBody
from swell.cluster.text.tokens.tokenizer import encode_text
from swell.configs.error_text import shown

CHUNK_CHARS = 64 * 1024
"""Size of the chunks in which a text that is probably too long is tokenized, until that is
certain."""

PLAIN_CHAT = TemplateOptions()
_NO_TOKEN = "is empty; a prompt needs at least one token"


class _Messages(RequestBody, kw_only=True):
    """The conversation of a Python caller."""

    messages: list[ChatMessage]

    def check(self) -> None:
        check_messages(self.messages)


class PromptProcessor:
    """Converts text to ids for one model. Safe to call from several threads.

    `vocab_size` is the model's, which may exceed the tokenizer's.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_model_len: int,
        vocab_size: int,
        model_name: str,
        chat_template: str | None = None,
        *,
        min_answer_tokens: int = 1,
        special_tokens_in_text: Literal["text", "control"] = "text",
    ) -> None:
        """`min_answer_tokens` is the number of answer tokens for which a prompt must leave room; 0
        if prompts are pooled. `special_tokens_in_text` is as in `ModelConfig`."""
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, model_name, chat_template)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._min_answer_tokens = min_answer_tokens
        self._texts_are_text = special_tokens_in_text == "text"
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # A tokenizer.json may set both. transformers would reset them at every call, which is
            # also why its own calls are not thread-safe.
            self._backend.no_truncation()
            self._backend.no_padding()
        decode = getattr(type(tokenizer), "_decode", None)
        self._backend_decodes = getattr(decode, "__module__", "").startswith("transformers.")
        """Whether decoding is only the backend's, without decoding code of the model."""
        self._max_token_bytes = self._find_max_token_bytes()

    @property
    def max_prompt_bytes(self) -> int:
        return self.max_model_len * self._max_token_bytes

    def set_limits(self, max_model_len: int, vocab_size: int) -> None:
        """Sets the engines' limits, once they are known."""
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size

    def completion_prompts(
        self,
        prompts: Sequence[Prompt],
        options: TokenizeOptions = PLAIN_TEXT,
        field: str = "prompt",
    ) -> list[list[int]]:
        """Returns the token ids of each prompt; errors name all of them `field`."""
        if len(prompts) == 1:
            return [self.encode(prompts[0], options, field)]
        return [
            self.encode(prompt, options, f"{field}[{index}]")
            for index, prompt in enumerate(prompts)
        ]

    def encode(
        self, prompt: Prompt, options: TokenizeOptions = PLAIN_TEXT, field: str = "prompt"
    ) -> list[int]:
        """Returns the ids of one prompt, truncated. This may take long: call it from a thread."""
        ids = prompt if isinstance(prompt, list) else self._tokenize(prompt, options, field)
        return self._kept(ids, options, field)

    def _kept(self, ids: list[int], options: TokenizeOptions, field: str) -> list[int]:
        ids = truncate(ids, options.truncation, self.max_model_len, self._min_answer_tokens)
        self.check_ids(ids, field, can_truncate=options.can_truncate)
        return ids

    def check_ids(self, ids: list[int], field: str, *, can_truncate: bool = True) -> None:
        """Raises `BadRequest` for a prompt without tokens, a prompt that does not fit, and invalid
        token ids. The error for a prompt that does not fit names `truncate_prompt_tokens` if the
        request may set it."""
        if not ids:
            raise bad_value(field, ids, _NO_TOKEN)
        if len(ids) > self.max_model_len - self._min_answer_tokens:
            raise self._too_long(len(ids), field, can_truncate=can_truncate)
        check_token_ids(field, ids, self.vocab_size)

    def _tokenize(self, text: str, options: TokenizeOptions, field: str) -> list[int]:
        self.check_text(text, options, field)
        return encode_text(self.tokenizer, text, add_special_tokens=options.add_special_tokens)

    def check_text(self, text: str, options: TokenizeOptions, field: str) -> None:
        """Raises `BadRequest` for a text that is empty, unless it is pooled, or certainly too long,
        before all of it is tokenized."""
        if not text and self._min_answer_tokens:  # a pooled text may be empty
            raise bad_value(field, text, _NO_TOKEN)
        if options.truncation is None:
            self._check_bytes(text, field, self.max_prompt_bytes)
            self._check_chunks(text, field, options)
        else:  # all of it is tokenized: token boundaries depend on the text before them
            self._check_bytes(text, field, max(self.max_prompt_bytes, MAX_TRUNCATED_BYTES))

    def kept_tokens(self, truncation: Truncation) -> int:
        """Returns the maximum number of prompt tokens that a truncation keeps. Raises
        `BadRequest`."""
        return kept_tokens(truncation, self.max_model_len, self._min_answer_tokens)

    def _check_chunks(self, text: str, field: str, options: TokenizeOptions) -> None:
        """Raises `BadRequest` for a text that is far too long before all of it is tokenized. A text
        has slightly fewer tokens than its chunks together: so twice the limit is certainly too
        many."""
        if self._backend is None or len(text) <= max(CHUNK_CHARS, 4 * self.max_model_len):
            return
        count = 0
        for start in range(0, len(text), CHUNK_CHARS):
            chunk = text[start : start + CHUNK_CHARS]
            count += len(encode_text(self.tokenizer, chunk, add_special_tokens=False))
            if count > 2 * self.max_model_len:
                raise self._too_long(count, field, can_truncate=options.can_truncate)

    def chat_messages(
        self, messages: Sequence[Mapping[str, Any] | ChatMessage]
    ) -> list[ChatMessage]:
        """Converts messages of Python callers, in the same way as those of HTTP requests."""
        try:
            body = msgspec.json.encode({"messages": messages})
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"messages: {error}", "messages") from None
        return decode(body, _Messages).messages

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions = PLAIN_CHAT,
        tokenize_options: TokenizeOptions = TEMPLATE_TEXT,
    ) -> list[int]:
        """Returns the ids of a conversation that the chat template renders. A control token in a
        text of the client is text, unless `special_tokens_in_text` says otherwise."""
        if tokenize_options.truncation is None:
            for index, message in enumerate(messages):
                self._check_bytes(message.text, f"messages[{index}].content", self.max_prompt_bytes)
        text = self.template.render(messages, options)
        self.check_text(text, tokenize_options, "messages")
        add, parts = tokenize_options.add_special_tokens, None
        if self._texts_are_text:
            parts = self.template.own_segments(text, messages, options)
        if parts is None:
            ids = encode_text(self.tokenizer, text, add_special_tokens=add)
        else:
            control, own = parts
            ids = control.encode(own, add_special_tokens=add)
        return self._kept(ids, tokenize_options, "messages")

    def fill_template(
        self,
        template: Sequence[str],
        texts: Sequence[str],
        options: TokenizeOptions,
        fields: Sequence[str],
    ) -> list[int]:
        """Returns the ids of a template's parts with the `texts` of `fields` between them. A
        control token in a text is text, unless `special_tokens_in_text` says otherwise."""

        def fill(change: Change) -> str:
            between = [change(text) for text in texts]
            return "".join(chain(*zip_longest(template, between, fillvalue="")))

        for text, name in zip(texts, fields, strict=True):
            self._check_bytes(text, name, self.max_prompt_bytes)
        longest = fields[max(range(len(texts)), key=lambda index: len(texts[index]))]
        whole, own = fill(str), None
        self.check_text(whole, options, longest)
        control = self.template.control_tokens("".join(template))
        if self._texts_are_text:
            own = own_segments(whole, texts, control, fill, longest)
        add = options.add_special_tokens
        ids = (
            encode_text(self.tokenizer, whole, add_special_tokens=add)
            if own is None
            else control.encode(own, add_special_tokens=add)
        )
        return self._kept(ids, options, longest)

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of ids, including special tokens; accepts as many ids as a prompt may
        have. This may take long: call it from a thread."""
        if len(token_ids) > self.max_model_len:
            raise BadRequest(
                f"tokens holds {len(token_ids)} ids; at most max_model_len={self.max_model_len} "
                "are allowed",
                "tokens",
            )
        check_token_ids("tokens", token_ids, self.vocab_size)
        return self.text(token_ids)

    def text(self, token_ids: list[int]) -> str:
        """Returns the text of validated ids."""
        if self._backend is not None and self._backend_decodes:
            (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=False)
            return str(text)
        return str(self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    def resolve_max_tokens(
        self,
        num_prompt_tokens: int,
        max_tokens: int | None,
        *,
        default: int | None = None,
        min_tokens: int = 0,
        field: str = "prompt",
    ) -> int:
        """Returns the maximum number of answer tokens: `max_tokens` or, if that is None, the room
        that the prompt leaves, but at most `default` and at least `min_tokens`."""
        left = budget = self.max_model_len - num_prompt_tokens
        if left <= 0 or (max_tokens is not None and max_tokens > left):
            raise self._too_long(num_prompt_tokens, field, max_tokens)
        if max_tokens is not None:
            budget = max_tokens
        elif default is not None:
            budget = min(left, max(default, min_tokens))
        if min_tokens > budget:
            rule = (
                f"is above the {budget} tokens that the answer may have "
                f"(max_model_len={self.max_model_len}, prompt={num_prompt_tokens})"
            )
            raise bad_value("min_tokens", min_tokens, rule)
        return budget

    def _check_bytes(self, text: str, field: str, limit: int) -> None:
        """Raises `BadRequest` for a text that cannot fit, or is not valid Unicode, without
        tokenizing it."""
        num_bytes = num_utf8_bytes(field, text)
        if num_bytes > limit:
            rule = f" has {num_bytes} bytes, and at most {limit} bytes can fit."
            end = " Please reduce the length of the input."
            raise self._exceeded([Field(field), rule, end], field)

    def _too_long(
        self,
        num_prompt_tokens: int,
        field: str,
        max_tokens: int | None = None,
        *,
        can_truncate: bool = True,
    ) -> BadRequest:
        name, limit = Field(field), Field("max_tokens")
        if not self._min_answer_tokens:
            what = [f"there are {num_prompt_tokens} tokens in ", name, ". "]
            end = ["Please reduce its length"]
            end += [", or set ", Field("truncate_prompt_tokens"), "."] if can_truncate else ["."]
        elif max_tokens is None:
            what = [f"there are {num_prompt_tokens} tokens in ", name]
            end = [", and at least one is needed for the answer. Please reduce the length of the "]
            end += [name, "."]
        else:
            total = shown(num_prompt_tokens + max_tokens)
            what = [f"you requested {total} tokens ({num_prompt_tokens} in the ", name, ", ", limit]
            end = [f"={shown(max_tokens)} for the answer). Please reduce the length of the ", name]
            end += [" or ", limit, "."]
        return self._exceeded([*what, *end], field)

    def _exceeded(self, what: list[str], field: str) -> BadRequest:
        head = f"This model's maximum context length is {self.max_model_len} tokens. However, "
        return BadRequest([head, *what], field, "context_length_exceeded")

    def _find_max_token_bytes(self) -> int:
        """Returns the bytes of the longest token. In a byte-level alphabet each character of a
        token is one byte."""
        vocab = self.tokenizer.get_vocab()
        byte_level = self._backend is not None and "ByteLevel" in repr(self._backend.decoder)
        return max((len(t) if byte_level else len(t.encode()) for t in vocab), default=1)
