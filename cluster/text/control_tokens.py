"""Control tokens of a tokenizer, and tokenization of texts in which only some occurrences of their
texts are control tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, models

from swell.cluster.text.tokens.tokenizer import encode_text

_BRACKETS = frozenset("<>[]{}|｜")
_MARK = re.compile(r"<[|｜]|[<\[]/?(think|tool|arg_)", re.IGNORECASE)
"""The beginnings of marks of turns, reasoning and tool calls, which begin no word of a language."""


class Segment(NamedTuple):
    """A part of a text: one control token, or text without any."""

    text: str
    is_control: bool = False


class ControlTokens:
    """The control tokens of one tokenizer with one chat template.

    These are its special tokens, marks such as `<|user|>`, `<think>` and `<tool_call>`, and added
    tokens in brackets that the template writes. Other added tokens are words that users may write:
    runs of spaces, `<table>` of Gemma, `/nothink` of GLM. Safe to call from several threads.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        added: dict[int, AddedToken] = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = sorted(added.items())
        self._ids = {
            token.content: id
            for id, token in self._added
            if token.content and _is_control(token, template)
        }
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_tokens([AddedToken(text, normalized=False) for text in self._ids])

    @cached_property
    def edges(self) -> frozenset[str]:
        """The first and last character of each control token."""
        return frozenset(edge for text in self._ids for edge in (text[0], text[-1]))

    def split(self, text: str) -> list[Segment]:
        """Splits a text as a tokenizer does: if several control tokens begin at one place, the
        longest counts."""
        if not self._ids:
            return [Segment(text)]
        (found,) = self._finder.encode_batch([text], add_special_tokens=False)
        return [
            Segment(text[start:end], is_control=id != 0)
            for id, (start, end) in zip(found.ids, found.offsets, strict=True)
        ]

    def encode(self, segments: Sequence[Segment], *, add_special_tokens: bool) -> list[int]:
        """Returns the ids of the joined text, in which each control segment is its token, and
        everything else is text."""
        ids = None
        if self._renamed is not None:
            ids = self._renamed.encode(segments, add_special_tokens=add_special_tokens)
        if ids is None:
            return self._encode_cut(segments, add_special_tokens=add_special_tokens)
        return ids

    @cached_property
    def _renamed(self) -> _Renamed | None:
        backend: Tokenizer | None = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else _Renamed(backend, self._added, self._ids)

    def _encode_cut(self, segments: Iterable[Segment], *, add_special_tokens: bool) -> list[int]:
        """Splits each control token that is text into its characters, and encodes the parts
        separately."""
        parts = [""]
        for segment in segments:
            for one in [segment] if segment.is_control else self.split(segment.text):
                if one.is_control and not segment.is_control:
                    parts += [*one.text, ""]
                else:
                    parts[-1] += one.text
        ids: list[int] = []
        for part in filter(None, parts):
            special = add_special_tokens and not ids
            ids += encode_text(self._tokenizer, part, add_special_tokens=special)
        return ids


class _Renamed:
    """A tokenizer with the same model and rules, in which control tokens have random names that a
    client cannot guess. It treats their original texts as ordinary text, which merges with its
    neighbours."""

    def __init__(
        self, backend: Tokenizer, added: Sequence[tuple[int, AddedToken]], control: Iterable[str]
    ) -> None:
        secret = secrets.token_hex(16)
        self._backend = backend
        self._names = {text: f"{secret}{index:06}" for index, text in enumerate(control)}
        self._copy = Tokenizer(backend.model)  # shared, not copied
        self._copy.normalizer = backend.normalizer
        self._copy.pre_tokenizer = backend.pre_tokenizer
        self._copy.post_processor = backend.post_processor
        # A tokenizer numbers new tokens after its model's: here, with ids that the original does
        # not have.
        first = max(backend.get_vocab(with_added_tokens=True).values(), default=0) + 1
        spare = range(first - backend.get_vocab_size(with_added_tokens=False))
        named = [self._named(token) for _, token in added]
        self._copy.add_tokens([f"{secret}-{index}" for index in spare])
        self._copy.add_tokens(named)
        ids = {
            self._copy.token_to_id(token.content): id
            for token, (id, _) in zip(named, added, strict=True)
        }
        self._renamed = {new: old for new, old in ids.items() if new != old}
        controls = {old for (old, token) in added if token.content in self._names}
        self._control = {new for new, old in ids.items() if old in controls}
        self._forbidden = controls - {self._unknown_id()}

    def encode(self, segments: Sequence[Segment], *, add_special_tokens: bool) -> list[int] | None:
        """Returns the ids; None if the tokenizer does not find each control token in its place."""
        text = "".join(self._names[one.text] if one.is_control else one.text for one in segments)
        (found,) = self._copy.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if sum(map(self._control.__contains__, found.ids)) != sum(
            one.is_control for one in segments
        ):
            return None
        ids: list[int] = []
        for id, is_outer in zip(found.ids, found.special_tokens_mask, strict=True):
            if id in self._forbidden and not is_outer:  # the model has this text as one token
                parts = self._parts(id)
                if parts is None:
                    return None
                ids += parts
            else:
                ids.append(self._renamed.get(id, id))
        return ids

    def _named(self, token: AddedToken) -> AddedToken:
        return AddedToken(
            self._names.get(token.content, token.content),
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )

    def _parts(self, id: int) -> list[int] | None:
        """Returns the tokens of a control token's text, split in two; None if each split has a
        control token."""
        text = self._backend.id_to_token(id) or ""
        for at in range(1, len(text)):
            model = self._backend.model
            ids = [one.id for half in (text[:at], text[at:]) for one in model.tokenize(half)]
            if ids and not self._forbidden.intersection(ids):
                return ids
        return None

    def _unknown_id(self) -> int | None:
        """Returns the id of the unknown token, which ordinary texts have too."""
        unknown: str | None = getattr(self._backend.model, "unk_token", None)
        return None if unknown is None else self._backend.token_to_id(unknown)


def _is_control(token: AddedToken, template: str) -> bool:
    text = token.content
    if token.special or _MARK.match(text):
        return True
    return not _BRACKETS.isdisjoint(text) and text in template
