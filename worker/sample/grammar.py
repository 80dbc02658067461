"""Answers that are sentences of a grammar.

The mask of a step depends on the token of the step before. The host takes that token in here, when
the step's forward pass is already under way on the device: masks are made while the device
computes, and no step waits for the engine. Every rank that samples follows the grammar by itself;
the same tokens lead all of them to the same masks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits
from torch import Tensor

from swell.configs.log import FactLogger
from swell.kernels.bitmask import apply_bitmask
from swell.kernels.host import to_device
from swell.worker.askers import Askers
from swell.worker.input_batch import InputBatch
from swell.worker.request_states import RequestStates
from swell.worker.sample.allowed import packed_bits
from swell.worker.sample.stage import Stage
from swell.worker.sample.vocabulary import end_token_ids, load_vocabulary
from swell.worker.sample.wire import GRAMMAR_LIMITS
from swell.worker.wire import NewRow

KEPT_GRAMMARS = 32
"""Compiled grammars that wait for the next request that has them: some hundred KB each."""
MAX_THREADS = 8
"""For the masks of one step."""


class GrammarMask(Stage):
    """Lets only those tokens pass that continue a sentence; at its end, only those that end an
    answer.

    A grammar begins to compile when its row takes a slot, in a thread, while the prompt is
    computed. Where following one fails, which a check before should rule out, the answer ends.
    """

    def __init__(self, states: RequestStates, model_path: str) -> None:
        self._model_path = model_path
        self._followers: list[Follower | None] = [None] * states.max_rows
        self._askers = Askers(states.max_rows)
        self._compiled: dict[str, Future[LLMatcher]] = {}
        self._unread: DrawnTokens | None = None
        self._tools: _Tools | None = None

    def take_slot(self, row: NewRow) -> None:
        grammar, slot = row.sampler.grammar, row.slot
        self._askers.set(slot, grammar is not None)
        self._followers[slot] = None
        if grammar is not None:
            outputs = row.token_ids[row.prompt_tokens :]
            self._followers[slot] = Follower(self._compile(grammar.lark), outputs)

    def rows(self, batch: InputBatch) -> np.ndarray:
        return batch.rows_of(self._askers)

    def apply(self, logits: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        self._read()
        followers = self._following(batch, rows_np)
        bitmask = self._masks(followers, -(-logits.shape[1] // 32))
        device = logits.device
        # Minus infinity, unlike what other stages forbid: a token that all of them forbid, and the
        # grammar wants, is drawn all the same.
        rows = to_device(rows_np, device)
        apply_bitmask(logits, to_device(bitmask, device), rows, float("-inf"))

    def drawn(self, tokens: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        self._unread = DrawnTokens(tokens, rows_np, self._following(batch, rows_np))

    def _following(self, batch: InputBatch, rows_np: np.ndarray) -> list[Follower]:
        found = [self._followers[slot] for slot in batch.sample_slots_np[rows_np].tolist()]
        return [follower for follower in found if follower is not None]

    def _read(self) -> None:
        """Let all see what the step before drew; who has left its slot since sees it in vain."""
        if self._unread is not None:
            for follower, token in self._unread.wait():
                follower.take(token)
            self._unread = None

    def _masks(self, followers: list[Follower], words: int) -> np.ndarray:
        """[followers, words] int32."""
        masks = np.zeros((len(followers), words), dtype=np.int32)
        able = [(i, m) for i, f in enumerate(followers) if (m := f.matcher()) is not None]
        if able:
            tools = self._tools
            assert tools is not None, "a grammar has been compiled"
            own = np.zeros(
                (len(able), -(-load_vocabulary(self._model_path).vocab_size // 32)), "i4"
            )
            jobs = [(matcher, i) for i, (_, matcher) in enumerate(able)]
            tools.executor.unsafe_compute_mask_ptr(
                jobs, own.ctypes.data, own.shape[1] * own.itemsize, len(own)
            )
            # The model's vocabulary may be padded beyond the tokenizer's.
            width = min(words, own.shape[1])
            masks[[i for i, _ in able], :width] = own[:, :width]
        for row in np.flatnonzero(~masks.any(axis=1)):
            masks[row] = self._ends(words)
        return masks

    def _ends(self, words: int) -> np.ndarray:
        """[words] int32: the tokens that end an answer, or all where none is known."""
        try:
            ids = [id for id in end_token_ids(self._model_path) if id < words * 32]
        except (OSError, ValueError):
            ids = []
        return packed_bits(ids, words * 32) if ids else np.full(words, -1, np.int32)

    def _compile(self, lark: str) -> Future[LLMatcher]:
        """The matcher at the beginning of the grammar, to be copied."""
        if self._tools is None:
            self._tools = _Tools()
        matcher = self._compiled.pop(lark, None)
        if matcher is None:
            matcher = self._tools.threads.submit(_first_step, self._model_path, lark)
        self._compiled[lark] = matcher
        while len(self._compiled) > KEPT_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        return matcher


class Follower:
    """How far one answer has come in its grammar."""

    def __init__(self, first: Future[LLMatcher], outputs: Sequence[int]) -> None:
        """`outputs` exist already."""
        self._first = first
        self._outputs = outputs
        self._matcher: LLMatcher | None = None
        self._failed = False

    def matcher(self) -> LLMatcher | None:
        """Waits until it is compiled; None: it failed before there was one."""
        if self._matcher is None and not self._failed:
            try:
                self._matcher = self._first.result().deep_copy()
            except Exception as error:
                self._fail(str(error))
                return None
            for token in self._outputs:
                self.take(token)
        if self._matcher is not None and self._matcher.is_error():
            self._fail(self._matcher.get_error())
        return self._matcher

    def take(self, token: int) -> None:
        """A token was drawn; behind the end of the grammar it is one that ends an answer."""
        matcher = self.matcher()
        if matcher is not None:
            matcher.consume_token(token)

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            first_line = (reason.splitlines() or ["unknown"])[0]
            FactLogger("worker").error("a grammar cannot be followed", reason=first_line)


class DrawnTokens:
    """What a step drew for its followers, on its way to the host."""

    def __init__(self, tokens: Tensor, rows_np: np.ndarray, followers: list[Follower]) -> None:
        """tokens [S] int64; followers[i] follows the row rows_np[i]."""
        self._rows, self._followers = rows_np.tolist(), followers
        self._host = tokens.to("cpu", non_blocking=True)
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tokens.device))

    def wait(self) -> list[tuple[Follower, int]]:
        if self._done is not None:
            self._done.synchronize()
        drawn = self._host.tolist()
        return [(f, drawn[row]) for f, row in zip(self._followers, self._rows, strict=True)]


class _Tools:
    """Threads, made for the first grammar."""

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        self.threads = ThreadPoolExecutor(1, "grammar")
        self.executor = LLExecutor(num_threads=min(cores, MAX_THREADS))


def _first_step(model_path: str, lark: str) -> LLMatcher:
    """A matcher that has its first mask ready."""
    limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)
    matcher = LLMatcher(load_vocabulary(model_path), lark, log_level=0, limits=limits)
    matcher.compute_bitmask()
    return matcher
