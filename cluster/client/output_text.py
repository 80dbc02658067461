"""The text of one answer, from its tokens and its stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swell.cluster.client.outputs import ContentLimit
from swell.cluster.text.detokenizer import Detokenizer, TextStart
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.parsers.deltas import AnswerDelta, Content
from swell.cluster.text.sampling_params import SamplingParams
from swell.cluster.text.stop_strings import StopChecker
from swell.cluster.text.token_texts import TextWriter, TokenTexts


class OutputText:
    """Detokenizes output tokens one by one. A stop string ends the text.

    Stop strings apply to what a client sees as content. If that is all text, then text that may
    begin a stop string is held back, and the text is cut before the stop string. Otherwise a parser
    of the answer's format finds the content while the text comes, since only the content decides
    when the engine can stop. The text is then given whole, and `content_limit` says how much of its
    content may be shown: its reader has a parser of its own. No stop string reaches across
    reasoning or a call.
    """

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: Detokenizer,
        texts: TokenTexts,
        text_start: TextStart,
        prompt_token_ids: list[int],
        make_content_parser: Callable[[], Parser] | None = None,
    ) -> None:
        """`make_content_parser` makes the parser that finds the content; None: all text is
        content."""
        skip = params.skip_special_tokens
        self._machine = detokenizer.start(skip, text_start, prompt_token_ids)
        self._writer = TextWriter(texts, self._machine, skip)
        """Writes to the machine where offsets of tokens are needed too."""
        self._stops = StopChecker(
            params.stop_strings,
            include_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._parser: Parser | None = None
        """Finds the content, where stop strings are to be found in it."""
        if make_content_parser is not None and params.stop_strings:
            self._parser = make_content_parser()
        self._content_chars = 0
        """Characters of content that may be shown; counted only where there is a parser."""
        self._pieces: list[str] = []
        """Text that is given; of a stream of deltas only what has not been taken."""
        self._num_chars = 0
        """Of all text that was pushed with offsets, also of what is held back or comes after a stop
        string."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    @property
    def content_limit(self) -> ContentLimit | None:
        """None: the text is cut where its content is."""
        if self._parser is None:
            return None
        stops = self._stops
        is_end = stops.include_in_output and stops.matched is not None
        return ContentLimit(self._content_chars, is_end)

    def push(self, token_id: int, num_tokens: int) -> bool:
        """Append a token, output token number `num_tokens`. True: a stop string has ended the
        text."""
        return self._append(self._machine.push(token_id), num_tokens)

    def push_with_offset(
        self, token_id: int, num_tokens: int, *, is_text: bool
    ) -> tuple[bool, int, bool]:
        """The same; also the number of characters before the token, and whether the token has the
        text of a beginning. An end token is no text."""
        if is_text:
            text, offset, at_beginning = self._writer.write(token_id)
        else:
            text, offset, at_beginning = "", self._machine.pending_chars, False
        offset += self._num_chars
        self._num_chars += len(text)
        return self._append(text, num_tokens), offset, at_beginning

    def finish(self, num_tokens: int) -> bool:
        """Append what was held back: the answer has ended. True: it holds a stop string."""
        if self._append(self._machine.flush(), num_tokens):
            return True
        if self._parser is None:
            self._pieces.append(self._stops.flush())
            return False
        if self._read_content(self._parser.flush(), num_tokens):
            return True
        self._content_chars += len(self._stops.flush())
        return False

    def take(self, *, delta_only: bool) -> str:
        """All text so far; with `delta_only`, what is new since the last time."""
        text = "".join(self._pieces)
        self._pieces = [] if delta_only else [text]
        return text

    def clear(self) -> None:
        self._pieces.clear()

    def _append(self, text: str, num_tokens: int) -> bool:
        if not text:
            return False
        stops = self._stops
        if self._parser is not None:
            self._pieces.append(text)
            return self._read_content(self._parser.push(text), num_tokens)
        self._pieces.append(stops.push(text, num_tokens))
        return stops.matched is not None

    def _read_content(self, parsed: Iterable[AnswerDelta], num_tokens: int) -> bool:
        """True: a stop string has ended the content."""
        stops = self._stops
        for part in parsed:
            if isinstance(part, Content):
                self._content_chars += len(stops.push(part.text, num_tokens))
                if stops.matched is not None:
                    return True
            else:
                self._content_chars += len(stops.flush())
        return False
