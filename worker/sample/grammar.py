"""Token masks for answers that must match a grammar.

The mask of a step depends on the token of the step before. The host reads that token here, while
the step's forward pass is already running on the device: masks are computed while the device
computes, and no step waits for the engine. Every rank that samples keeps its own state of the
grammar; the same tokens give all ranks the same masks.

The mask after a draft comes from a copy of the state that has consumed the drafts before. If the
grammar refuses a draft, or the copy fails, the row's later drafts are refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.process import available_cores
from swell.kernels.bitmask import apply_bitmask
from swell.kernels.host.device_copy import to_device
from swell.worker.comm.groups import Group
from swell.worker.draft_verification import StepDrafts
from swell.worker.sample.logits_processor import LogitsProcessor, PendingExtra
from swell.worker.sample.vocabulary import load_vocabulary
from swell.worker.sampler_wire import GRAMMAR_LIMITS
from swell.worker.step.failed_rows import FailedRows, describe
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.step.slot_set import SlotSet
from swell.worker.step.staging import AsyncCopy
from swell.worker.wire import NewRequest

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

T = TypeVar("T")

MAX_CACHED_GRAMMARS = 32
"""The most compiled grammars that are kept for later requests: some hundred KB each."""
_REFUSED_TOKEN = "satisfy the grammar"
"""A part of the library's error about a token that it did not allow. Such an error is a bug, not
the client's fault."""
MAX_THREADS = 8
"""The most threads that compute the masks of one step."""


