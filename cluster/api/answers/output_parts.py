"""Splits the text of an answer into parts, with their tokens if these are requested."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from swell.cluster.api.answers.logprobs import ChatTokenLogprob, chat_logprobs
from swell.cluster.client.requests.outputs import CompletionOutput, ContentLimit
from swell.cluster.text.parsers import deltas as parts
from swell.cluster.text.parsers.base import Parser


class ContentCut:
    """Passes on the parts of one answer. A stop string may still cut the content, so content beyond
    the limit, and the parts after it, are held back until the limit has moved."""

    def __init__(self) -> None:
        self._num_chars = 0
        """Number of characters of content passed on so far."""
        self._held: Sequence[parts.AnswerDelta] = ()

    def show(
        self, parsed: list[parts.AnswerDelta], limit: ContentLimit | None
    ) -> list[parts.AnswerDelta]:
        """Returns the parts, held and new, that may be sent now."""
        if limit is None:
            return parsed
        waiting, shown = [*self._held, *parsed], list[parts.AnswerDelta]()
        self._held = ()
        for place, part in enumerate(waiting):
            if not isinstance(part, parts.Content):
                shown.append(part)
                continue
            room = limit.chars - self._num_chars
            if room > 0:
                shown.append(part if len(part.text) <= room else parts.Content(part.text[:room]))
            if len(part.text) > room:
                self._held = [parts.Content(part.text[room:]), *waiting[place + 1 :]]
                self._num_chars += room
                break
            self._num_chars += len(part.text)
            if limit.is_end and self._num_chars == limit.chars:
                break
        return shown


class PartReader:
    """Parses the output of one answer into parts, whole or delta by delta."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._cut = ContentCut()

    def read(self, output: CompletionOutput) -> list[parts.AnswerDelta]:
        parsed = self._parser.push(output.text)
        if output.finish_reason is not None:
            parsed += self._parser.flush()
        return self._cut.show(parsed, output.content_limit)


PartWithLogprobs = tuple[parts.AnswerDelta, list[ChatTokenLogprob]]


class _Token(msgspec.Struct, eq=False):
    start: int
    """Number of characters of the answer's text before this token."""
    end: int
    logprob: ChatTokenLogprob


class LogprobPartReader:
    """Parses an answer into parts, and assigns to each content the tokens that wrote it. The result
    does not depend on how the answer is cut into deltas.

    The parser receives the text of one token at a time, as soon as the next token shows where the
    text ends. The parser may hold text back, and it drops markers. Therefore each content is
    searched in the text that the parser received since its last part, and the tokens that overlap
    it are reported. Tokens without text, such as EOS, belong to no content.
    """

    def __init__(self, parser: Parser, top: int) -> None:
        self._parser = parser
        self._top = top
        self._cut = ContentCut()
        self._limit: ContentLimit | None = None
        self._text = ""
        """The answer's text from character `_begin` on."""
        self._begin = 0
        self._at = 0
        """Number of characters that the parser has received."""
        self._next: deque[_Token] = deque()
        """Tokens whose end is not known yet."""
        self._pushed: list[_Token] = []
        """Tokens that the parser has received but not yet turned into a part, and their text."""
        self._pushed_text = ""

    def read(self, output: CompletionOutput) -> list[PartWithLogprobs]:
        assert output.logprobs is not None, "the output must have logprobs"
        ended = output.finish_reason is not None
        self._limit = output.content_limit
        self._text += output.text
        logprobs = chat_logprobs(output.logprobs, self._top).content
        for one, offset in zip(logprobs, output.logprobs.offsets, strict=True):
            self._next.append(_Token(offset, offset, one))
        parsed: list[PartWithLogprobs] = []
        while len(self._next) > 1 or (ended and self._next):
            token = self._next[0]
            end = self._begin + len(self._text)
            if len(self._next) > 1:
                if self._next[1].start > end and not ended:
                    break  # its text is held back until no stop string can begin in it
                end = min(end, self._next[1].start)
            self._next.popleft()
            parsed += self._push_token(token, max(end, self._at))
        self._text, self._begin = self._text[self._at - self._begin :], self._at
        return parsed + self._attribute(self._parser.flush() if ended else [])

    def _push_token(self, token: _Token, end: int) -> list[PartWithLogprobs]:
        """Gives the parser the token's text, up to character `end` of the answer."""
        text = self._text[self._at - self._begin : end - self._begin]
        self._at = token.end = end
        self._pushed.append(token)
        self._pushed_text += text
        return self._attribute(self._parser.push(text)) if text else []

    def _attribute(self, parsed: list[parts.AnswerDelta]) -> list[PartWithLogprobs]:
        """Returns the parser's new parts with the tokens of each content."""
        found: list[PartWithLogprobs] = []
        for part in self._cut.show(parsed, self._limit):
            tokens = [] if isinstance(part, parts.ToolCall) else self._find(part.text)
            found.append((part, tokens if isinstance(part, parts.Content) else []))
        return found

    def _find(self, text: str) -> list[ChatTokenLogprob]:
        """Returns the tokens of a part, whose text is a piece of the text that the parser
        received."""
        given = self._pushed_text
        at = self._locate(text)
        if at < 0:
            self._consume(len(given))
            return []
        start = self._at - len(given) + at
        end = start + len(text)
        found = [
            token
            for token in self._pushed
            if (token.start < end and token.end > start) or start <= token.start == token.end < end
        ]
        self._pushed = [token for token in self._pushed if token not in found]
        self._consume(at + len(text))
        return [token.logprob for token in found]

    def _locate(self, text: str) -> int:
        """Returns where the text of the parser's next part begins in the received text, or -1. It
        may begin at once, after a marker that the parser dropped, or after more dropped text; in
        the last case it ends where a possible beginning of a marker is held back."""
        given, markers = self._pushed_text, self._parser.markers
        begin = max(
            (len(m) for m in markers if given.startswith(m) and not text.startswith(m)), default=0
        )
        if given.startswith(text, begin):
            return begin
        longest = max(map(len, markers), default=0)
        for held in range(min(len(given) - len(text), longest), 0, -1):
            may_begin = any(marker.startswith(given[-held:]) for marker in markers)
            if may_begin and given.endswith(text, 0, -held):
                return len(given) - held - len(text)
        return given.rfind(text)

    def _consume(self, chars: int) -> None:
        """Drops the first `chars` characters of the received text, which are assigned."""
        self._pushed_text = self._pushed_text[chars:]
        begin = self._at - len(self._pushed_text)
        self._pushed = [token for token in self._pushed if token.end > begin]


def make_part_reader(
    parser: Parser, top_logprobs: int | None
) -> Callable[[CompletionOutput], list[PartWithLogprobs]]:
    """Returns the reader of one answer. `top_logprobs` is how many tokens are reported at each
    position; None: no log probabilities."""
    if top_logprobs is None:
        reader = PartReader(parser)
        return lambda output: [(part, []) for part in reader.read(output)]
    return LogprobPartReader(parser, top_logprobs).read
