"""Disaggregated prefill: one engine computes a prompt, another one continues, and computes what it
does not receive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swell.engine.executor import GroupBroken
from swell.engine.wire import EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import CLAIMED, HANDOVER_FOLDER, GroupPlan
from tests.engine.engine_harness import CLIENT, LLM, engine

PROMPT = [3 + (index * 37) % 200 for index in range(70)]
"""A prompt of four full blocks of 16 tokens, with its last token in the fifth."""
WHOLE, NAME = 64, "0123456789abcdef" * 2
TOKENS = 12


def request(id: str, prompt: list[int], max_tokens: int = TOKENS, **fields: Any) -> Any:
    sampler = fields.pop("sampler", SamplerParams(temperature=2.0, seed=5))
    return EngineCoreRequest(id, prompt, sampler, max_tokens, **fields)


def run(llm: LLM, *requests: EngineCoreRequest) -> dict[str, tuple[list[int], int]]:
    """Returns for each request its tokens and the number of cached tokens of its prompt."""
    core = llm._engine.core
    found: dict[str, tuple[list[int], int]] = {r.request_id: ([], 0) for r in requests}
    for each in requests:
        assert core.add_request(each, CLIENT) is None
    while core.has_work:
        for output in core.step().get(CLIENT, []):
            tokens, cached = found[output.request_id]
            assert output.finish_reason is not FinishReason.ERROR, output.stop_reason
            found[output.request_id] = (
                tokens + output.new_token_ids,
                max(cached, output.num_cached_tokens),
            )
    return found


@pytest.fixture(scope="module")
def truth() -> list[int]:
    with engine(cache__prefix_caching=False) as llm:
        return run(llm, request("a", PROMPT))["a"][0]


SPLITS: dict[str, dict[str, Any]] = {
    "one worker": {},
    "tensor 2": {"parallel__tensor": 2},
    "pipeline 2": {"parallel__pipeline": 2},
}


class Pair:
    def __init__(self, folder: Path, **overrides: Any) -> None:
        self.folder = folder / "handover" / HANDOVER_FOLDER
        options = {"cache__handover_folder": str(self.folder.parent), **overrides}
        self.prefill, self.decode = engine(**options), engine(**options)

    def hand_over(self, name: str = NAME, prompt: list[int] = PROMPT) -> list[str]:
        """Computes the prompt on the prefill engine; returns the files that exist then."""
        whole = prompt[: (len(prompt) - 1) // 16 * 16]
        out = run(self.prefill, request("p", whole, 1, hand_over=name, sampler=SamplerParams()))
        assert len(out["p"][0]) == 1
        return self.files

    def resume(self, id: str = "a", name: str = NAME, **fields: Any) -> tuple[list[int], int]:
        return run(self.decode, request(id, PROMPT, handed_over=name, **fields))[id]

    @property
    def files(self) -> list[str]:
        return sorted(os.listdir(self.folder)) if self.folder.exists() else []

    def close(self) -> None:
        for llm in (self.prefill, self.decode):
            llm.check_idle()
            llm.close()


@pytest.fixture(scope="module", params=SPLITS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Pair]:
    found = Pair(tmp_path_factory.mktemp("handover"), **SPLITS[request.param])
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _nothing_is_cached(request: pytest.FixtureRequest) -> None:
    if "pair" in request.fixturenames:
        found = request.getfixturevalue("pair")
        for llm in (found.prefill, found.decode):
            llm._engine.core.reset()


def test_the_decode_engine_continues_the_answer(pair: Pair, truth: list[int]) -> None:
    world = pair.prefill._engine.core.config.parallel.world
    assert pair.hand_over() == [f"{NAME}.{rank}" for rank in range(world)]
    assert pair.resume() == (truth, WHOLE)
    assert pair.files == []


def test_the_tokens_of_the_prompt_are_not_computed_again(pair: Pair, truth: list[int]) -> None:
    pair.hand_over()
    core = pair.decode._engine.core
    planned: list[int] = []
    execute = core.executor.execute

    def watch(plan: Any) -> Any:
        planned.extend(plan.num_tokens)
        return execute(plan)

    core.executor.execute = watch  # type: ignore[method-assign]
    try:
        assert pair.resume()[0] == truth
    finally:
        core.executor.execute = execute  # type: ignore[method-assign]
    assert planned[0] == len(PROMPT) - WHOLE and sum(planned) == len(PROMPT) - WHOLE + TOKENS - 1


def test_the_prompt_is_computed_if_a_file_is_missing(pair: Pair, truth: list[int]) -> None:
    last = pair.hand_over()[-1]
    (pair.folder / last).unlink()
    assert pair.resume() == (truth, 0)
    for name in pair.files:
        (pair.folder / name).unlink()


def test_the_prompt_is_computed_if_no_file_was_written(pair: Pair, truth: list[int]) -> None:
    assert pair.resume(name="f" * 32) == (truth, 0)


def test_a_cached_prompt_is_not_read(pair: Pair, truth: list[int]) -> None:
    run(pair.decode, request("before", PROMPT))
    pair.hand_over()
    assert pair.resume() == (truth, WHOLE)
    assert pair.files == []


def test_only_missing_blocks_are_read(pair: Pair, truth: list[int]) -> None:
    run(pair.decode, request("before", PROMPT[:40]))
    pair.hand_over()
    reads = [plan for plan in imports_of(pair, lambda: pair.resume()) if plan]
    assert [file.places for (file,) in reads] == [[2, 3]]


def imports_of(pair: Pair, act: Any) -> list[Any]:
    core, found = pair.decode._engine.core, list[Any]()
    execute = core.executor.execute
    core.executor.execute = lambda plan: (found.append(plan.imports), execute(plan))[1]
    try:
        act()
    finally:
        core.executor.execute = execute
    return found


def test_blocks_that_were_read_are_cached_for_others(pair: Pair, truth: list[int]) -> None:
    pair.hand_over()
    pair.resume()
    assert run(pair.decode, request("b", PROMPT))["b"] == (truth, WHOLE)


def test_several_answers_read_their_own_files(pair: Pair, truth: list[int]) -> None:
    names = [f"{number:032x}" for number in range(3)]
    for name in names:
        pair.hand_over(name)
    asked = [request(name, PROMPT, handed_over=name) for name in names]
    assert [tokens for tokens, _ in run(pair.decode, *asked).values()] == [truth] * 3
    assert pair.files == []


def test_the_loss_of_the_cache_before_a_read_is_recovered(pair: Pair, truth: list[int]) -> None:
    """If the cache is lost before the step that reads the import, the prompt is computed again,
    whether the file still exists or not."""
    pair.hand_over()
    core = pair.decode._engine.core
    assert core.add_request(request("a", PROMPT, handed_over=NAME), CLIENT) is None
    scheduled = core.scheduler.schedule()
    assert scheduled is not None and scheduled.plan.imports
    core.discard_steps_in_flight()
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().get(CLIENT, []):
            tokens += output.new_token_ids
    assert tokens == truth
    for name in pair.files:
        assert name.endswith(CLAIMED)
        (pair.folder / name).unlink()


def test_a_prefill_engine_without_disk_space_fails_no_request(
    tmp_path: Path, truth: list[int]
) -> None:
    pair = Pair(tmp_path, cache__handover_bytes=1)
    assert pair.hand_over() == []
    assert pair.resume() == (truth, 0)
    pair.close()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"hand_over": "../x", "max_tokens": 1}, "hand_over"),
        ({"handed_over": NAME + "0"}, "handed_over"),
        ({"hand_over": NAME, "max_tokens": 4}, "max_tokens"),
        ({"hand_over": NAME, "max_tokens": 2, "output_token_ids": [1]}, "output_token_ids"),
        ({"handed_over": NAME, "output_token_ids": [1]}, "output_token_ids"),
        ({"hand_over": NAME, "max_tokens": 1, "handed_over": NAME}, "hand_over"),
    ],
)
def test_invalid_handover_fields_are_refused(fields: dict[str, Any], field: str) -> None:
    with engine() as llm:
        answer = llm._engine.core.add_request(request("a", PROMPT, **fields), CLIENT)
        assert answer is not None and answer.finish_reason is FinishReason.ERROR
        assert str(answer.stop_reason).startswith(field)


def test_an_unreadable_file_causes_a_recompute(tmp_path: Path, truth: list[int]) -> None:
    """A file that cannot be read costs a recompute, and then imports are not read for a while: each
    failure costs the engine its cache."""
    for split in SPLITS.values():
        pair = Pair(tmp_path / str(len(split)) / "-".join(split), **split)
        core = pair.decode._engine.core
        now_s = 0.0
        core._reads._clock = lambda: now_s  # noqa: B023
        for wait_s, is_read in ((0.0, True), (59.0, False), (2.0, True), (119.0, False)):
            now_s += wait_s
            before = core._reads._not_before
            pair.hand_over()
            for name in pair.files[-1:]:
                path = pair.folder / name
                path.write_bytes(path.read_bytes()[:-4])
            assert resume_after_failures(pair) == truth
            assert (core._reads._not_before > before) == is_read
            for name in pair.files:
                (pair.folder / name).unlink()
            core.reset()
        pair.close()


def resume_after_failures(pair: Pair) -> list[int]:
    """Returns the tokens of a request while groups break and are formed again, as the server
    does."""
    core = pair.decode._engine.core
    assert core.add_request(request("a", PROMPT, handed_over=NAME), CLIENT) is None
    tokens: list[int] = []
    while core.has_work:
        try:
            outputs = core.step()
        except GroupBroken:
            core.regroup(GroupPlan(generation=0))
            continue
        for output in outputs.get(CLIENT, []):
            assert output.finish_reason is not FinishReason.ERROR, output.stop_reason
            tokens += output.new_token_ids
    return tokens


def test_a_request_that_waits_for_blocks_claims_no_file(tmp_path: Path, truth: list[int]) -> None:
    pair = Pair(tmp_path, cache__memory_bytes=400_000)
    core = pair.decode._engine.core
    num_blocks = core.scheduler.kv.pool.num_blocks
    long = [7] * ((num_blocks - 2) * 16)
    assert core.add_request(request("long", long, 16), CLIENT) is None
    core.step()
    files = pair.hand_over()
    assert core.add_request(request("a", PROMPT, handed_over=NAME), CLIENT) is None
    core.step()
    assert pair.files == files
    assert core.scheduler.waiting_tokens() < 40, "what is read is not computed"
    tokens: list[int] = []
    while core.has_work:
        for output in core.step().get(CLIENT, []):
            tokens += output.new_token_ids if output.request_id == "a" else []
    assert tokens == truth and pair.files == []
    pair.close()
