"""The blocks of a session are found again after other traffic, and take no room that others
need."""

from __future__ import annotations

import pytest

from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.engine.engine_harness import CLIENT, engine

BLOCK, BLOCKS = 16, 24
"""The tokens of a block and the blocks of the cache, which holds 384 tokens."""


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (number * 37 + index * 11) % 200 for index in range(tokens)]


class Conversation:
    """An engine with a small cache that runs one request after the other."""

    def __init__(self, **overrides: object) -> None:
        with engine() as probe:
            block_bytes = 4_000_000 // probe._engine.core.scheduler.kv.pool.num_blocks
        settings = {"cache__memory_bytes": BLOCKS * block_bytes, "scheduler__max_rows": 4}
        self.llm = engine(**settings | overrides)
        self.core = self.llm._engine.core
        assert self.core.scheduler.kv.pool.num_blocks == BLOCKS
        self._asked = 0

    def ask(self, ids: list[int], count: int = 4, *, keep: bool = False) -> tuple[list[int], int]:
        """Returns the answer and the number of cached tokens of the prompt."""
        self._asked += 1
        request = EngineCoreRequest(
            f"{self._asked}", ids, SamplerParams(temperature=0.0), count, keep_blocks=keep
        )
        assert self.core.add_request(request, CLIENT) is None
        tokens, cached = list[int](), 0
        while self.core.has_work:
            for output in self.core.step().get(CLIENT, []):
                tokens += output.new_token_ids
                cached = max(cached, output.num_cached_tokens)
        return tokens, cached

    def push(self) -> None:
        """Runs other requests, which fill the cache twice."""
        for number in range(100, 100 + 2 * BLOCKS * BLOCK // 150):
            self.ask(prompt(number, 150))

    def chunks(self, *, keep: bool) -> list[int]:
        """Returns the number of cached tokens at each chunk of a session, with other requests in
        between."""
        ids, found = prompt(1 + keep, 90), []
        for chunk in range(3):
            answer, cached = self.ask(ids, keep=keep)
            found.append(cached)
            self.push()
            ids = [*ids, *answer, *prompt(2 + chunk, 20)]
        return found


@pytest.mark.parametrize("steps", [1, 2])
def test_a_session_survives_other_requests(steps: int) -> None:
    talk = Conversation(scheduler__steps_in_flight=steps)
    # All full blocks of the previous tokens: of 94, and of 118 whose last token was not computed.
    assert talk.chunks(keep=True) == [0, 80, 112]
    assert talk.chunks(keep=False)[1:] == [0, 0], "others push it out, so the test can fail"
    talk.llm.close()


def test_a_session_that_may_keep_nothing_is_evicted_like_others() -> None:
    talk = Conversation(cache__session_fraction=0.0)
    assert talk.chunks(keep=True) == [0, 0, 0]
    talk.llm.close()


def test_the_most_recently_used_session_is_kept() -> None:
    """The session that was used last is kept: half of the cache, 12 blocks, may be kept, and each
    session has 7."""
    talk = Conversation()
    for number in (1, 2):
        talk.ask(prompt(number, 112), keep=True)
    talk.push()
    assert talk.ask(prompt(2, 112), keep=True)[1] == 96, "all but the block of the last token"
    assert talk.ask(prompt(1, 112), keep=True)[1] < 96
    talk.llm.close()


def test_running_requests_may_use_all_kept_blocks() -> None:
    talk = Conversation(cache__session_fraction=1.0)
    answer, _ = talk.ask(prompt(1, 200), keep=True)
    for number in (2, 3):
        talk.ask(prompt(number, 200), keep=True)
    assert talk.core.scheduler.kv.usage == 0
    long = prompt(9, BLOCKS * BLOCK - 8)
    assert len(talk.ask(long, 8)[0]) == 8, "it fills the whole cache"
    assert talk.ask(prompt(1, 200))[0] == answer
    talk.llm.close()
