"""The offline `LLM`: the whole path in one process, with the trained model."""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

from swell.cluster.client.requests.output_processor import RequestState
from swell.cluster.local import LLM, SamplingParams
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.validate_params import MAX_VOCABULARY_LOGPROBS
from swell.cluster.text.tokens.tokenizer import load_tokenizer
from swell.configs.schema import ConfigError
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorError
from swell.engine.executor.inproc import WorkerThread
from swell.worker.sample.sampler import Sampler

pytestmark = pytest.mark.slow

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


def test_chat_returns_the_answer_of_the_model(llm):
    records = [json.loads(line) for line in (NANO / "heldout.jsonl").read_text().splitlines()[:80]]
    answers = llm.chat([record["messages"] for record in records], GREEDY)
    texts = [answer.outputs[0].text for answer in answers]
    right = sum(text == record["answer"] for text, record in zip(texts, records, strict=True))
    assert right >= 0.95 * len(records)
    assert {answer.outputs[0].finish_reason for answer in answers} == {"stop"}


def test_a_control_token_is_text_in_a_chat_and_a_token_in_a_prompt(llm):
    (chat,) = llm.chat([{"role": "user", "content": "x<|system|>y"}], GREEDY)
    (plain,) = llm.generate("x<|system|>y", GREEDY)
    tokenizer = load_tokenizer(str(NANO))
    token = tokenizer.convert_tokens_to_ids("<|system|>")
    assert token not in chat.prompt_token_ids
    assert "x<|system|>y" in tokenizer.decode(chat.prompt_token_ids)
    assert plain.prompt_token_ids.count(token) == 1


def test_prompts_of_every_form_answer_in_their_order(llm):
    texts = ["upper: abc", "reverse: abc", "add: 1+2"]
    ids = [list(text.encode()) for text in texts]
    by_text = llm.generate(texts, GREEDY)
    by_ids = llm.generate(ids, [GREEDY] * 3)
    assert [a.prompt_token_ids for a in by_text] == ids
    assert [a.outputs[0].token_ids for a in by_text] == [a.outputs[0].token_ids for a in by_ids]
    one = llm.generate("upper: abc", GREEDY)
    assert one[0].outputs[0].text == by_text[0].outputs[0].text


def test_the_tokenizer_encodes_like_the_engine(llm):
    ids = llm.get_tokenizer().encode("upper: abc")
    (by_ids,) = llm.generate([ids], GREEDY)
    (by_text,) = llm.generate(["upper: abc"], GREEDY)
    assert by_ids.prompt_token_ids == by_text.prompt_token_ids


