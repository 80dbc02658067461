"""The text of one answer as it grows, one token at a time (see `detokenizer.py`).

`push` adds a token. `prime_with_prompt` begins after the text of the prompt that the answer
continues. If the prompt ends with an incomplete character, its bytes begin the answer's text, since
only the answer completes it.

    ids:   prompt ............ | answer ...........
    text:  prompt ...... | answer .................
                         ^ `finish_prompt`: after the last character that the prompt completes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4
MAX_PENDING_TOKENS = 16

Decode = Callable[[list[int]], str]


class IncrementalDetokenizer:
    """The base class, used for a model without a tokenizer: there is no text."""

    TAIL_TOKENS = 0
    """Number of tokens at the end of a prompt that may affect the text after it."""

    @property
    def at_beginning(self) -> bool:
        """Whether the next token may have another text than it has after other tokens."""
        return False

    @property
    def pending_chars(self) -> int:
        """Number of characters that are complete and not returned yet."""
        return 0

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that is certain now."""
        return ""

    def flush(self) -> str:
        """Returns the remaining text; call it when the answer has finished."""
        return ""

    def finish_prompt(self) -> str:
        """Marks the pushed tokens as a prompt that an answer follows; returns the rest of the
        prompt's text."""
        return ""

    def token_bytes(self, token_id: int, *, at_beginning: bool = False) -> bytes:
        """Returns the bytes that a single token adds after others, or at the beginning of a
        text."""
        return b""

    def whole_text(self, token_id: int) -> str:
        """Returns the text of a token if no character is incomplete before it; empty if it depends
        on other tokens."""
        return ""

    def skip_beginning(self) -> None:
        """Marks the next token as not the first: there is text before it."""

    def prime_with_prompt(self, token_ids: Sequence[int]) -> None:
        """Begins after the text of these tokens, at a cost that does not grow with their number."""
        tail = self._context_tokens(token_ids)
        if len(tail) < len(token_ids):
            self.skip_beginning()
        for token_id in tail:
            self.push(token_id)
        self.finish_prompt()

    def _context_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the tokens at the end on which the text after them depends."""
        return token_ids[max(0, len(token_ids) - self.TAIL_TOKENS) :]


class WindowDetokenizer(IncrementalDetokenizer):
    """Detokenizes with any decoder: decodes the tokens since the last but one returned text again,
    and returns what was added.

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