class GrammarMask(LogitsProcessor):
    """Allows only tokens that continue a match of the grammar; at the end of the match, only those
    that end an answer.

    A grammar is compiled in a thread from the moment its row takes a slot, while the prompt is
    computed. A row fails if its grammar does not compile or exceeds its limits, if a sampled token
    does not continue the match, or if no token of the model does. Tensor ranks exchange failures,
    so that the output rank reports the failures of all ranks.

    `llguidance` is imported for the first grammar: a worker without it serves everything else.
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
        """[M] int64 on the device: how many tensor ranks have failed for each row with a
        grammar."""
        self._compiler: _GrammarCompiler | None = None

    def add_request(self, row: NewRequest) -> None:
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
        if batch.drafts is None:
            bitmask = self._masks(grammar_states)
        else:
            bitmask = self._masks_over_drafts(grammar_states, batch.drafts, rows_np)
        device = logits.device
        # -inf, unlike the finite bans of other processors: if they ban every token that the grammar
        # allows, one of these tokens is sampled all the same.
        rows = to_device(rows_np, device)
        apply_bitmask(logits, to_device(bitmask, device), rows, float("-inf"))
        for slot, state in zip(
            batch.sample_slots_np[rows_np].tolist(), grammar_states, strict=True
        ):
            if state.failure:
                self._failed.add(slot, state.failure, is_invalid=state.is_invalid)
        if self._tensor.size > 1:
            failed = np.array([bool(state.failure) for state in grammar_states], dtype=np.int64)
            self._failed_ranks = self._tensor.all_reduce(to_device(failed, device))

    def on_sampled(self, tokens: Tensor, batch: InputBatch, rows_np: np.ndarray) -> None:
        states = self._states_of_rows(batch, rows_np)
        self._pending_tokens = PendingTokens(tokens, rows_np, states, batch.drafts)

    def pending_extras(self, batch: InputBatch, rows_np: np.ndarray) -> list[PendingExtra]:
        if self._tensor.size == 1:
            return []
        return [PendingGrammarFailures(self._failed_ranks, batch.sample_rows_np[rows_np].tolist())]

    def _states_of_rows(self, batch: InputBatch, rows_np: np.ndarray) -> list[GrammarState]:
        found = [self._grammar_states[slot] for slot in batch.sample_slots_np[rows_np].tolist()]
        return [state for state in found if state is not None]

    def _read(self) -> None:
        """Passes the tokens of the step before to their states. A state that has lost its slot
        meanwhile is not used again."""
        if self._pending_tokens is not None:
            for state, token in self._pending_tokens.wait():
                state.accept_token(token)
            self._pending_tokens = None

    def _masks(self, grammar_states: list[GrammarState]) -> np.ndarray:
        """Returns [grammar_states, ceil(V / 32)] int32; the mask of a state that fails allows all
        tokens."""
        words = -(-self._vocab // 32)
        masks = np.zeros((len(grammar_states), words), dtype=np.int32)
        able = [(i, m) for i, f in enumerate(grammar_states) if (m := f.matcher()) is not None]
        if able:
            own = self._compute_masks([matcher for _, matcher in able])
            # The model's vocabulary may be larger than the tokenizer's (padded), or smaller.
            width = min(words, own.shape[1])
            masks[[i for i, _ in able], :width] = own[:, :width]
            if self._vocab % 32:
                masks[:, -1] &= np.int32((1 << self._vocab % 32) - 1)
        for i, _ in able:
            grammar_states[i].matcher()  # records a failure; its mask allowed the end tokens
        for row in np.flatnonzero(~masks.any(axis=1)).tolist():
            grammar_states[row].fail_without_token(self._vocab)
        for row, state in enumerate(grammar_states):
            if state.failure:
                masks[row] = -1
        return masks

    def _masks_over_drafts(
        self, grammar_states: list[GrammarState], drafts: StepDrafts, samples_np: np.ndarray
    ) -> np.ndarray:
        """Returns the same as `_masks`; grammar_states[i] belongs to the sample samples_np[i]."""
        offsets_np = drafts.offsets_np[samples_np]
        firsts = np.flatnonzero(offsets_np == 0)
        masks = np.full((len(samples_np), -(-self._vocab // 32)), -1, dtype=np.int32)
        masks[firsts] = self._masks([grammar_states[i] for i in firsts.tolist()])
        ahead: dict[int, StateAhead] = {}
        """Index of a row's last sample -> its state, for the rows whose drafts continue."""
        for offset in range(1, int(offsets_np.max(initial=0)) + 1):
            before, ahead = ahead, {}
            for i in np.flatnonzero(offsets_np == offset).tolist():
                state = before.get(i - 1) if offset > 1 else grammar_states[i].ahead()
                sample = int(samples_np[i])
                if state is not None and state.takes(drafts.token(sample)):
                    ahead[i] = state
                else:
                    drafts.refuse(sample)
            masks[list(ahead)] = self._masks(list(ahead.values()))
            for i in [i for i, state in ahead.items() if state.failure]:
                drafts.refuse(int(samples_np[i]))
                del ahead[i]
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
        """Returns a matcher at the beginning of the grammar; each row copies it."""
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
    """The state of one answer in its grammar."""

    failure = ""
    """Why the row fails; empty: it has not failed."""
    is_invalid = False
    """Whether the grammar itself causes the failure, so the same grammar fails on any engine."""

    def __init__(self, first: Future[LLMatcher], outputs: Sequence[int]) -> None:
        """`outputs`: tokens of the answer that exist already."""
        self._first = first
        self._outputs = outputs
        self._matcher: LLMatcher | None = None
        self._taken = 0

    def matcher(self) -> LLMatcher | None:
        """Returns the matcher after waiting until the grammar is compiled; None: the row has
        failed."""
        if self._matcher is None and not self.failure:
            try:
                self._matcher = self._first.result().deep_copy()
            except Exception as error:
                self._fail(describe(error))
            for token in self._outputs:
                self.accept_token(token)
        if self._matcher is not None and self._matcher.is_error():
            self._fail(self._matcher.get_error(), is_invalid=True)
        return None if self.failure else self._matcher

    def accept_token(self, token: int) -> None:
        """Consumes a sampled token; after the end of the grammar this is a token that ends an
        answer."""
        matcher = self.matcher()
        if matcher is None:
            return
        if not matcher.consume_token(token):
            reason = matcher.get_error() or f"token {token} does not {_REFUSED_TOKEN}"
            self._fail(reason, is_invalid=_REFUSED_TOKEN not in reason)
        self._taken += 1

    def ahead(self) -> StateAhead | None:
        """Returns a copy that can consume drafts; None: the row has failed."""
        matcher = self.matcher()
        return None if matcher is None else StateAhead(matcher.deep_copy())

    def fail_without_token(self, vocab: int) -> None:
        """Fails the row because no token of the model continues its grammar."""
        if self.matcher() is not None:
            self._fail(
                f"after {self._taken} tokens, none of the model's {vocab} tokens continues or "
                "ends the grammar",
                is_invalid=True,
            )

    def _fail(self, reason: str, *, is_invalid: bool = False) -> None:
        if not self.failure:
            line = (reason.splitlines() or ["unknown"])[0]
            self.is_invalid = is_invalid
            self.failure = f"the output cannot follow its grammar: {line}"
            self._report(line)

    def _report(self, reason: str) -> None:
        StructuredLogger("worker").error("output cannot follow its grammar", reason=reason)


