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
