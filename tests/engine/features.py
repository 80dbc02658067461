"""Wishes for every feature of an answer, and a desk that has engines of this process answer them.

The desk is all that stands above an engine in production (requests, output processor, collectors,
children), driven by hand: no socket, no task, no clock. So a test decides when a request moves to
another engine, how slowly its asker reads, and in which kind it is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from swell.cluster.detokenizer import Detokenizer
from swell.cluster.local import LLM
from swell.cluster.output_processor import OutputProcessor
from swell.cluster.outputs import (
    CompletionOutput,
    LogprobTable,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
)
from swell.cluster.parallel import ParentRequest
from swell.cluster.params import SamplingParams, StructuredOutputs
from swell.cluster.prompt import load_tokenizer

NANO = str(Path(__file__).parents[2] / "configs" / "models" / "nano")
"""A token of nano is a byte; 260 ends a turn."""
TOLERANCE = 1e-4
"""Of a log probability: float32 rounds differently in batches of different shapes."""
CUMULATIVE, DELTA, FINAL = RequestOutputKind
DETOKENIZER = Detokenizer(load_tokenizer(NANO))
CLIENT = b"desk"

COUNT, UPPER = "count from 3 to 12", "upper: abcdefgh"
GREET = "greet in German: Orozecud"  # "Grüß dich, Orozecud! 🍀": characters of several bytes
PERSON = "json name, age, city: Ezasupo is 8 years old and lives in Adin."
PROMPTS = (COUNT, UPPER, GREET, PERSON, "repeat 5 times: frbf", "add: 29+81")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutputs(json=SCHEMA),
    "regex": StructuredOutputs(regex="([A-Z][a-z]{2,4} ){3}!"),
    "choice": StructuredOutputs(choice=["Grüße aus Bern", "Grüße aus Basel", "nichts von allem"]),
    "grammar": StructuredOutputs(grammar='start: pair+\npair: /[0-9]{2}/ ", " | "é" pair'),
}


class Wish(msgspec.Struct, frozen=True):
    """What is asked, in one turn of a chat."""

    prompt: str
    params: SamplingParams

    @property
    def key(self) -> bytes:
        return msgspec.json.encode(self)


def wish(prompt: str, **params: Any) -> Wish:
    return Wish(prompt, SamplingParams(**{"seed": 11, "temperature": 0.0, "max_tokens": 24} | params))


def drawn(prompt: str, **params: Any) -> Wish:
    return wish(prompt, **{"temperature": 4.0} | params)


FEATURES: dict[str, Wish] = {
    "greedy": wish(GREET, max_tokens=40),
    "temperature and seed": drawn(COUNT),
    "top_k": drawn(COUNT, top_k=4),
    "top_p": drawn(COUNT, top_p=0.7),
    "min_p": drawn(COUNT, min_p=0.1),
    "top_k, top_p and min_p": drawn(GREET, temperature=6.0, top_k=12, top_p=0.8, min_p=0.1),
    "presence_penalty": drawn(COUNT, presence_penalty=2.0),
    "frequency_penalty": wish(COUNT, frequency_penalty=1.5),
    "repetition_penalty": drawn(COUNT, repetition_penalty=1.5),
    "all penalties": drawn(
        GREET, presence_penalty=1.0, frequency_penalty=-0.5, repetition_penalty=1.3
    ),
    "logit_bias": wish(COUNT, logit_bias={ord("4"): -100.0, ord("8"): 7.5}),
    "bad_words": wish(COUNT, bad_words=[", 5", "3, 4, 6, "]),
    "allowed_token_ids": drawn(GREET, allowed_token_ids=[*b"rGu\xc3\xbc\x9f, ", 260]),
    "min_tokens": wish(UPPER, min_tokens=18),
    "min_tokens over stops": wish(COUNT, min_tokens=9, stop=["5"], stop_token_ids=[ord(" ")]),
    "max_tokens": wish(COUNT, max_tokens=1),
    "stop": wish(COUNT, stop=["5, 6", ", 6, 8"]),
    "a stop within characters": wish(GREET, stop=["üß di"]),
    "a stop that almost comes": wish(UPPER, stop=["GHI", "FGHX"], logprobs=0),
    "a stop that is shown": wish(COUNT, stop=["5, 6"], include_stop_str_in_output=True),
    "stop_token_ids": wish(COUNT, stop_token_ids=[ord("6"), ord("7")]),
    "a stop token that is shown": wish(
        COUNT, stop_token_ids=[ord("6")], include_stop_str_in_output=True
    ),
    "ignore_eos": wish(UPPER, ignore_eos=True),
    "special tokens": wish(UPPER, ignore_eos=True, skip_special_tokens=False),
    "logprobs": wish(GREET, logprobs=3),
    "logprobs of drawn tokens": drawn(COUNT, logprobs=0, stop=["2"], frequency_penalty=0.5),
    "prompt_logprobs": wish(UPPER, prompt_logprobs=2),
    "prompt_logprobs and logprobs": drawn(COUNT, prompt_logprobs=0, logprobs=2),
    "n": drawn(COUNT, n=3, max_tokens=16),
    "n with logprobs": drawn(GREET, n=2, logprobs=1, prompt_logprobs=1, max_tokens=12),
    "best_of": drawn(COUNT, n=2, best_of=4, max_tokens=12),
    **{f"structured {kind}": drawn(GREET, structured_outputs=form) for kind, form in FORMS.items()},
    "structured, greedy": wish(GREET, structured_outputs=FORMS["json"], logprobs=1),
}
"""On their own and where they meet; each asks for nothing that its answer would not lack."""

_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 1.0, 2.5, 5.0]),
    "top_k": st.sampled_from([1, 5, 40]),
    "top_p": st.sampled_from([0.3, 0.8, 0.95]),
    "min_p": st.sampled_from([0.02, 0.2]),
    "seed": st.integers(-5, 2**40),
    "max_tokens": st.integers(4, 16),
    "min_tokens": st.integers(0, 4),
    "stop": st.lists(st.sampled_from(["4", ", 5", "CDE", "ü", "e", ": "]), max_size=3),
    "stop_token_ids": st.lists(st.sampled_from([ord("5"), ord("F"), 0xC3, 300]), max_size=2),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "n": st.just(2),
    "best_of": st.just(3),
    "presence_penalty": st.sampled_from([-1.0, 0.6, 2.0]),
    "frequency_penalty": st.sampled_from([-0.5, 1.0]),
    "repetition_penalty": st.sampled_from([0.8, 1.2, 2.0]),
    "logit_bias": st.dictionaries(
        st.sampled_from([ord("4"), ord("e"), 260]), st.sampled_from([-100.0, -2.0, 3.0, 9.0])
    ),
    "bad_words": st.lists(st.sampled_from(["4, 5", "BC", "Gr", "5", "{"]), max_size=3),
    "allowed_token_ids": st.sampled_from([[*b"0123456789, ", 260], [*b"ABCDEFGH", 259, 260]]),
    "logprobs": st.integers(0, 4),
    "prompt_logprobs": st.integers(0, 2),
    "structured_outputs": st.sampled_from(list(FORMS.values())),
}


def wishes() -> st.SearchStrategy[Wish]:
    """Any features together, each with its own odds."""

    @st.composite
    def wish_of(draw: st.DrawFn) -> Wish:
        some = draw(st.sets(st.sampled_from(sorted(_FIELDS)), min_size=1, max_size=7))
        return wish(draw(st.sampled_from(PROMPTS)), **{name: draw(_FIELDS[name]) for name in some})

    return wish_of()


# ---------------------------------------------------------------- what was told


Positions = list[tuple[list[int], list[float], int, int]]
"""Of each position: token ids, their log probabilities, rank, offset in the text."""


@dataclass
class Part:
    """One of the answers to a prompt, in plain data."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_output_tokens: int = 0
    logprobs: Positions | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, newer: CompletionOutput, *, is_delta: bool) -> None:
        """Take what is told next; what was told before stays true."""
        logprobs = positions(newer.logprobs)
        if is_delta:
            self.text += newer.text
            self.token_ids = self.token_ids + newer.token_ids
            if logprobs is not None:
                self.logprobs = (self.logprobs or []) + logprobs
        else:
            assert newer.text.startswith(self.text)
            assert newer.token_ids[: len(self.token_ids)] == self.token_ids
            assert not self.logprobs or (logprobs or [])[: len(self.logprobs)] == self.logprobs
            self.text, self.token_ids = newer.text, list(newer.token_ids)
            self.logprobs = logprobs
        assert self.finish_reason is None, "nothing comes behind the end"
        self.num_output_tokens = newer.num_output_tokens
        self.cumulative_logprob = newer.cumulative_logprob
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason


