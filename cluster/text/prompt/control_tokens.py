"""Control tokens of a tokenizer, and tokenization of texts in which only some occurrences of their
texts are control tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer, models

from swell.cluster.text.tokens.tokenizer import encode_text

_BRACKETS = frozenset("<>[]{}|｜")
_MARK = re.compile(r"<[|｜]|[<\[]/?(think|tool|arg_)", re.IGNORECASE)
"""The beginnings of marks of turns, reasoning and tool calls, which begin no word of a language."""


class Segment(NamedTuple):
    """A part of a text: one control token, or text without any."""

    text: str
    token: str | None = None
    """The control token. `text` may differ from it if the tokenizer normalizes texts."""


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
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = None if backend is None else backend.normalizer
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        if self._normalizer is None:
            self._finder.add_tokens([AddedToken(text, normalized=False) for text in self._ids])
        else:
            self._finder.normalizer = self._normalizer
            self._finder.add_tokens([token for _, token in self._added if token.content])
        self._found = {
            id: token.content
            for id, token in self._finder.get_added_tokens_decoder().items()
            if token.content in self._ids
        }

    @cached_property
    def normalizes(self) -> bool:
        """Whether the tokenizer finds some control tokens in normalized text."""
        return self._normalizer is not None and any(
            token.normalized for _, token in self._added if token.content in self._ids
        )

    def edges(self, texts: Iterable[str]) -> set[str]:
        """Returns the characters of `texts` that are the first or last character of a control
        token, or that a normalizer turns into one."""
        used = set().union(*texts)
        edges = {edge for text in self._ids for edge in (text[0], text[-1])}
        if not self.normalizes:
            return used & edges
        normalized = self._normalized_edges
        return {one for one in used if one in edges or normalized.intersection(self._normal(one))}

    @cached_property
    def _normalized_edges(self) -> set[str]:
        """The first and last characters of normalized control tokens, without characters that the
        normalizer puts before every text."""
        forms = [form for text in self._ids if (form := self._normal(text))]
        edges = {edge for form in forms for edge in (form[0], form[-1])}
        return edges - set(self._normal("0")).intersection(self._normal("1"))

    def _normal(self, text: str) -> str:
        return text if self._normalizer is None else self._normalizer.normalize_str(text)

    def split(self, text: str) -> list[Segment]:
        """Splits a text as a tokenizer does: if several control tokens begin at one place, the
        longest counts."""
        if not self._ids:
            return [Segment(text)]
        (found,) = self._finder.encode_batch([text], add_special_tokens=False)
        segments: list[Segment] = []
        at = 0
        for id, (start, end) in zip(found.ids, found.offsets, strict=True):
            token = self._found.get(id)
            if token is None:
                continue
            if start > at:
                segments.append(Segment(text[at:start]))
            # One character may be normalized to the ends of two tokens.
            segments.append(Segment(text[max(at, start) : end], token))
            at = max(at, end)
        return [*segments, Segment(text[at:])] if at < len(text) else segments

    def encode(self, segments: Sequence[Segment], *, add_special_tokens: bool) -> list[int]:
        """Returns the ids of the joined text, in which each control segment is its token, and
        everything else is text."""
        if self._renamed is None:
            return self._encode_cut(segments, add_special_tokens=add_special_tokens)
        return self._renamed.encode(segments, add_special_tokens=add_special_tokens)

    @cached_property
    def _renamed(self) -> _Renamed | None:
        backend: Tokenizer | None = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else _Renamed(backend, self._added, self._ids)

    def _encode_cut(self, segments: Iterable[Segment], *, add_special_tokens: bool) -> list[int]:
        """Splits each control token that is text into its characters, and encodes the parts
        separately."""
        parts = [""]
        for segment in segments:
            for one in [segment] if segment.token else self.split(segment.text):
                if one.token and not segment.token:
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
        self, backend: Tokenizer, added: Sequence[tuple[int, AddedToken]], ids: Mapping[str, int]
    ) -> None:
        secret = secrets.token_hex(16)
        self._backend = backend
        self._ids = ids
        self._names = {text: f"{secret}{index:06}" for index, text in enumerate(ids)}
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
        numbers = {
            token.content: new for new, token in self._copy.get_added_tokens_decoder().items()
        }
        new_ids = {numbers[token.content]: id for token, (id, _) in zip(named, added, strict=True)}
        self._renamed = {new: old for new, old in new_ids.items() if new != old}
        controls = {old for (old, token) in added if token.content in self._names}
        self._control = {new for new, old in new_ids.items() if old in controls}
        self._forbidden = controls - {self._unknown_id()}

    def encode(self, segments: Sequence[Segment], *, add_special_tokens: bool) -> list[int]:
        """Returns the ids of the joined text. If the tokenizer does not find each control token in
        its place, every segment is encoded separately."""
        text = "".join(map(self._written, segments))
        found = self._encode(text, add_special_tokens)
        wanted = [self._ids[one.token] for one in segments if one.token]
        if [self._renamed[id] for id in found.ids if id in self._control] == wanted:
            return self._original_ids(found)
        ids: list[int] = []
        for one in segments:
            if one.token:
                ids.append(self._ids[one.token])
            else:
                ids += self._original_ids(self._encode(one.text, add_special_tokens=False))
        return self._between_special(ids) if add_special_tokens else ids

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        (found,) = self._copy.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found

    def _written(self, segment: Segment) -> str:
        """Returns the text of a segment with the name of its token."""
        if segment.token is None:
            return segment.text
        name = self._names[segment.token]
        before, found, behind = segment.text.partition(segment.token)
        return before + name + behind if found else name

    def _between_special(self, ids: list[int]) -> list[int]:
        """Puts the special tokens around `ids` that the tokenizer puts around a text."""
        found = self._encode(next(iter(self._names.values())), add_special_tokens=True)
        inner = [at for at, is_outer in enumerate(found.special_tokens_mask) if not is_outer]
        return [*found.ids[: inner[0]], *ids, *found.ids[inner[-1] + 1 :]]

    def _original_ids(self, found: Encoding) -> list[int]:
        ids: list[int] = []
        for id, is_outer in zip(found.ids, found.special_tokens_mask, strict=True):
            if id in self._forbidden and not is_outer:  # the model has this text as one token
                ids += self._parts(id)
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

    def _parts(self, id: int) -> list[int]:
        """Returns the tokens of a control token's text, split in two or, if each split has a
        control token, into its characters."""
        text = self._backend.id_to_token(id) or ""
        for at in range(1, len(text)):
            ids = self._model_ids(text[:at], text[at:])
            if ids and not self._forbidden.intersection(ids):
                return ids
        return [one for one in self._model_ids(*text) if one not in self._forbidden]

    def _model_ids(self, *parts: str) -> list[int]:
        return [one.id for part in parts for one in self._backend.model.tokenize(part)]

    def _unknown_id(self) -> int | None:
        """Returns the id of the unknown token, which ordinary texts have too."""
        unknown: str | None = getattr(self._backend.model, "unk_token", None)
        return None if unknown is None else self._backend.token_to_id(unknown)


def _is_control(token: AddedToken, template: str) -> bool:
    text = token.content
    if token.special or _MARK.match(text):
        return True
    return not _BRACKETS.isdisjoint(text) and text in template
