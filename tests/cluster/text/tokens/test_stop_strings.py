"""Stop strings, compared with a plain search in the whole text."""

from __future__ import annotations

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.tokens.stop_strings import StopChecker

PIECES = st.lists(st.text("ab ", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=4)


def oracle(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """Reads character by character. Returns (text, stop, tokens read)."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and count > min_tokens:
                stop = max(ended, key=len)
                return text if include else text[: -len(stop)], stop, count
    return text, None, len(pieces)


def run(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> tuple[list[str], str | None, int]:
    checker = StopChecker(stops, include_in_output=include, min_tokens=min_tokens)
    shown = []
    for count, piece in enumerate(pieces, 1):
        shown.append(checker.push(piece, count))
        if checker.matched is not None:
            return shown, checker.matched, count
    return [*shown, checker.flush()], None, len(pieces)


@settings(max_examples=600, deadline=None)
@given(PIECES, STOPS, st.booleans(), st.integers(0, 6))
def test_text_stop_and_token_equal_those_of_a_plain_search(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    shown, stop, count = run(pieces, stops, include, min_tokens)
    assert ("".join(shown), stop, count) == oracle(pieces, stops, include, min_tokens)


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS)
def test_exactly_the_possible_beginning_of_a_stop_string_is_held(
    pieces: list[str], stops: list[str]
) -> None:
    checker, text, shown = StopChecker(stops), "", ""
    for count, piece in enumerate(pieces, 1):
        text += piece
        shown += checker.push(piece, count)
        if checker.matched is not None:
            return
        longest = max(
            size
            for stop in stops
            for size in range(len(stop))
            if text.endswith(stop[:size])  # the empty prefix always matches
        )
        assert shown == text[: len(text) - longest]


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=30), STOPS, st.booleans(), st.data())
def test_the_split_into_pieces_does_not_matter(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, cut = run([text], stops, include, 0), run(pieces, stops, include, 0)
    assert ("".join(whole[0]), whole[1]) == ("".join(cut[0]), cut[1])


def test_the_stop_that_completes_first_wins() -> None:
    assert run(["xabc"], ["abc", "b"], False, 0) == (["xa"], "b", 1)


def test_the_longer_of_two_stops_that_complete_together_wins() -> None:
    assert run(["xa", "bc"], ["c", "bc", "abc"], False, 0) == (["x", ""], "abc", 2)


def test_a_stop_within_min_tokens_is_text() -> None:
    assert run(["ab", "c", "ab"], ["ab"], False, 2) == (["ab", "c", ""], "ab", 3)


def test_a_stop_begun_within_min_tokens_and_completed_after_counts() -> None:
    assert run(["xa", "b"], ["ab"], False, 1) == (["x", ""], "ab", 2)


def test_a_shown_stop_holds_nothing_back() -> None:
    assert run(["<", "end", ">", "x"], ["<end>"], True, 0) == (["<", "end", ">"], "<end>", 3)


def test_without_stops_text_passes() -> None:
    checker = StopChecker([], min_tokens=3)
    assert (checker.push("abc", 1), checker.flush(), checker.matched) == ("abc", "", None)


def test_equal_requests_share_what_their_stops_need() -> None:
    """A request with many long stop strings needs thousands of nodes of about 280 bytes each."""
    stops = [chr(97 + index) * 250 for index in range(16)]
    tracemalloc.start()
    try:
        checkers = [StopChecker(stops) for _ in range(20)]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(checkers) == 20
    assert kept < 3 << 20


def test_a_thousand_requests_leave_little_memory() -> None:
    tracemalloc.start()
    try:
        for request in range(100):
            stops = [chr(97 + index) * 250 + str(request) for index in range(16)]
            StopChecker(stops)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 3 << 20
