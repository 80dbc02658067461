"""From logits to tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import msgspec
from torch import Tensor

from swell.kernels.sample import greedy_tokens, sample_tokens, uniform_noise
from swell.worker.input_batch import InputBatch
from swell.worker.request_states import MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P, RequestStates
from swell.worker.sample.allowed import AllowedTokens
from swell.worker.sample.edits import Edits
from swell.worker.sample.grammar import GrammarMask
from swell.worker.sample.logprobs import DrawnLogprobs
from swell.worker.sample.penalties import Penalties
from swell.worker.sample.stage import Note, Stage
from swell.worker.sample.wire import Extra
from swell.worker.wire import ModelRunnerOutput, NewRow


@dataclass(slots=True)
class Drawn:
    """What a step drew."""

    # [S] int64
    tokens: Tensor
    notes: list[Note] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """All that the host is to see."""
        return [self.tokens, *(tensor for note in self.notes for tensor in note.tensors)]

    def fill(self, output: ModelRunnerOutput, host: list[Tensor]) -> ModelRunnerOutput:
        """The output with what was drawn; `host` are the tensors there."""
        extras: dict[int, list[Extra]] = {}
        parts = iter(host)
        token_ids = next(parts).tolist()
        for note in self.notes:
            for row, extra in note.extras(list(islice(parts, len(note.tensors)))):
                extras.setdefault(row, []).append(extra)
        return msgspec.structs.replace(output, sampled_token_ids=token_ids, extras=extras)


class Sampler:
    """Draws one token for each row that samples.

    The noise of a token is a function of the request's seed and of the position that the token
    takes, so preemption, failover and the batch change nothing.
    """

    def __init__(self, states: RequestStates, model_path: str = "") -> None:
        """`model_path`: folder or hub id, whose tokenizer the first grammar reads."""
        self._states = states
        self._logprobs = DrawnLogprobs(states)
        # Penalties scale the model's own logits, so they come before anything is added. What the
        # request names by token comes next. Masks come last: nothing lifts a token back above them,
        # and where they contradict each other the grammar has the last word.
        self._stages: list[Stage] = [
            Penalties(states),
            Edits(states),
            AllowedTokens(states),
            GrammarMask(states, model_path),
        ]

    def take_slot(self, row: NewRow) -> None:
        """A request takes its slot."""
        self._logprobs.take_slot(row)
        for stage in self._stages:
            stage.take_slot(row)

    def takes_most_likely(self, batch: InputBatch) -> bool:
        """Whether it would draw each row's most likely token, and nothing else is asked: who knows
        these tokens needs no logits."""
        return not (
            len(batch.rows_of(self._states.drawing))
            or self._logprobs.are_asked(batch)
            or any(len(stage.rows(batch)) for stage in self._stages)
        )

    def __call__(self, logits: Tensor, batch: InputBatch) -> Drawn:
        """logits [S, V] float32, which may be changed in place."""
        asked = [(stage, rows) for stage in self._stages if len(rows := stage.rows(batch))]
        kept = self._logprobs.keep(logits, batch, will_change=bool(asked))
        for stage, rows in asked:
            stage.apply(logits, batch, rows)
        tokens = self._draw(logits, batch)
        for stage, rows in asked:
            stage.drawn(tokens, batch, rows)
        return Drawn(tokens, [some.note(tokens) for some in kept])

    def _draw(self, logits: Tensor, batch: InputBatch) -> Tensor:
        """Tokens [S] int64 by temperature, min_p, top_k and top_p."""
        states = self._states
        if not len(batch.rows_of(states.drawing)):
            return greedy_tokens(logits)
        slots = batch.sample_slots
        reals, integers = states.reals[slots], states.integers[slots]
        return sample_tokens(
            logits,
            reals[:, TEMPERATURE],
            integers[:, TOP_K],
            reals[:, TOP_P],
            reals[:, MIN_P],
            uniform_noise(integers[:, SEED], batch.sample_positions),
            any_min_p=len(batch.rows_of(states.with_min_p)) > 0,
            any_top=len(batch.rows_of(states.with_top)) > 0,
        )
