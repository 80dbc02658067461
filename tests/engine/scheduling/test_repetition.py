"""`RepetitionPattern` ends an output at the first token after which it ends with enough copies."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.engine.request import Request
from swell.engine.wire import EngineCoreRequest, FinishReason, RepetitionPattern
from swell.worker.sampler_wire import SamplerParams

PROMPT = [1, 1, 1, 1]
patterns = st.integers(1, 4).flatmap(
    lambda least: st.builds(
        RepetitionPattern, st.just(least), st.integers(least, 6), st.integers(2, 4)
    )
)


def core(
    pattern: RepetitionPattern | None, output: list[int], max_tokens: int = 100, min_tokens: int = 0
) -> EngineCoreRequest:
    return EngineCoreRequest(
        "r",
        PROMPT,
        SamplerParams(),
        max_tokens,
        min_tokens,
        output_token_ids=output,
        repetition=pattern,
    )


def first_end(outputs: list[int], pattern: RepetitionPattern, min_tokens: int) -> int | None:
    """Returns the number of outputs at which vLLM's definition ends the request."""
    for count in range(max(min_tokens, 1), len(outputs) + 1):
        for size in range(pattern.min_size, pattern.max_size + 1):
            copies = [
                outputs[count - size * (copy + 1) : count - size * copy]
                for copy in range(pattern.min_count)
            ]
            fits = size * pattern.min_count <= count
            if fits and all(one == copies[0] for one in copies):
                return count
    return None


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    patterns,
    st.integers(0, 8),
    st.integers(0, 5),
    st.integers(1, 5),
)
def test_an_output_ends_at_the_first_repetition(
    outputs: list[int], pattern: RepetitionPattern, min_tokens: int, known: int, at_once: int
) -> None:
    """Also if another engine sampled the first outputs, and if steps sample several tokens."""
    end = first_end(outputs, pattern, min_tokens)
    known = min(known, len(outputs) if end is None else end - 1)
    request = Request(core(pattern, outputs[:known], min_tokens=min_tokens), b"", 0, 1, 0.0)
    taken, last = known, None
    while taken < len(outputs) and (last is None or not last.finished):
        last = request.append(outputs[taken : taken + at_once], [])
        taken += len(last.new_token_ids)
    if end is None:
        assert last is None or not last.finished
        return
    assert last is not None
    assert taken == end
    assert (last.finish_reason, last.stop_reason) == (
        FinishReason.REPETITION,
        "repetition_detected",
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eos_token_ids": [7]}, FinishReason.STOP),
        ({"stop_token_ids": [7]}, FinishReason.STOP),
        ({"max_tokens": 2}, FinishReason.LENGTH),
        ({}, FinishReason.REPETITION),
    ],
)
def test_other_reasons_come_first(changes: dict[str, object], reason: FinishReason) -> None:
    given = msgspec.structs.replace(core(RepetitionPattern(1, 1, 2), [7]), **changes)
    assert Request(given, b"", 0, 1, 0.0).append([7], []).finish_reason is reason
