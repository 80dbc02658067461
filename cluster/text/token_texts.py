"""The bytes of each token alone, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from operator import add
from typing import NamedTuple

from swell.cluster.text.detokenizer import Detokenizer
from swell.cluster.text.incremental_detokenizer import IncrementalDetokenizer


class TokenText(NamedTuple):
    """What one token adds to a text."""

    text: str
    """What it makes certain, perhaps also of tokens before it."""
    offset: int
    """Characters of what is certain then, before its own text."""
    at_beginning: bool
    """The tokens that could have stood there have the texts of a beginning."""


class TextOffsets(NamedTuple):
    """Where tokens begin in their text."""

    offsets: list[int]
    """For each token the characters before it; tokens that share a character share its offset."""
    at_beginning: int
    """So many of the first tokens have the texts of a beginning."""


class Texts(dict[int, bytes]):
    """id -> the bytes that the token adds to a text, filled on use; special tokens too."""

    def __init__(self, incremental: IncrementalDetokenizer, *, at_beginning: bool = False) -> None:
        super().__init__()
        self._incremental = incremental
        self._at_beginning = at_beginning
        self._texts: dict[int, str] = {}
        self._names: dict[int, str] = {}

    def __missing__(self, token_id: int) -> bytes:
        data = self._incremental.token_bytes(token_id, at_beginning=self._at_beginning)
        self[token_id] = data
        return data

    def text(self, token_id: int) -> str:
        """A part of a character shows as a replacement character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self[token_id].decode(errors="replace")
        return text

    def name(self, token_id: int) -> str:
        r"""The text; of a token that is not whole characters its bytes, as OpenAI writes them:
        `bytes:\xf0\x9f`."""
        name = self._names.get(token_id)
        if name is None:
            data = self[token_id]
            try:
                name = data.decode()
            except UnicodeDecodeError:
                name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._names[token_id] = name
        return name


class TokenTexts(Texts):
    """id -> the bytes that the token adds after others.

    Exact for the tokenizers that `detokenizer` reads; for others it is the decoding of the id
    alone, which may hold replacement characters instead of a part of a character. An id that the
    tokenizer does not know has none.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        machines = {skip: detokenizer.start(skip) for skip in (False, True)}
        super().__init__(machines[False])
        self.at_beginning = Texts(machines[False], at_beginning=True)
        """The same of a token without text before it."""
        self.whole = {skip: cache(partial(_whole, machine)) for skip, machine in machines.items()}
        """By `skip_special_tokens`: id -> what the token writes after a finished character; None:
        that depends on others."""
        self._detokenizer = detokenizer

    def offsets(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        sent: str | None = None,
    ) -> TextOffsets:
        """The offsets of the tokens of a text. `sent`: the text that they were made from, which may
        spell special tokens that are skipped, and lack a space that the tokenizer puts after
        those."""
        incremental = self._detokenizer.start(skip_special_tokens)
        written = list(map(TextWriter(self, incremental, skip_special_tokens).write, token_ids))
        if sent is not None and "".join([one.text for one in written]) != sent:
            written = self._as_sent(token_ids, written, sent)
        starts = accumulate([len(one.text) for one in written], initial=0)
        offsets = list(map(add, starts, [one.offset for one in written]))
        return TextOffsets(offsets, sum([one.at_beginning for one in written]))

    def _as_sent(
        self, token_ids: Sequence[int], written: list[TokenText], sent: str
    ) -> list[TokenText]:
        """The same with the texts of `sent`, where that differs from what was written."""
        found, chars = [], 0
        for token_id, (text, offset, at_beginning) in zip(token_ids, written, strict=True):
            if not sent.startswith(text or self.text(token_id), chars):
                if self._detokenizer.is_special(token_id):
                    text = ""  # the tokenizer has put it there
                elif text.startswith(" ") and sent.startswith(text[1:], chars):
                    text, offset = text[1:], max(0, offset - 1)
            elif not text and self._detokenizer.is_special(token_id):
                text = self.text(token_id)
            found.append(TokenText(text, offset, at_beginning))
            chars += len(text)
        return found


def _whole(incremental: IncrementalDetokenizer, token_id: int) -> TokenText | None:
    text = incremental.whole_text(token_id)
    return TokenText(text, 0, False) if text else None


class TextWriter:
    """One text, written token by token: the one that `incremental` makes.

    After a token with a whole text nothing is open: the next such token is not pushed, for the
    detokenizer would give its text and remember nothing.
    """

    def __init__(
        self, texts: TokenTexts, incremental: IncrementalDetokenizer, skip_special_tokens: bool
    ) -> None:
        self._texts = texts
        self._incremental = incremental
        self._whole = texts.whole[skip_special_tokens]
        self._is_closed = False

    def write(self, token_id: int) -> TokenText:
        """Push a token, and find where its own text begins."""
        whole = self._whole(token_id)
        if whole is not None and self._is_closed:
            return whole
        texts, incremental = self._texts, self._incremental
        at_beginning, offset = incremental.at_beginning, incremental.pending_chars
        text = incremental.push(token_id)
        self._is_closed = whole is not None and text != ""
        if len(text) > offset:
            own = (texts.at_beginning if at_beginning else texts).text(token_id)
            if own and text.endswith(own):
                offset = max(offset, len(text) - len(own))
        return TokenText(text, offset, at_beginning)
