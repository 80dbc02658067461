"""The bytes and the text of single tokens, and their offsets in a text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from operator import add
from typing import NamedTuple

from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.cluster.text.tokens.incremental_detokenizer import IncrementalDetokenizer


class TokenText(NamedTuple):
    """The contribution of one token to a text."""

    text: str
    """The text that is certain after it, possibly including text of earlier tokens."""
    offset: int
    """Number of characters of `text` before the token's own text."""
    at_beginning: bool
    """Whether the tokens that are possible there have the texts that they have at the beginning of
    a text."""


class TextOffsets(NamedTuple):
    """Positions of tokens in their text."""

    offsets: list[int]
    """The number of characters before each token; tokens that share a character share its
    offset."""
    at_beginning: int
    """Number of leading tokens that have the texts that they have at the beginning of a text."""


class Texts(dict[int, bytes]):
    """Maps a token id to the bytes that it adds to a text; filled on use, and includes special
    tokens."""

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
        """Returns a token's text; a part of a character appears as a replacement character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self[token_id].decode(errors="replace")
        return text

    def name(self, token_id: int) -> str:
        r"""Returns the text of a token, or its bytes in OpenAI's form if these are not whole
        characters: `bytes:\xf0\x9f`."""
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
    """Maps a token id to the bytes that the token adds after others.

    Exact for the decoders that `detokenizer` supports. For others it is the decoding of the single
    id, which may have replacement characters instead of a part of a character. An id that the
    tokenizer does not know adds no bytes.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        machines = {skip: detokenizer.start(skip) for skip in (False, True)}
        super().__init__(machines[False])
        self.at_beginning = Texts(machines[False], at_beginning=True)
        """The same for a token without text before it."""
        self.whole = {skip: cache(partial(_whole, machine)) for skip, machine in machines.items()}
        """Maps `skip_special_tokens` to a function from a token id to the text that it adds after a
        complete character; None if the text depends on other tokens."""
        self._detokenizer = detokenizer

    def offsets(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        sent: str | None = None,
    ) -> TextOffsets:
        """Returns the offsets of the tokens of a text. `sent` is the original text of the tokens,
        which may spell special tokens that are skipped, and lack a space that the tokenizer puts
        after those."""
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
        """Returns the tokens with the texts in `sent`, where these differ from the written ones."""
        found, chars = [], 0
        for token_id, (text, offset, at_beginning) in zip(token_ids, written, strict=True):
            if not sent.startswith(text or self.text(token_id), chars):
                if self._detokenizer.is_special(token_id):
                    text = ""  # the tokenizer has added it
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
    """Writes one text token by token, with the detokenizer `incremental`.

    After a token of complete characters nothing is held back. The next such token is then not
    pushed, since the detokenizer would return its text and keep no state.
    """

    def __init__(
        self, texts: TokenTexts, incremental: IncrementalDetokenizer, skip_special_tokens: bool
    ) -> None:
        self._texts = texts
        self._incremental = incremental
        self._whole = texts.whole[skip_special_tokens]
        self._is_closed = False

    def write(self, token_id: int) -> TokenText:
        """Pushes a token, and finds where its own text begins."""
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
