"""Text of tokens under a decoder of which nothing is known."""

from __future__ import annotations

from swell.cluster.text.incremental_detokenizer import REPLACEMENT, Decode, IncrementalDetokenizer

MAX_PENDING_TOKENS = 16


class WindowDetokenizer(IncrementalDetokenizer):
    """Decodes again from one emission before the last, and shows what has been added.

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
