"""A harness in which engines of this process serve `RequestSpec`s, the received answers, and the
oracle.

The harness replaces what runs in front of an engine in production (request states, output
processor, collectors, children). The test drives it: no socket, no task, no clock. So a test
decides when a request moves to another engine, how slowly its client reads, and which
`RequestOutputKind` it uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace

from swell.cluster.client.requests.handover import Handover
from swell.cluster.client.requests.merged_outputs import MergedOutputs
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import (
    CompletionOutput,
    LogprobTable,
    RequestOutput,
    RequestOutputKind,
)
from swell.cluster.client.requests.request_state import MigrationReason
from swell.cluster.client.requests.routed_experts import RoutedExpertsTable
from swell.cluster.local import LLM
from swell.cluster.text.prompt.generation_request import Conversation, GenerationRequest
from swell.cluster.text.prompt.truncation import TEMPLATE_TEXT
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.cluster.text.tokens.tokenizer import load_tokenizer
from swell.engine.wire import EngineCoreRequest
from swell.kernels.logprobs import LogprobsTensors
from swell.worker.sample import logprobs, sampler
from swell.worker.sampler_wire import SamplerParams
from tests.engine.executor.depth import keeping_depth
from tests.engine.outputs.features import RequestSpec
from tests.support.device import DEVICE, on_device

NANO = str(Path(__file__).parents[2] / "configs" / "models" / "nano")
NANO_MOE = str(Path(NANO).parent / "nano-moe")
TOLERANCE = 0.0 if DEVICE == "cpu" else 1e-4
"""The tolerance for log probabilities. On a CPU the bits of a row do not depend on the batch; on a
GPU float32 rounds differently in batches of other shapes."""
_, DELTA, FINAL = RequestOutputKind
DETOKENIZER = Detokenizer(load_tokenizer(NANO))
CLIENT = b"harness"
MAX_STEPS = 5000
"""Several times the number of steps that the largest batch takes."""

# ---------------------------------------------------------------- what was received


Positions = list[tuple[list[int], list[float], int, int]]
"""For each position: token ids, their log probabilities, rank, offset in the text."""


@dataclass
class Part:
    """One of the completions of a prompt, as plain data."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_output_tokens: int = 0
    logprobs: Positions | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    routed_experts: RoutedExpertsTable | None = None

    def add(self, newer: CompletionOutput, *, is_delta: bool) -> None:
        """Adds the next output and asserts that it does not contradict the earlier ones."""
        logprobs = positions(newer.logprobs)
        assert self.finish_reason is None or (newer.text == self.text and not is_delta)
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
        self.num_output_tokens = newer.num_output_tokens
        self.cumulative_logprob = newer.cumulative_logprob
        self.finish_reason, self.stop_reason = newer.finish_reason, newer.stop_reason
        assert newer.routed_experts is None or newer.finish_reason is not None
        self.routed_experts = newer.routed_experts


@dataclass
class Answer:
    """Everything that a client received for a prompt, joined independently of the code under
    test."""

    tolerance: float = TOLERANCE
    """The tolerance for log probabilities between the engines that compute the answer."""
    parts: dict[int, Part] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: Positions | None = None
    finished: bool = False
    num_outputs: int = 0
    """The number of outputs that the client received."""
    preemptions: int = 0
    """The number of preemptions, summed over all children."""
    is_firm: bool = True
    """Set in the oracle's answers: True if rounding decides no token (see `RoundingProbe`)."""

    def add(self, output: RequestOutput, kind: RequestOutputKind) -> None:
        assert not self.finished, "no output follows the last one"
        self.num_outputs += 1
        self.finished = output.finished
        self.prompt_token_ids = output.prompt_token_ids
        reported = positions(output.prompt_logprobs)
        if self.prompt_logprobs is None:
            self.prompt_logprobs = reported
        elif reported is not None:
            assert_same_positions(reported, self.prompt_logprobs, self.tolerance)
        for part in output.outputs:
            self.parts.setdefault(part.index, Part()).add(part, is_delta=kind == DELTA)


def positions(table: LogprobTable | None) -> Positions | None:
    if table is None:
        return None
    columns = zip(table.token_ids, table.logprobs, table.ranks, table.offsets, strict=True)
    return [(list(ids), list(values), rank, offset) for ids, values, rank, offset in columns]


