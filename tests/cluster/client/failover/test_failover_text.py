"""Text, stops and counts of an answer are the same however often it is moved."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_cluster import FakeCluster, Stream, body, truth
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

TEXT = "Grüße 😀 aus 我喜欢, END and more"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def byte_ids(text: str) -> list[int]:
    """Encodes a text with one token per byte, so that any multi-byte character can be split."""
    vocab = tokenizers_for_tests.byte_level().get_vocab()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [vocab[names[byte]] for byte in text.encode()]


def moved_at(folder: Path, cut: int, payload: dict[str, Any], script: list[int] | None) -> Stream:
    """Returns the stream of `payload`, which moves to another engine after `cut` tokens."""

    async def run() -> Stream:
        async with FakeCluster(folder, script).serving() as cluster:
            first = await cluster.join(0, steps=cut)
            stream = Stream(cluster, payload)
            await stream.has(cut)
            await cluster.join(1)
            await cluster.kill(first)
            return await stream.done

    return asyncio.run(run())


def test_the_script_is_cut_within_characters() -> None:
    ids = byte_ids(TEXT)
    assert len(ids) == len(TEXT.encode()) > len(TEXT)
    assert tokenizers_for_tests.byte_level().decode(ids) == TEXT


@pytest.mark.parametrize("cut", [3, 4, 8, 9, 10, 11, 17, 18])
def test_text_continues_within_a_character(folder: Path, cut: int) -> None:
    script = byte_ids(TEXT)
    stream = moved_at(folder, cut, body([1], len(script)), script)
    assert stream.text == TEXT and stream.ids == script
    assert stream.comments == [": x-swell-engine 0,1"]


@pytest.mark.parametrize("behind", [1, 2])
def test_a_stop_string_may_span_a_failover(folder: Path, behind: int) -> None:
    script = byte_ids(TEXT)
    shown = TEXT[: TEXT.index("END")]
    cut = len(shown.encode()) + behind
    payload = body([1], len(script), stop="END", stream_options={"include_usage": True})
    stream = moved_at(folder, cut, payload, script)
    assert stream.text == shown and stream.finish_reason == "stop"
    assert stream.usage is not None
    assert stream.usage["prompt_tokens"] == 1
    assert stream.usage["completion_tokens"] == cut + len("END") - behind


@pytest.mark.parametrize("min_tokens", [0, 20])
def test_limits_count_from_the_first_token_of_all_attempts(folder: Path, min_tokens: int) -> None:
    """The stop token first occurs before the move. With `min_tokens`, the first occurrence that
    counts may come after it."""
    whole = truth([1], 400)
    stop = whole[2]
    ends = next(i for i, token in enumerate(whole) if token == stop and i + 1 >= min_tokens)
    payload = body([1], 400, stop_token_ids=[stop], min_tokens=min_tokens)
    stream = moved_at(folder, min(ends, 10), payload, None)
    assert stream.ids == whole[: ends + 1]
    assert stream.finish_reason == "stop"


def test_max_tokens_counts_over_all_attempts(folder: Path) -> None:
    payload = body([1], 12, temperature=0.9, stream_options={"include_usage": True})
    stream = moved_at(folder, 11, payload, None)
    assert stream.ids == truth([1], 12) and stream.finish_reason == "length"
    assert stream.usage is not None and stream.usage["completion_tokens"] == 12
