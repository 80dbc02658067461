"""The proposals of prompt lookup (n-gram), against a search through all tokens."""

from __future__ import annotations

from array import array
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from swell.engine.scheduling import ngram
from swell.engine.scheduling.ngram import NgramProposer


def by_search(tokens: list[int], count: int, min_match: int, max_match: int) -> list[int]:
    """The reference: the longest match among the newest places where the last tokens occur."""
    last = len(tokens)
    if last < min_match:
        return []
    suffix = tokens[last - min_match :]
    places = [p for p in range(min_match, last) if tokens[p - min_match : p] == suffix]

    def length(place: int) -> int:
        matched = 0
        while matched < min(max_match, place) and (
            tokens[place - matched - 1] == tokens[last - matched - 1]
        ):
            matched += 1
        return matched

    newest = places[::-1][: ngram.MAX_PLACES]
    if not newest:
        return []
    best = max(newest, key=lambda place: (length(place), place))
    followed = list(tokens)
    for place in range(best, best + count):
        followed.append(followed[place])
    return followed[last:]


texts = st.one_of(
    st.lists(st.integers(0, 3), max_size=60),
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 9)).map(
        lambda repeated: repeated[0] * repeated[1]
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    tokens=texts,
    cuts=st.sets(st.integers(0, 60)),
    count=st.integers(1, 9),
    min_match=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_a_proposal_follows_the_longest_match(tokens, cuts, count, min_match, more):
    """A proposal is what followed the longest match, also if the tokens grow from call to call."""
    proposer = NgramProposer(min_match, min_match + more)
    for cut in sorted({*cuts, len(tokens)}):
        known = tokens[:cut]
        found = proposer.propose(array("I", known), count)
        assert found == by_search(known, count, min_match, min_match + more)


def test_a_repetition_is_proposed_up_to_the_requested_length():
    tokens = array("I", [1, 2, 3, 1, 2, 3, 1, 2])
    assert NgramProposer(2, 4).propose(tokens, 7) == [3, 1, 2, 3, 1, 2, 3]


def test_the_longest_match_counts_and_the_newest_of_equal_ones():
    tokens = [7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3]
    assert NgramProposer(3, 3).propose(array("I", tokens), 1) == [60]
    tokens[10] = 7
    assert NgramProposer(3, 4).propose(array("I", tokens), 1) == [50]


def test_a_call_indexes_a_bounded_number_of_tokens_before_it_proposes():
    tokens = array("I", range(10_000))
    tokens += tokens[:500]
    proposer = NgramProposer(3, 8)
    calls = -(-len(tokens) // ngram.STEP_TOKENS)
    proposals = []
    for _ in range(calls):
        before = len(proposer._earlier)
        proposals.append(proposer.propose(tokens, 2))
        assert len(proposer._earlier) - before <= ngram.STEP_TOKENS
    assert proposals == [[]] * (calls - 1) + [[500, 501]]


def test_the_index_is_bounded_and_keeps_the_newest_tokens():
    with patch.object(ngram, "INDEX_TOKENS", 100):
        tokens, proposer = array("I"), NgramProposer(2, 4)
        for token in range(1000):
            tokens.append(token % 70 + token // 350 * 1000)
            proposer.propose(tokens, 1)
            assert len(proposer._earlier) <= 202 and len(proposer._newest) <= 202
        assert proposer.propose(tokens, 2) == by_search(tokens.tolist(), 2, 2, 4) != []