@dataclass
class Answer:
    """All that an asker was told, folded by a second hand: not by the code under test."""

    parts: dict[int, Part] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: Positions | None = None
    finished: bool = False
    num_outputs: int = 0
    """How many times the asker was told something."""
    preemptions: int = 0
    """Of all its children."""

    def add(self, output: RequestOutput, kind: RequestOutputKind) -> None:
        assert not self.finished, "nothing comes behind the last output"
        self.num_outputs += 1
        self.finished = output.finished
        self.prompt_token_ids = output.prompt_token_ids
        told = positions(output.prompt_logprobs)
        if self.prompt_logprobs is None:
            self.prompt_logprobs = told
        elif told is not None:
            assert_same_positions(told, self.prompt_logprobs)
        for part in output.outputs:
            self.parts.setdefault(part.index, Part()).add(part, is_delta=kind == DELTA)


def positions(table: LogprobTable | None) -> Positions | None:
    if table is None:
        return None
    columns = zip(table.token_ids, table.logprobs, table.ranks, table.offsets, strict=True)
    return [(list(ids), list(values), rank, offset) for ids, values, rank, offset in columns]


def assert_same(got: Answer, want: Answer) -> None:
    """Text, ids, ranks, counts and reasons are equal; log probabilities up to rounding."""
    assert got.finished and want.finished
    assert got.prompt_token_ids == want.prompt_token_ids
    assert sorted(got.parts) == sorted(want.parts)
    assert_same_positions(got.prompt_logprobs, want.prompt_logprobs)
    for index, mine in want.parts.items():
        part = got.parts[index]
        for name in ("text", "token_ids", "num_output_tokens", "finish_reason", "stop_reason"):
            assert getattr(part, name) == getattr(mine, name), f"{name} of answer {index}"
        assert_same_positions(part.logprobs, mine.logprobs)
        if mine.cumulative_logprob is None:
            assert part.cumulative_logprob is None
        else:
            limit = TOLERANCE * (1 + len(mine.token_ids))
            assert part.cumulative_logprob == pytest.approx(mine.cumulative_logprob, abs=limit)