class StateAhead(GrammarState):
    """The state that an answer has if its drafts so far are accepted. If this copy fails, the row
    does not fail yet: it fails when the tokens are sampled."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher, self._taken = matcher, 0

    def takes(self, draft: int) -> bool:
        """Consumes a draft. Returns False if it does not continue the grammar."""
        self.accept_token(draft)
        return not self.failure

    def _report(self, reason: str) -> None:
        return


@dataclass(slots=True)
class PendingGrammarFailures(PendingExtra):
    """Rows that have failed on some tensor rank, perhaps not on this one."""

    # [rows] int64, the number of ranks on which each row has failed
    failed_ranks: Tensor
    rows: list[int]

    def to_cpu_nonblocking(self) -> PendingGrammarFailures:
        return replace(self, failed_ranks=self.failed_ranks.to("cpu", non_blocking=True))

    def failures(self) -> Iterator[tuple[int, str]]:
        for row, ranks in zip(self.rows, self.failed_ranks.tolist(), strict=True):
            if ranks:
                yield row, f"the output cannot follow its grammar on {ranks} of the tensor ranks"


class PendingTokens:
    """The tokens sampled for rows with grammars, while they are copied to the host."""

    def __init__(
        self,
        tokens: Tensor,
        rows_np: np.ndarray,
        grammar_states: list[GrammarState],
        drafts: StepDrafts | None,
    ) -> None:
        """tokens [S] int64; grammar_states[i] belongs to the sample rows_np[i]."""
        self._rows, self._grammar_states = rows_np.tolist(), grammar_states
        self._drafts = drafts
        stream = torch.cuda.current_stream(tokens.device) if tokens.is_cuda else None
        self._copy = AsyncCopy(partial(tokens.to, "cpu", non_blocking=True), stream)

    def wait(self) -> list[tuple[GrammarState, int]]:
        """Returns each state with the token that was sampled for it. A state occurs several times
        if drafts were accepted."""
        sampled = self._copy.wait().tolist()
        pairs = zip(self._grammar_states, self._rows, strict=True)
        if self._drafts is None:
            return [(state, sampled[row]) for state, row in pairs]
        kept = self._drafts.kept(self._drafts.accepted(sampled))
        return [(state, sampled[row]) for state, row in pairs if kept[row]]


class _GrammarCompiler:
    """The threads that compile grammars and compute masks; created for the first grammar."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(1, "grammar")
        self._executor: LLExecutor | None = None

    def begin(self, call: Callable[..., T], *args: object) -> Future[T]:
        """Calls it in a thread. All errors are set on the future, so that all tensor ranks execute
        the same step."""
        try:
            return self.threads.submit(call, *args)
        except RuntimeError as error:  # no thread can be started
            failed: Future[T] = Future()
            failed.set_exception(error)
            return failed

    def executor(self) -> LLExecutor:
        """Returns the executor that computes the masks of a step."""
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=min(available_cores(), MAX_THREADS))
        return self._executor


def _compile_matcher(model_path: str, lark: str) -> LLMatcher:
    """Returns a matcher with its first mask computed."""
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ModuleNotFoundError:
        raise ValueError(
            "structured output needs the package llguidance, which is not installed on this "
            "worker; install it (pip install llguidance)"
        ) from None
    # mypy takes the ints of the dictionary for the flag, too.
    limits = LLParserLimits(**GRAMMAR_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
    matcher = LLMatcher(load_vocabulary(model_path), lark, log_level=0, limits=limits)
    matcher.compute_bitmask()
    return matcher
