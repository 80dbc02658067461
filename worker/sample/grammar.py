"""Answers that are sentences of a grammar.

The mask of a step depends on the token of the step before. The host takes that token in here, when
the step's forward pass is already under way on the device: masks are made while the device
computes, and no step waits for the engine. Every rank that samples follows the grammar by itself;
the same tokens lead all of them to the same masks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from swell.configs.log import StructuredLogger
from swell.kernels.bitmask import apply_bitmask
from swell.kernels.host import to_device
from swell.worker.failed_rows import FailedRows, describe
from swell.worker.groups import Group
from swell.worker.input_batch import InputBatch
from swell.worker.request_states import RequestStates
from swell.worker.sample.logits_processor import LogitsProcessor, PendingExtra
from swell.worker.sample.vocabulary import load_vocabulary
from swell.worker.sample.wire import GRAMMAR_LIMITS
from swell.worker.slot_set import SlotSet
from swell.worker.wire import NewRow

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

T = TypeVar("T")

MAX_CACHED_GRAMMARS = 32
"""Compiled grammars that wait for the next request that has them: some hundred KB each."""
MAX_THREADS = 8
"""For the masks of one step."""


class GrammarMask(LogitsProcessor):
    """Lets only those tokens pass that continue a sentence; at its end, only those that end an
    answer.

    A grammar begins to compile when its row takes a slot, in a thread, while the prompt is
    computed. A row whose grammar cannot be followed has failed: it does not compile, needs more
    than its limits, is not continued by the token that was drawn, or by none that the model has.
    Tensor ranks tell each other of it, so that the one that answers knows.

    `llguidance` is loaded for the first grammar: a worker that lacks it serves everything else.
    """

    def __init__(
        self,
        states: RequestStates,
        vocab: int,
        model_path: str,
        failed: FailedRows,
        tensor: Group,
    ) -> None:
        self._vocab, self._model_path = vocab, model_path
        self._failed, self._tensor = failed, tensor
        self._grammar_states: list[GrammarState | None] = [None] * states.max_rows
        self._active_slots = SlotSet(states.max_rows)
        self._compiled: dict[str, Future[LLMatcher]] = {}
        self._pending_tokens: PendingTokens | None = None
        self._failed_ranks = torch.zeros(0, dtype=torch.int64)
        """[M] int64 on the device: how many tensor ranks cannot follow each row's grammar."""
        self._compiler: _GrammarCompiler | None = None

    def add_request(self, row: NewRow) -> None:
        grammar, slot = row.sampler.grammar, row.slot
        self._active_slots.set(slot, grammar is not None)
        self._grammar_states[slot] = None
        if grammar is not None:
            outputs = row.token_ids[row.prompt_tokens :]
            self._grammar_states[slot] = GrammarState(self._compile(grammar.lark), outputs)

    def rows(self, batch: InputBatch) -> np.ndarray:
        return batch.rows_in(self._active_slots)

    def apply(self, logits: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        self._read()
        grammar_states = self._states_of_rows(batch, rows_np)
        bitmask = self._masks(grammar_states)
        device = logits.device
        # Minus infinity, unlike what other stages forbid: a token that all of them forbid, and the
        # grammar wants, is drawn all the same.
        rows = to_device(rows_np, device)
        apply_bitmask(logits, to_device(bitmask, device), rows, float("-inf"))
        for slot, grammar_state in zip(
            batch.sample_slots_np[rows_np].tolist(), grammar_states, strict=True
        ):
            if grammar_state.failure:
                self._failed.add(slot, grammar_state.failure)
        if self._tensor.size > 1:
            stuck = np.array(
                [bool(grammar_state.failure) for grammar_state in grammar_states], dtype=np.int64
            )
            self._failed_ranks = self._tensor.all_reduce(to_device(stuck, device))

    def drawn(self, tokens: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        self._pending_tokens = PendingTokens(tokens, rows_np, self._states_of_rows(batch, rows_np))

    def pending_extras(self, batch: InputBatch, rows_np: np.ndarray) -> list[PendingExtra]:
        if self._tensor.size == 1:
            return []
        return [
            PendingGrammarFailures([self._failed_ranks], batch.sample_rows_np[rows_np].tolist())
        ]

    def _states_of_rows(self, batch: InputBatch, rows_np: np.ndarray) -> list[GrammarState]:
        found = [self._grammar_states[slot] for slot in batch.sample_slots_np[rows_np].tolist()]
        return [grammar_state for grammar_state in found if grammar_state is not None]

    def _read(self) -> None:
        """Let all see what the step before drew; who has left its slot since sees it in vain."""
        if self._pending_tokens is not None:
            for grammar_state, token in self._pending_tokens.wait():
                grammar_state.take(token)
            self._pending_tokens = None

    def _masks(self, grammar_states: list[GrammarState]) -> np.ndarray:
        """[grammar_states, ceil(V / 32)] int32; of those that fail all tokens pass."""
        words = -(-self._vocab // 32)
        masks = np.zeros((len(grammar_states), words), dtype=np.int32)
        able = [(i, m) for i, f in enumerate(grammar_states) if (m := f.matcher()) is not None]
        if able:
            own = self._compute_masks([matcher for _, matcher in able])
            # The model's vocabulary may be padded beyond the tokenizer's, or be cut before its end.
            width = min(words, own.shape[1])
            masks[[i for i, _ in able], :width] = own[:, :width]
            if self._vocab % 32:
                masks[:, -1] &= np.int32((1 << self._vocab % 32) - 1)
        for i, _ in able:
            grammar_states[i].matcher()  # one that has just failed lets the end pass
        for row in np.flatnonzero(~masks.any(axis=1)):
            grammar_states[row].fail_without_token(self._vocab)
        for row, grammar_state in enumerate(grammar_states):
            if grammar_state.failure:
                masks[row] = -1
        return masks

    def _compute_masks(self, matchers: list[LLMatcher]) -> np.ndarray:
        """[matchers, words of the tokenizer's vocabulary] int32"""
        compiler = self._compiler
        assert compiler is not None, "a grammar has been compiled"
        words = -(-load_vocabulary(self._model_path).vocab_size // 32)
        own = np.zeros((len(matchers), words), "i4")
        jobs = [(matcher, i) for i, matcher in enumerate(matchers)]
        compiler.executor().unsafe_compute_mask_ptr(
            jobs, own.ctypes.data, words * own.itemsize, len(own)
        )
        return own

    def _compile(self, lark: str) -> Future[LLMatcher]:
        """The matcher at the beginning of the grammar, to be copied."""
        if self._compiler is None:
            self._compiler = _GrammarCompiler()
        matcher = self._compiled.pop(lark, None)
        if matcher is None:
            matcher = self._compiler.begin(_compile_matcher, self._model_path, lark)
        self._compiled[lark] = matcher
        while len(self._compiled) > MAX_CACHED_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        return matcher


class GrammarState:
    """How far one answer has come in its grammar."""

    failure = ""
    """Why the grammar cannot be followed any further."""

    def __init__(self, first: Future[LLMatcher], outputs: Sequence[int]) -> None:
        """`outputs` exist already."""
        self._first = first
        self._outputs = outputs
        self._matcher: LLMatcher | None = None
        self._taken = 0

    def matcher(self) -> LLMatcher | None:
        """Waits until it is compiled; None: it has failed."""
        if self._matcher is None and not self.failure:
            try:
                self._matcher = self._first.result().deep_copy()
            except Exception as error:
                self._fail(describe(error))
            for token in self._outputs:
                self.take(token)
        if self._matcher is not None and self._matcher.is_error():
            self._fail(self._matcher.get_error())
        return None if self.failure else self._matcher

    def take(self, token: int) -> None:
        """A token was drawn; behind the end of the grammar it is one that ends an answer."""
        matcher = self.matcher()
        if matcher is None:
            return
        if not matcher.consume_token(token):
            self._fail(matcher.get_error() or f"token {token} does not continue it")
        self._taken += 1

    def fail_without_token(self, vocab: int) -> None:
        """None of the model's tokens continues it."""
        if self.matcher() is not None:
            self._fail(
                f"behind {self._taken} tokens none of the model's {vocab} continues or ends it"
            )

    def _fail(self, reason: str) -> None:
        if not self.failure:
            first_line = (reason.splitlines() or ["unknown"])[0]
            self.failure = f"its grammar cannot be followed: {first_line}"
            StructuredLogger("worker").error("a grammar cannot be followed", reason=first_line)


@dataclass(slots=True)
class PendingGrammarFailures(PendingExtra):
    """Rows whose grammars some tensor rank cannot follow, perhaps another one."""

    tensors: list[Tensor]
    rows: list[int]

    def failures(self, host: list[Tensor]) -> Iterator[tuple[int, str]]:
        for row, ranks in zip(self.rows, host[0].tolist(), strict=True):
            if ranks:
                yield row, f"its grammar cannot be followed by {ranks} of the tensor ranks"


class PendingTokens:
    """What a step drew for its grammar_states, on its way to the host."""

    def __init__(
        self, tokens: Tensor, rows_np: np.ndarray, grammar_states: list[GrammarState]
    ) -> None:
        """tokens [S] int64; grammar_states[i] follows the row rows_np[i]."""
        self._rows, self._grammar_states = rows_np.tolist(), grammar_states
        self._host = tokens.to("cpu", non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tokens.device))

    def wait(self) -> list[tuple[GrammarState, int]]:
        if self._done is not None:
            self._done.synchronize()
        drawn = self._host.tolist()
        return [(f, drawn[row]) for f, row in zip(self._grammar_states, self._rows, strict=True)]


class _GrammarCompiler:
    """Threads, made for the first grammar."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(1, "grammar")
        self._executor: LLExecutor | None = None

    def begin(self, call: Callable[..., T], *args: object) -> Future[T]:
        """Call it in a thread; what fails, fails in the future, so that all tensor ranks go on
        alike."""
        try:
            return self.threads.submit(call, *args)
        except RuntimeError as error:  # no thread is to be had
            failed: Future[T] = Future()
            failed.set_exception(error)
            return failed

    def executor(self) -> LLExecutor:
        """Computes the masks of a step."""
        if self._executor is None:
            from llguidance import LLExecutor

            cores = len(os.sched_getaffinity(0))
            self._executor = LLExecutor(num_threads=min(cores, MAX_THREADS))
        return self._executor


def _compile_matcher(model_path: str, lark: str) -> LLMatcher:
    """A matcher that has its first mask ready."""
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ModuleNotFoundError:
        raise ValueError(
            "structured output needs the package llguidance, which this worker lacks; install it "
            "(pip install llguidance)"
        ) from None
    limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
    matcher = LLMatcher(load_vocabulary(model_path), lark, log_level=0, limits=limits)
    matcher.compute_bitmask()
    return matcher
