"""`LLM`: the whole building in one process, on the trained model."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path

import pytest
import torch

from swell.cluster.local import LLM, SamplingParams
from swell.cluster.params import BadRequest

NANO = Path(__file__).resolve().parents[2] / "configs" / "models" / "nano"
GREEDY = SamplingParams(temperature=0, max_tokens=120)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(NANO), **{"cache.memory_bytes": 50_000_000}) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _idle(llm):
    yield
    llm.check_idle()


def test_chat_answers_what_the_model_knows(llm):
    records = [json.loads(line) for line in (NANO / "heldout.jsonl").read_text().splitlines()[:80]]
    answers = llm.chat([record["messages"] for record in records], GREEDY)
    texts = [answer.outputs[0].text for answer in answers]
    right = sum(text == record["answer"] for text, record in zip(texts, records, strict=True))
    assert right >= 0.95 * len(records)
    assert {answer.outputs[0].finish_reason for answer in answers} == {"stop"}


def test_prompts_of_every_form_answer_in_their_order(llm):
    texts = ["upper: abc", "reverse: abc", "add: 1+2"]
    ids = [list(text.encode()) for text in texts]
    by_text = llm.generate(texts, GREEDY)
    by_ids = llm.generate(ids, [GREEDY] * 3)
    assert [a.prompt_token_ids for a in by_text] == ids
    assert [a.outputs[0].token_ids for a in by_text] == [a.outputs[0].token_ids for a in by_ids]
    one = llm.generate("upper: abc", GREEDY)
    assert one[0].outputs[0].text == by_text[0].outputs[0].text


def test_each_prompt_has_its_own_params(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (1, 5, 9)]
    answers = llm.generate(["count from 1 to 30"] * 3, params)
    assert [len(a.outputs[0].token_ids) for a in answers] == [1, 5, 9]
    assert {a.outputs[0].finish_reason for a in answers} == {"length"}
    again = llm.generate("count from 1 to 30", params[2])
    assert again[0].outputs[0].token_ids == answers[2].outputs[0].token_ids


def test_a_stop_string_is_not_shown(llm):
    talk = [{"role": "user", "content": "count from 3 to 12"}]
    wish = SamplingParams(temperature=0, max_tokens=80, stop=["7,", "zzz"])
    part = llm.chat(talk, wish)[0].outputs[0]
    assert (part.text, part.finish_reason, part.stop_reason) == ("3, 4, 5, 6, ", "stop", "7,")


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", GREEDY, "empty"),
        ([10**9], GREEDY, "1000000000"),
        ("x", SamplingParams(temperature=-1), "temperature=-1"),
        ("x" * 10_000, GREEDY, "maximum context length"),
        ("x", SamplingParams(max_tokens=10**6), "maximum context length"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_works(llm, prompt, params, words):
    with pytest.raises(BadRequest, match=words):
        llm.generate(prompt, params)
    assert llm.generate("upper: abc", GREEDY)[0].finished


def test_an_interrupted_call_leaves_nothing(llm, monkeypatch):
    step, calls = llm._core.step, []

    def interrupt():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["count from 1 to 50"] * 3, GREEDY)
    monkeypatch.undo()
    llm.check_idle()
    assert llm.generate("upper: abc", GREEDY)[0].finished


def test_one_after_another_gives_its_memory_back():
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    threads, before = threading.active_count(), tensors()
    for split in ({}, {"parallel.tensor": 2}, {"parallel.pipeline": 2}):
        with LLM(str(NANO), **{"cache.memory_bytes": 50_000_000}, **split) as other:
            other.generate("upper: abc", GREEDY)
            assert tensors() > before
        del other
        assert threading.active_count() == threads
        assert tensors() == before
