"""The text of one answer as it grows, one token at a time (see `detokenizer.py`).

`push` adds a token. `prime_with_prompt` begins after the text of other tokens: those of a prompt
that the answer continues. What these leave unfinished (the first bytes of a character) is the
beginning of the answer's text, since only the answer makes it text.

    ids:   prompt ............ | answer ...........
    text:  prompt ...... | answer .................
                         ^ `finish_prompt`: after the last character that the prompt finishes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4
MAX_PENDING_TOKENS = 16

Decode = Callable[[list[int]], str]


class IncrementalDetokenizer:
    """The base class, and the one of a model without a tokenizer: there is no text."""

    TAIL_TOKENS = 0
    """Tokens at the end of a prompt that may matter for the text after it."""

    @property
    def at_beginning(self) -> bool:
        """The next token may have another text than it has after others."""
        return False

    @property
    def pending_chars(self) -> int:
        """Characters that are complete and not given yet."""
        return 0

    def push(self, token_id: int) -> str:
        """The text that this token makes certain."""
        return ""

    def flush(self) -> str:
        """The rest, once the answer has ended."""
        return ""

    def finish_prompt(self) -> str:
        """What was pushed is a prompt, and an answer comes: the rest of the prompt's text."""
        return ""

    def token_bytes(self, token_id: int, *, at_beginning: bool = False) -> bytes:
        """What a token alone adds after others, or at the beginning of a text."""
        return b""

    def whole_text(self, token_id: int) -> str:
        """The text of a token wherever no character is open; empty: that depends on others."""
        return ""

    def skip_beginning(self) -> None:
        """There is text before: the next token is not the first."""

    def prime_with_prompt(self, token_ids: Sequence[int]) -> None:
        """Begin after the text of these, at a cost that does not grow with their number."""
        tail = self._context_tokens(token_ids)
        if len(tail) < len(token_ids):
            self.skip_beginning()
        for token_id in tail:
            self.push(token_id)
        self.finish_prompt()

    def _context_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Those at the end on which the text after them depends."""
        return token_ids[max(0, len(token_ids) - self.TAIL_TOKENS) :]


class WindowDetokenizer(IncrementalDetokenizer):
    """Text of tokens under a decoder of which nothing is known: decodes again from one emission
    before the last, and shows what has been added.

    ids: .......... | context | pending |
                    ^start    ^read
    """

    TAIL_TOKENS = MAX_PENDING_TOKENS

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._all_ids: list[int] = []
        self._window: list[int] = []
        self._read = 0
        self._context_text = ""
        self._shown: list[str] = []

    def push(self, token_id: int) -> str:
        self._all_ids.append(token_id)
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.startswith(self._context_text) and not text.endswith(REPLACEMENT)
        full = len(self._window) - self._read >= MAX_PENDING_TOKENS
        added = text[len(self._context_text) :]
        if not added and full:
            # Tokens without text must not push the context out of the window.
            del self._window[self._read :]
            return ""
        if not added or not (certain or full):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._context_text = self._decode(self._window)
        self._shown.append(added)
        return added

    def flush(self) -> str:
        shown, text = "".join(self._shown), self._decode(self._all_ids)
        if text.startswith(shown):
            return text[len(shown) :]
        return self._decode(self._window)[len(self._context_text) :]

    def token_bytes(self, token_id: int, *, at_beginning: bool = False) -> bytes:
        return self._decode([token_id]).encode()