def assert_same_positions(got: Positions | None, want: Positions | None) -> None:
    if want is None or got is None:
        assert got is want
        return
    assert [(ids, *others) for ids, _, *others in got] == [
        (ids, *others) for ids, _, *others in want
    ]
    for (_, values, *_), (_, true, *_) in zip(got, want, strict=True):
        assert values == pytest.approx(true, abs=TOLERANCE)


# ---------------------------------------------------------------- who answers


def engine(**overrides: Any) -> LLM:
    """Eight rows; the keys of `overrides` are those of `--set`, with `__` for a dot."""
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    basis = {"model.device": "cpu", "cache.memory_bytes": 4_000_000, "scheduler.max_rows": 8}
    return LLM(NANO, **basis | changes)


@dataclass
class _Child:
    number: int
    """Of the answer that it belongs to."""
    engine: int
    collector: RequestOutputCollector
    cuts: list[int]
    heard: int = 0
    """Outputs that engines gave, with tokens or without."""
    preemptions: int = 0
    """Most that one engine told of."""


class Desk:
    """One asker and its engines. `patience`: the asker reads its collectors every so many steps,
    and finds what has merged there."""

    def __init__(
        self, engines: Sequence[LLM], *, patience: int = 1, stream_interval: int = 1
    ) -> None:
        self._engines = engines
        self._patience = patience
        self._processor = OutputProcessor(DETOKENIZER, stream_interval=stream_interval)
        self._children: dict[str, _Child] = {}
        self._asked: list[tuple[ParentRequest, RequestOutputKind, Answer]] = []
        self.num_moves = 0

    def ask(
        self, wish: Wish, kind: RequestOutputKind, *, cuts: Iterable[int] = (), at: int = 0
    ) -> None:
        """Begin: child i on engine `at + i`. Each moves to the next engine when so many of its
        outputs have been heard as `cuts` says."""
        number, llm = len(self._asked), self._engines[0]
        talk = llm._prompts.chat_messages([{"role": "user", "content": wish.prompt}])
        prompt = llm._prompts.chat_prompt(talk)
        self._asked.append((ParentRequest(wish.params, kind), kind, Answer()))
        for request, child, index in llm._requests(str(number), prompt, wish.params):
            place = (at + index) % len(self._engines)
            collector = RequestOutputCollector(kind, request.request_id)
            self._processor.add_request(request, child, kind=kind, queue=collector, index=index)
            self._children[request.request_id] = _Child(number, place, collector, sorted(cuts))
            assert self._engines[place]._core.add_request(request, CLIENT) is None

    def run(self) -> list[Answer]:
        """Step all engines in turn until everything is answered, in the order of asking."""
        steps = 0
        while self._processor.has_unfinished_requests():
            for place, llm in enumerate(self._engines):
                if llm._core.has_work:
                    self._hear(llm)
                self._move_from(place)
            steps += 1
            if steps % self._patience == 0:
                self._read()
        self._read()
        for llm in self._engines:
            while llm._core.has_work:  # steps in flight that nobody waits for
                llm._core.step()
            llm.check_idle()
        return [answer for _, _, answer in self._asked]

    def _hear(self, llm: LLM) -> None:
        for outputs in llm._core.step().values():
            for output in outputs:
                child = self._children[output.request_id]
                child.heard += 1
                child.preemptions = max(child.preemptions, output.num_preemptions)
            llm._core.abort_requests(self._processor.process_outputs(outputs).reqs_to_abort)

    def _move_from(self, place: int) -> None:
        """The engine is lost to those whose time has come; another gets what they have heard."""
        for request_id, state in list(self._processor.request_states.items()):
            child = self._children[request_id]
            if child.engine != place or not child.cuts or child.heard < child.cuts[0]:
                continue
            child.cuts.pop(0)
            self.num_moves += 1
            self._engines[place]._core.abort_requests([request_id])
            child.engine = (place + 1) % len(self._engines)
            refused = self._engines[child.engine]._core.add_request(state.resubmission(), CLIENT)
            assert refused is None, refused

    def _read(self) -> None:
        for child in self._children.values():
            output = child.collector.get_nowait()
            if output is None:
                continue
            parent, kind, answer = self._asked[child.number]
            answer.preemptions += child.preemptions if output.finished else 0
            told = parent.add(output)
            if told is not None:
                answer.add(told, kind)


class Plain:
    """The oracle: one engine that computes one step at a time, nobody beside, nothing cached, and
    the answer told once. Every answer is computed once."""

    def __init__(self) -> None:
        self._llm = engine(scheduler__steps_in_flight=1, cache__prefix_caching=False)
        self._answers: dict[bytes, Answer] = {}

    def __call__(self, wish: Wish) -> Answer:
        answer = self._answers.get(wish.key)
        if answer is None:
            desk = Desk([self._llm])
            desk.ask(wish, FINAL)
            (answer,) = desk.run()
            self._answers[wish.key] = answer
        return answer

    def close(self) -> None:
        self._llm.close()