def assert_same(got: Answer, want: Answer) -> None:
    """Asserts that text, ids, ranks, counts and reasons are equal, and log probabilities are within
    `got.tolerance`."""
    tolerance = got.tolerance
    assert got.finished and want.finished
    assert got.prompt_token_ids == want.prompt_token_ids
    assert sorted(got.parts) == sorted(want.parts)
    assert_same_positions(got.prompt_logprobs, want.prompt_logprobs, tolerance)
    for index, mine in want.parts.items():
        part = got.parts[index]
        for name in ("text", "token_ids", "num_output_tokens", "finish_reason", "stop_reason"):
            assert getattr(part, name) == getattr(mine, name), f"{name} of answer {index}"
        assert_same_positions(part.logprobs, mine.logprobs, tolerance)
        if mine.cumulative_logprob is None:
            assert part.cumulative_logprob is None
        else:
            limit = tolerance * (1 + len(mine.token_ids))
            assert part.cumulative_logprob == pytest.approx(mine.cumulative_logprob, abs=limit)


def assert_same_positions(got: Positions | None, want: Positions | None, tolerance: float) -> None:
    if want is None or got is None:
        assert got is want
        return
    assert [(ids, *others) for ids, _, *others in got] == [
        (ids, *others) for ids, _, *others in want
    ]
    for (_, values, *_), (_, true, *_) in zip(got, want, strict=True):
        assert values == pytest.approx(true, abs=tolerance)


# ---------------------------------------------------------------- engines


def engine(model: str = NANO, **overrides: Any) -> LLM:
    """Returns an engine with eight rows; the keys of `overrides` are those of `--set`, with `__`
    for a dot."""
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    basis = {"cache.memory_bytes": 4_000_000, "scheduler.max_rows": 8}
    settings = on_device(basis | changes)
    with keeping_depth() if settings.get("scheduler.steps_in_flight", 1) != 1 else nullcontext():
        return LLM(model, **settings)


@dataclass
class _Child:
    number: int
    """The number of the submitted request, which is the index of its answer."""
    engine: int
    cuts: list[int]
    num_outputs: int = 0
    """The number of outputs from engines, with or without tokens."""
    preemptions: int = 0
    """The largest number of preemptions that one engine reported."""


