"""The text of one answer, from its tokens and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swell.cluster.client.requests.outputs import ContentLimit
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.parsers.deltas import AnswerDelta, Content
from swell.cluster.text.tokens.detokenizer import Detokenizer, TextStart
from swell.cluster.text.tokens.stop_strings import StopChecker
from swell.cluster.text.tokens.token_texts import TextWriter, TokenTexts


class OutputText:
    """Detokenizes output tokens one by one. A stop string ends the text.

    Stop strings apply to what a client sees as content. If all text is content, text that may begin
    a stop string is held back, and the text is cut before the stop string. Otherwise a parser of
    the answer's format finds the content while the text arrives, since only the content decides
    when the engine can stop. The text is then returned whole, and `content_limit` says how much of
    its content may be shown: the reader of the text has its own parser. A stop string never matches
    across reasoning or a tool call.
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
        """`make_content_parser` creates the parser that finds the content; None if all text is
        content."""
        skip = params.skip_special_tokens
        self._machine = detokenizer.start(skip, text_start, prompt_token_ids)
        self._writer = TextWriter(texts, self._machine, skip)
        """Writes to the machine, and returns token offsets where these are needed too."""
        self.includes_stop = params.include_stop_str_in_output
        """Whether the text ends with what has ended the answer: a stop string or a stop token."""
        self._stops = StopChecker(
            params.stop_strings,
            include_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._parser: Parser | None = None
        """Finds the content, if stop strings apply only to a part of the text."""
        if make_content_parser is not None and params.stop_strings:
            self._parser = make_content_parser()
        self._content_chars = 0
        """Number of content characters that may be shown; counted only if there is a parser."""
        self._pieces: list[str] = []
        """Text that may be shown; in a stream of deltas, only what `take` has not returned yet."""
        self._num_chars = 0
        """Number of characters of all text pushed with offsets, including text that is held back or
        follows a stop string."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    @property
    def content_limit(self) -> ContentLimit | None:
        """How much content may be shown; None if the text itself is cut."""
        if self._parser is None:
            return None
        stops = self._stops
        is_end = stops.include_in_output and stops.matched is not None
        return ContentLimit(self._content_chars, is_end)

    def push(self, token_id: int, num_tokens: int) -> bool:
        """Appends output token number `num_tokens`. Returns True if a stop string has ended the
        text."""
        return self._append(self._machine.push(token_id), num_tokens)

    def push_with_offset(
        self, token_id: int, num_tokens: int, *, is_text: bool
    ) -> tuple[bool, int, bool]:
        """Appends a token like `push`. Also returns the number of characters before the token, and
        whether the token has the text that it has at the beginning of a text. `is_text` is False
        for an end token, whose text is dropped."""
        if is_text:
            text, offset, at_beginning = self._writer.write(token_id)
        else:
            text, offset, at_beginning = "", self._machine.pending_chars, False
        offset += self._num_chars
        self._num_chars += len(text)
        return self._append(text, num_tokens), offset, at_beginning

    def finish(self, num_tokens: int) -> bool:
        """Appends text that was held back: the answer has finished. Returns True if it contains a
        stop string."""
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
        """Returns all text so far; with `delta_only`, the text since the last call."""
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
        """Returns True if a stop string has ended the content."""
        stops = self._stops
        for part in parsed:
            if isinstance(part, Content):
                self._content_chars += len(stops.push(part.text, num_tokens))
                if stops.matched is not None:
                    return True
            else:
                self._content_chars += len(stops.flush())
        return False