def test_a_call_without_params_uses_the_models_defaults(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(NANO, folder)
    given = json.loads((folder / "generation_config.json").read_text())
    given |= {"temperature": 0.0, "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(given))
    with LLM(str(folder), **{"cache.memory_bytes": 50_000_000}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        talk = [{"role": "user", "content": "upper: abcdef"}]
        (short,) = llm.chat(talk)
        (said,) = llm.chat(talk, SamplingParams(seed=1))
    assert len(short.outputs[0].token_ids) == 3
    assert len(said.outputs[0].token_ids) > 3, "given parameters are not changed"
    (folder / "generation_config.json").write_text('{"top_p": 2}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p=2"):
        LLM(str(folder))


def test_expert_parallelism_is_refused_for_one_engine():
    with pytest.raises(ConfigError, match=r"^parallel\.expert=true .* set parallel\.expert=false"):
        LLM(f"{NANO}-moe", **{"parallel.expert": True})


def test_each_prompt_has_its_own_params(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n) for n in (1, 5, 9)]
    answers = llm.generate(["count from 1 to 30"] * 3, params)
    assert [len(a.outputs[0].token_ids) for a in answers] == [1, 5, 9]
    assert {a.outputs[0].finish_reason for a in answers} == {"length"}
    again = llm.generate("count from 1 to 30", params[2])
    assert again[0].outputs[0].token_ids == answers[2].outputs[0].token_ids


def test_a_stop_string_is_not_shown(llm):
    talk = [{"role": "user", "content": "count from 3 to 12"}]
    payload = SamplingParams(temperature=0, max_tokens=80, stop=["7,", "zzz"])
    part = llm.chat(talk, payload)[0].outputs[0]
    assert (part.text, part.finish_reason, part.stop_reason) == ("3, 4, 5, 6, ", "stop", "7,")


def test_each_of_n_answers_follows_its_seed(llm):
    payload = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    prompts = ["count from 1 to 30", "upper: abcdefgh"]
    answers = llm.generate(prompts, SamplingParams(n=4, seed=7, **payload))
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = llm.generate(
            [prompt] * 4, [SamplingParams(seed=7 + i, **payload) for i in range(4)]
        )
        assert [part.index for part in answer.outputs] == [0, 1, 2, 3]
        assert [part.text for part in answer.outputs] == [a.outputs[0].text for a in alone]
    assert len({part.text for part in answers[0].outputs}) > 1


def test_n_answers_compute_their_prompt_once(llm):
    kv = llm._engine.core.scheduler.kv
    prompt = [(i * 7) % 90 + 33 for i in range(150)]
    queried, found = kv.num_queried_tokens, kv.num_hit_tokens
    (answer,) = llm.generate([prompt], SamplingParams(n=8, max_tokens=1))
    assert kv.num_queried_tokens - queried == 8 * 150
    whole_blocks = (150 - 1) // kv.block_tokens * kv.block_tokens
    assert kv.num_hit_tokens - found == 7 * whole_blocks
    assert answer.num_cached_tokens == 0


def test_best_of_keeps_the_best_answers(llm):
    payload = {"temperature": 1.5, "max_tokens": 20, "seed": 3}
    drawn = llm.generate("upper: abc", SamplingParams(n=6, logprobs=0, **payload))[0].outputs
    means = [part.cumulative_logprob / len(part.token_ids) for part in drawn]
    order = sorted(range(6), key=lambda index: -means[index])[:2]
    kept = llm.generate("upper: abc", SamplingParams(n=2, best_of=6, **payload))[0].outputs
    assert [part.text for part in kept] == [drawn[index].text for index in order]
    assert [(part.index, part.logprobs) for part in kept] == [(0, None), (1, None)]


def test_bad_words_are_never_written(llm):
    payload = {"temperature": 0, "max_tokens": 80}
    free, bound = llm.generate(
        ["count from 3 to 12"] * 2,
        [SamplingParams(**payload), SamplingParams(bad_words=["7", "11"], **payload)],
    )
    assert "7" in free.outputs[0].text
    assert "7" not in bound.outputs[0].text and "11" not in bound.outputs[0].text
    with pytest.raises(BadRequest, match="bad_words"):
        llm.generate("x", SamplingParams(bad_words=[" "]))


def test_if_one_answer_fails_its_siblings_are_aborted(llm, monkeypatch):
    update, failed = RequestState.update, []

    def fail_once(state, output):
        if len(state.output_token_ids) == 3 and not failed:
            failed.append(state.request_id)
            raise ValueError("no such token")
        update(state, output)

    monkeypatch.setattr(RequestState, "update", fail_once)
    long = SamplingParams(n=3, max_tokens=200, ignore_eos=True)
    steps = llm._engine.core.num_steps
    first, second = llm.generate(
        ["count from 1 to 30"] * 2, [long, SamplingParams(n=2, max_tokens=8, ignore_eos=True)]
    )
    assert [part.finish_reason for part in first.outputs] == ["error"]
    assert "no such token" in first.outputs[0].stop_reason
    assert [part.finish_reason for part in second.outputs] == ["length"] * 2
    assert llm._engine.core.num_steps - steps < 50, "tokens without a receiver are not sampled"


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", GREEDY, "empty"),
        ([10**9], GREEDY, "1000000000"),
        ("x", SamplingParams(temperature=-1), "temperature=-1"),
        ("x" * 10_000, GREEDY, "maximum context length"),
        ("x", SamplingParams(max_tokens=10**6), "maximum context length"),
        ("x", SamplingParams(n=3, best_of=2), "best_of=2 is below n=3"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_works(llm, prompt, params, words):
    with pytest.raises(BadRequest, match=words):
        llm.generate(prompt, params)
    assert llm.generate("upper: abc", GREEDY)[0].finished


def test_an_interrupted_call_leaves_nothing(llm, monkeypatch):
    step, calls = llm._engine.core.step, []

    def interrupt():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._engine.core, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["count from 1 to 50"] * 3, GREEDY)
    monkeypatch.undo()
    llm.check_idle()
    assert llm.generate("upper: abc", GREEDY)[0].finished


INTERRUPTIBLE = (
    "local.py",
    "local_engine.py",
    "output_processor.py",
    "core.py",
    "scheduler.py",
    "inline.py",
)
"""The user's interrupt may arrive before any line of these files."""


def interrupt_at(line: int, call):
    """Runs `call` and raises KeyboardInterrupt before its `line`-th executed line. Returns False if
    the call finished earlier."""
    seen = 0

    def watch(frame, event, _argument):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(INTERRUPTIBLE):
            return None
        if event == "line":
            seen += 1
            if seen == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return watch

    sys.settrace(watch)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_at_any_line_leaves_a_clean_state(llm):
    payload = SamplingParams(n=2, max_tokens=4, temperature=0, ignore_eos=True)
    prompts = ["upper: abc", "reverse: abc"]
    before = [answer.outputs[1].token_ids for answer in llm.generate(prompts, payload)]
    line = interrupted = 0
    while interrupt_at(line := line + 1 + line // 12, lambda: llm.generate(prompts, payload)):
        interrupted += 1
        answers = llm.generate(prompts, payload)
        assert [answer.outputs[1].token_ids for answer in answers] == before, f"line {line}"
        llm.check_idle()
    assert interrupted > 50


def test_the_next_call_completes_an_interrupted_cleanup(llm, monkeypatch):
    reset = EngineCore.reset
    for interrupted in ("before", "after"):

        def twice(core, interrupted=interrupted):
            if interrupted == "after":
                reset(core)
            raise KeyboardInterrupt

        monkeypatch.setattr(EngineCore, "reset", twice)
        assert interrupt_at(400, lambda: llm.generate("count from 1 to 50", GREEDY))
        monkeypatch.undo()
        assert llm.generate("upper: abc", GREEDY)[0].finished


def test_a_request_that_the_engine_refuses_aborts_its_siblings(llm, monkeypatch):
    add, added = llm._engine.core.add_request, []

    def refuse_third(request, client):
        added.append(request.request_id)
        if len(added) == 3:
            raise ValueError("planted")
        return add(request, client)

    monkeypatch.setattr(llm._engine.core, "add_request", refuse_third)
    with pytest.raises(ValueError, match="planted"):
        llm.generate(["upper: abc"] * 4, GREEDY)
    monkeypatch.undo()
    llm.check_idle()
    (answer,) = llm.generate("upper: abc", GREEDY)
    assert answer.finished and not llm._engine.processor.request_states


def test_no_prefix_is_found_after_a_reset(llm):
    prompt = [(i * 7) % 90 + 33 for i in range(150)]
    first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert second.num_cached_tokens > 100
    llm.reset_prefix_cache()
    third, fourth = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
    assert third.num_cached_tokens == 0 and fourth.num_cached_tokens > 100
    assert len({one.outputs[0].text for one in (first, second, third, fourth)}) == 1
    llm.check_idle()


def test_a_refused_call_keeps_the_cached_prefixes(llm):
    prompt = [(i * 11) % 90 + 33 for i in range(150)]
    llm.generate([prompt], SamplingParams(max_tokens=1))
    with pytest.raises(BadRequest):
        llm.generate([prompt, prompt], SamplingParams(temperature=-1))
    assert llm.generate([prompt], SamplingParams(max_tokens=1))[0].num_cached_tokens > 100


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_an_interrupt_releases_workers_that_wait_for_each_other(split, monkeypatch):
    """One worker has received the step and the other has not."""
    settings = {"cache.memory_bytes": 50_000_000, f"parallel.{split}": 2}
    with LLM(str(NANO), **settings) as other:
        before = other.generate("upper: abc", GREEDY)[0].outputs[0].text
        call = WorkerThread.call
        calls = []

        def interrupt(thread, method, *args):
            calls.append(method)
            if calls.count("execute_model") == 6:
                calls.append("interrupted")
                raise KeyboardInterrupt
            return call(thread, method, *args)

        monkeypatch.setattr(WorkerThread, "call", interrupt)
        with pytest.raises(KeyboardInterrupt):
            other.generate("count from 1 to 50", GREEDY)
        monkeypatch.undo()
        assert other.generate("upper: abc", GREEDY)[0].outputs[0].text == before


def test_the_call_raises_the_error_of_a_worker(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("planted")

    with LLM(str(NANO), **{"cache.memory_bytes": 50_000_000}) as llm:
        monkeypatch.setattr(Sampler, "__call__", fail)
        with pytest.raises(ZeroDivisionError, match="planted"):
            llm.generate("a", SamplingParams(max_tokens=2, temperature=1.0))
        monkeypatch.undo()
        with pytest.raises(ExecutorError, match="planted"):
            llm.generate("a", GREEDY)


def test_an_llm_frees_its_memory():
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    # Objects of earlier tests may be freed meanwhile.
    threads, before = set(threading.enumerate()), tensors()
    for split in ({}, {"parallel.tensor": 2}, {"parallel.pipeline": 2}):
        with LLM(str(NANO), **{"cache.memory_bytes": 50_000_000}, **split) as other:
            other.generate("upper: abc", GREEDY)
            assert tensors() > before
        del other
        assert set(threading.enumerate()) <= threads
        assert tensors() <= before


def test_logprobs_of_the_whole_vocabulary_include_the_top_logprobs(llm):
    requested = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=k) for k in (-1, 3)]
    whole, few = llm.generate(["add: 1+2"] * 2, requested)
    vocab = llm._prompts.vocab_size
    assert whole.prompt_logprobs[0] is None
    for all_of_it, entries in zip(whole.prompt_logprobs[1:], few.prompt_logprobs[1:], strict=True):
        assert len(all_of_it) == vocab
        assert sum(math.exp(one.logprob) for one in all_of_it.values()) == pytest.approx(
            1, abs=1e-4
        )
        assert entries == {token: all_of_it[token] for token in entries}


def test_more_logprobs_than_the_limit_are_refused(llm):
    vocab = llm._prompts.vocab_size
    too_long = [65] * (MAX_VOCABULARY_LOGPROBS // vocab // 2 + 1)
    payload = SamplingParams(max_tokens=1, prompt_logprobs=-1, n=2)
    with pytest.raises(BadRequest, match="prompt_logprobs=-1") as caught:
        llm.generate([too_long], payload)
    assert caught.value.param == "prompt_logprobs"


def test_top_p_zero_is_greedy(llm):
    greedy, narrow = llm.generate(
        ["upper: abc"] * 2,
        [GREEDY, SamplingParams(temperature=1.5, top_p=0, seed=5, max_tokens=120)],
    )
    assert narrow.outputs[0].token_ids == greedy.outputs[0].token_ids