class EngineHarness:
    """One client and its engines.

    `patience`: the client reads its collectors once in this many steps and finds merged outputs
    there. `recovered_every`: once in this many steps each engine loses its cache and its steps in
    flight, as when one of its workers dies; 0: never. With `sleep_level` it also sleeps and wakes
    up then. `chunks`: this many chunks of a session precede the last one, which is the request.
    `prefill`: an engine that computes the prompts before the others receive them.
    """

    def __init__(
        self,
        engines: Sequence[LLM],
        *,
        patience: int = 1,
        stream_interval: int = 1,
        recovered_every: int = 0,
        sleep_level: int = 0,
        chunks: int = 0,
        prefill: LLM | None = None,
        tolerance: float = TOLERANCE,
    ) -> None:
        self._engines = engines
        self._tolerance = tolerance
        self._patience = patience
        self._recovered_every, self._sleep_level = recovered_every, sleep_level
        self._chunks, self._prefill = chunks, prefill
        self._chunk_ids: set[str] = set()
        self._processor = OutputProcessor(DETOKENIZER, stream_interval=stream_interval)
        self._children: dict[str, _Child] = {}
        self._submitted: list[tuple[MergedOutputs, RequestOutputKind, Answer]] = []
        self.num_moves = 0

    def ask(
        self,
        request_spec: RequestSpec,
        kind: RequestOutputKind,
        *,
        cuts: Iterable[int] = (),
        at: int = 0,
    ) -> None:
        """Submits a request, child i to engine `at + i`. Each child moves to the next engine when
        the number of its received outputs reaches the next of `cuts`."""
        number, llm = len(self._submitted), self._engines[0]
        talk = llm._prompts.chat_messages([{"role": "user", "content": request_spec.prompt}])
        processed = llm._input_processor.process(
            GenerationRequest(
                prompt=Conversation(messages=talk),
                params=request_spec.params,
                tokenize_options=TEMPLATE_TEXT,
                external_req_id=str(number),
            )
        )
        states = []
        for index, request in enumerate(processed.requests):
            place = (at + index) % len(self._engines)
            states.append(
                self._processor.add_request(request, processed.params, kind=kind, index=index)
            )
            self._children[request.request_id] = _Child(number, place, sorted(cuts))
            for chunk in self._chunks_before(request):
                assert self._engines[place]._engine.core.add_request(chunk, CLIENT) is None
            request = replace(request, keep_blocks=bool(self._chunks))
            request = self._with_prompt_computed(request)
            assert self._engines[place]._engine.core.add_request(request, CLIENT) is None
        merged = MergedOutputs(states, processed.params, kind)
        self._submitted.append((merged, kind, Answer(self._tolerance)))

    def _with_prompt_computed(self, request: EngineCoreRequest) -> EngineCoreRequest:
        handover, llm = Handover(request), self._prefill
        block_tokens = self._engines[0]._engine.core.config.cache.block_tokens
        if llm is None or not handover.may_begin or len(request.prompt_token_ids) <= block_tokens:
            return request
        handover.begin(block_tokens, "")
        handover.assign("")
        core = llm._engine.core
        assert core.add_request(handover.engine_request(request), CLIENT) is None
        while core.has_work:
            core.step()
        handover.end()
        return handover.engine_request(request)

    def _chunks_before(self, request: EngineCoreRequest) -> Iterator[EngineCoreRequest]:
        """Yields prefixes of a prompt as session chunks, each with an answer of one token that is
        not read."""
        prompt, ends = request.prompt_token_ids, self._chunks + 1
        for index in range(1, ends):
            id = f"{request.request_id}, chunk {index}"
            self._chunk_ids.add(id)
            yield EngineCoreRequest(
                id,
                prompt[: max(1, index * len(prompt) // ends)],
                SamplerParams(),
                max_tokens=1,
                cache_salt=request.cache_salt,
                keep_blocks=True,
            )

    def run(self) -> list[Answer]:
        """Steps all engines in turn until all requests finish; returns the answers in submission
        order."""
        steps = 0
        try:
            while self._processor.request_states:
                for place, llm in enumerate(self._engines):
                    if llm._engine.core.has_work:
                        self._receive(llm)
                    self._move_from(place)
                steps += 1
                assert steps < MAX_STEPS, f"{list(self._processor.request_states)} do not end"
                if steps % self._patience == 0:
                    self._read()
                if self._recovered_every and steps % self._recovered_every == 0:
                    for llm in self._engines:
                        llm._engine.core.discard_steps_in_flight()
                        if self._sleep_level:
                            llm._engine.core.memory.set_sleep(self._sleep_level)
                            llm._engine.core.memory.set_sleep(0)
        finally:
            self._clear()
        self._read()
        answers = [answer for _, _, answer in self._submitted]
        for child in self._children.values():
            answers[child.number].preemptions += child.preemptions
        return answers

    def _clear(self) -> None:
        """Empties the engines for the next test, also after a failure."""
        for llm in self._engines:
            llm._engine.core.abort_requests([*self._children, *self._chunk_ids])
            while llm._engine.core.has_work:  # steps in flight without requests
                llm._engine.core.step()
            llm.check_idle()

    def _receive(self, llm: LLM) -> None:
        for outputs in llm._engine.core.step().values():
            outputs = [one for one in outputs if one.request_id not in self._chunk_ids]
            for output in outputs:
                child = self._children[output.request_id]
                child.num_outputs += 1
                child.preemptions = max(child.preemptions, output.num_preemptions)
            ended = self._processor.process_outputs(outputs).reqs_to_abort
            llm._engine.core.abort_requests([state.request_id for state in ended])

    def _move_from(self, place: int) -> None:
        """Moves requests that have reached a cut: their engine aborts them, and another engine
        continues after the tokens that were received."""
        for request_id, state in list(self._processor.request_states.items()):
            child = self._children[request_id]
            if child.engine != place or not child.cuts or child.num_outputs < child.cuts[0]:
                continue
            child.cuts.pop(0)
            self.num_moves += 1
            self._engines[place]._engine.core.abort_requests([request_id])
            child.engine = (place + 1) % len(self._engines)
            state.unassign(MigrationReason.LEFT)
            refused = self._engines[child.engine]._engine.core.add_request(
                state.engine_request(), CLIENT
            )
            assert refused is None, refused

    def _read(self) -> None:
        for merged, kind, answer in self._submitted:
            for _, reported in merged.take():
                answer.add(reported, kind)
            assert merged.failed_output is None, merged.failed_output


class RoundingProbe:
    """Detects whether rounding may decide a sampled token.

    A random number in 0 .. 1 selects a token by its place among the cumulative sums of 320
    probabilities; once in some thousand draws it falls within rounding of one of the sums.
    Likewise, two tokens may be equally likely, or one may lie at the edge of top_p. Engines need
    not agree on such a token. So the requests of these tests are chosen so that every sampled token
    and every reported rank stays the same if the logits change by more than batches of different
    shapes change them (at most 2e-5 was observed, with a different sign for each token).
    """

    SHAKE = 3e-5
    """The standard deviation of the noise on each logit; the largest of 2560 values is 1e-4."""
    TIMES = 8

    def __init__(self) -> None:
        self.is_firm = True
        self._random = torch.Generator().manual_seed(0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        draw, take, rank = sampler.sample_tokens, sampler.greedy_sample, logprobs.rank_tokens

        def drawn(logits: torch.Tensor, *per_row: torch.Tensor, **options: bool) -> Any:
            rows = [column.repeat(self.TIMES) for column in per_row]
            shaken, _ = draw(self._shaken(logits), *rows, **options)
            tokens, max_logits = draw(logits, *per_row, **options)
            return self._compare(shaken, tokens), max_logits

        def taken(logits: torch.Tensor) -> Any:
            tokens, max_logits = take(logits)
            return self._compare(take(self._shaken(logits))[0], tokens), max_logits

        def ranked(logits: torch.Tensor, ids: torch.Tensor, top: int) -> LogprobsTensors:
            shaken = rank(self._shaken(logits), ids.repeat(self.TIMES), top)
            true = rank(logits, ids, top)
            self._compare(shaken.logprob_token_ids, true.logprob_token_ids)
            self._compare(shaken.selected_token_ranks, true.selected_token_ranks)
            return true

        with (
            patch.object(sampler, "sample_tokens", drawn),
            patch.object(sampler, "greedy_sample", taken),
            patch.object(logprobs, "rank_tokens", ranked),
        ):
            yield

    def _compare(self, shaken: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        """Compares `shaken` [TIMES * N, ...] with `true` [N, ...]; returns `true`."""
        self.is_firm &= bool((shaken.unflatten(0, (self.TIMES, -1)) == true).all())
        return true

    def _shaken(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V] -> [TIMES * N, V], with noise added."""
        many = logits.repeat(self.TIMES, 1)
        noise = torch.randn(many.shape, generator=self._random)
        return many + self.SHAKE * noise.to(many.device)


class Plain:
    """The oracle: one engine that computes one step and one request at a time, without a prefix
    cache, and returns one output with the whole answer. Every answer is computed once. `tensor`:
    the number of tensor ranks that split the engine's sums, which are rounded differently for each
    number. `logprobs_mode`: the key of the model."""

    def __init__(
        self, model: str = NANO, tensor: int = 1, logprobs_mode: str = "raw_logprobs"
    ) -> None:
        self._llm = engine(
            model,
            scheduler__steps_in_flight=1,
            cache__prefix_caching=False,
            parallel__tensor=tensor,
            model__logprobs_mode=logprobs_mode,
        )
        self._answers: dict[bytes, Answer] = {}

    def __call__(self, request_spec: RequestSpec) -> Answer:
        answer = self._answers.get(request_spec.key)
        if answer is None:
            harness, rounding_probe = EngineHarness([self._llm]), RoundingProbe()
            harness.ask(request_spec, FINAL)
            with rounding_probe.watching():
                (answer,) = harness.run()
            answer.is_firm = rounding_probe.is_firm
            self._answers[request_spec.key] = answer
        return answer

    def close(self) -> None:
        self._llm.close()
