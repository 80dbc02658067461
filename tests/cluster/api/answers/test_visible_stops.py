"""Stop strings apply only to the content of an answer, for any format and any split into tokens. A
stop string in hidden text changes nothing. A stop string in the content ends the answer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.api.answers.output_parts import LogprobPartReader, PartReader
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutputKind
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.parsers.base import ContentParser, Parser
from swell.cluster.text.parsers.deltas import AnswerDelta, Content, merge
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.engine.wire import EngineCoreOutput, FinishReason
from swell.worker.sampler_wire import TokenLogprobs
from tests.cluster.text import tokenizers_for_tests as made
from tests.cluster.text.parsers.sample_outputs import (
    ALL,
    Names,
    parser,
    read,
    symbols,
    texts,
    whole,
)
from tests.support.core_requests import core_request

TOKENIZER = made.byte_level()
DETOKENIZER = Detokenizer(TOKENIZER)

FORMATS = pytest.mark.parametrize("names", ALL[1:], ids=["-".join(map(str, n)) for n in ALL[1:]])


class Answer:
    """The parts that a client receives for `text`, which arrives in steps of `sizes` tokens."""

    def __init__(
        self, names: Names, text: str, sizes: list[int], *, logprobs: bool = False, **fields: Any
    ) -> None:
        params = SamplingParams(
            skip_special_tokens=False, logprobs=0 if logprobs else None, **fields
        )
        core = core_request(params, max_tokens=9999)
        processor = OutputProcessor(DETOKENIZER)
        state = processor.add_request(
            core,
            params,
            kind=RequestOutputKind.DELTA,
            make_content_parser=lambda: parser(names),
        )
        reader = LogprobPartReader(parser(names), 0) if logprobs else PartReader(parser(names))
        self.parts: list[AnswerDelta] = []
        self.logprobs: list[tuple[str, str]] = []
        """Each content part, and the text of the tokens reported with it."""
        self.aborted = False
        ids, turn = TOKENIZER.encode(text).ids, itertools.cycle(sizes)
        while True:
            size = next(turn)
            step, ids = ids[:size], ids[size:]
            extras = [TokenLogprobs([id], [-1.0], 1) for id in step] if logprobs else []
            reason = None if ids else FinishReason.LENGTH
            result = processor.process_outputs(
                [EngineCoreOutput(core.request_id, step, reason, extras=extras)]
            )
            self.aborted |= bool(result.reqs_to_abort)
            if (output := state.queue.get_nowait()) is not None:
                (self.last,) = output.outputs
                self._add(reader, self.last)
            if not ids or result.reqs_to_abort:
                break
        self.parts = merge(self.parts)

    def _add(self, reader: LogprobPartReader | PartReader, output: CompletionOutput) -> None:
        if isinstance(reader, PartReader):
            self.parts += reader.read(output)
            return
        for part, tokens in reader.read(output):
            self.parts.append(part)
            if isinstance(part, Content):
                told = bytes(byte for token in tokens for byte in token.bytes)
                self.logprobs.append((part.text, told.decode(errors="replace")))

    @property
    def reasons(self) -> tuple[str | None, int | str | None]:
        return self.last.finish_reason, self.last.stop_reason


def cut(parts: list[AnswerDelta], stop: str, *, include: bool) -> list[tuple[object, ...]] | None:
    """Returns the expected parts: the first stop string within one run of content ends the answer.
    Returns None if there is no stop string."""
    known, run = symbols(parts), ""
    for place, (kind, *rest) in enumerate(known):
        run = run + str(rest[0]) if kind == "Content" else ""
        if run.endswith(stop):
            return known[: place + 1 - (0 if include else len(stop))]
    return None


SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@FORMATS
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_stop_string_cuts_only_content(names: Names, data: st.DataObject) -> None:
    text = data.draw(texts(names))
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 4))] or "x"
    include, sizes = data.draw(st.booleans()), data.draw(SIZES)
    plain = read(names, [text])
    expected = cut(plain, stop, include=include)
    logprobs = data.draw(st.booleans())
    answer = Answer(
        names, text, sizes, stop=[stop], include_stop_str_in_output=include, logprobs=logprobs
    )
    assert symbols(answer.parts) == (symbols(plain) if expected is None else expected)
    assert answer.reasons == (("length", None) if expected is None else ("stop", stop))


@FORMATS
def test_a_stop_string_of_a_hidden_part_changes_nothing(names: Names) -> None:
    """Tests every text of up to three characters that occurs in the whole answer but not in its
    content, token by token and at once."""
    for text in whole(names):
        plain = read(names, [text])
        shown = "\n".join(part.text for part in plain if isinstance(part, Content))
        pieces = {text[at : at + size] for at in range(len(text)) for size in (1, 2, 3)}
        hidden = sorted(piece for piece in pieces if piece not in shown)
        assert hidden, "the format hides something"
        for sizes in ([1], [9999]):
            answer = Answer(names, text, sizes, stop=hidden)
            assert answer.parts == plain and answer.reasons == ("length", None)


@FORMATS
def test_generation_ends_with_the_token_that_completes_the_stop_string(names: Names) -> None:
    text = "".join(whole(names)) + "\n\n x one two three four five six"
    if not isinstance(read(names, [text])[-1], Content):
        pytest.skip("nothing of this format follows a call as content")
    answer = Answer(names, text, [1], stop=["two"])
    assert answer.aborted and answer.reasons == ("stop", "two")
    told = TOKENIZER.decode(TOKENIZER.encode(text).ids[: answer.last.num_output_tokens])
    assert told.endswith("two")


@FORMATS
def test_nothing_follows_a_stop_string_that_is_shown(names: Names) -> None:
    """A tool call in the same output is dropped too."""
    for call in whole(names):
        text = f"one two{call}"
        plain = read(names, [text])
        if not any(isinstance(part, Content) and part.text.startswith("one two") for part in plain):
            continue  # this format parses the text as reasoning
        for sizes in ([1], [9999]):
            answer = Answer(names, text, sizes, stop=["two"], include_stop_str_in_output=True)
            assert answer.parts == [Content("one two")]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALL[1:]), st.data())
def test_content_tokens_are_reported_up_to_the_stop_string(
    names: Names, data: st.DataObject
) -> None:
    """The parts are the same as without logprobs, and the reported tokens make up the shown
    content."""
    text = f"{data.draw(texts(names, 3))} one two three"
    sizes = data.draw(SIZES)
    plain = Answer(names, text, sizes, stop=["two"])
    answer = Answer(names, text, sizes, stop=["two"], logprobs=True)
    assert (answer.parts, answer.reasons) == (plain.parts, plain.reasons)
    shown = "".join(content for content, _ in answer.logprobs)
    if answer.reasons == ("stop", "two") and "three" not in shown:
        assert not any("three" in told for _, told in answer.logprobs)


def test_a_request_without_stop_strings_creates_no_extra_parser() -> None:
    params, made_parsers = SamplingParams(), list[Parser]()

    def make() -> Parser:
        made_parsers.append(ContentParser())
        return made_parsers[-1]

    OutputProcessor(DETOKENIZER).add_request(core_request(params), params, make_content_parser=make)
    assert not made_parsers
