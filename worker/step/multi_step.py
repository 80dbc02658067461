"""Executes a plan that computes its rows several times, one token further each time.

Each pass is a normal step, so everything that a step supports also works in a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace
from torch import Tensor

from swell.worker.sampler_wire import Extra
from swell.worker.wire import AsyncModelRunnerOutput, ModelRunnerOutput, NewRequest, SchedulerOutput

Read = Callable[[int, int], int]
"""(slot, position) -> the token at that position."""


class RowEnds:
    """Finds the rows that end within a plan. This works only on a CPU, where the worker can read
    the tokens of a pass without waiting, and only in an engine with one worker: the rows of a pass
    must not depend on something that only one of several workers knows (see `FailedRows`)."""

    def __init__(self, read: Read | None) -> None:
        """`read`: None if ends are not detected."""
        self._read = read
        self._ends: dict[int, tuple[int, frozenset[int]]] = {}
        """Slot -> the first position whose token may end the row, and the tokens that end it."""
        self._ended: set[int] = set()
        """Slots whose rows have ended. Plans that were made earlier may still contain these
        rows."""

    @classmethod
    def of(cls, token_ids: Tensor, num_workers: int) -> RowEnds:
        """`token_ids` [slots, positions]; `num_workers`: the number of the engine's workers."""
        if token_ids.device.type != "cpu" or num_workers > 1:
            return cls(None)
        tokens = token_ids.numpy()
        return cls(lambda slot, position: int(tokens[slot, position]))

    def add_request(self, row: NewRequest) -> None:
        """Resets the row's end. Known tokens have not ended the row, and an end token before
        `min_tokens` does not end it either: the sampler may draw one if parameters contradict each
        other."""
        first = max(len(row.token_ids), row.prompt_tokens + row.min_tokens - 1)
        self._ends[row.slot] = first, frozenset(row.end_token_ids)
        self._ended.discard(row.slot)

    def has_ended(self, slot: int, position: int) -> bool:
        """Whether the row has ended at or before this position, as far as is known. Must be called
        for each position that a plan of several passes computes."""
        if self._read is None:
            return False
        first, ends = self._ends[slot]
        if position >= first and self._read(slot, position) in ends:
            self._ended.add(slot)
        return slot in self._ended


class ExtraSteps:
    """The passes of a plan after the first one. Each pass starts after the earlier ones are
    computed and omits rows that have ended."""

    def __init__(self, plan: SchedulerOutput, has_ended: Callable[[int, int], bool]) -> None:
        self._plan, self._has_ended = plan, has_ended
        self.rows: list[list[int]] = []
        """For each pass, the rows of the plan that it has computed, in order."""

    def __iter__(self) -> Iterator[SchedulerOutput]:
        plan = self._plan
        rows = [row for row in range(len(plan.slots)) if not self._ends_at(row, 0)]
        for index in range(1, 1 + max(plan.extra_steps.values(), default=0)):
            rows = [row for row in rows if plan.extra_steps.get(row, 0) >= index]
            rows = [row for row in rows if not self._ends_at(row, index)]
            if not rows:
                return
            self.rows.append(rows)
            yield SchedulerOutput(
                plan.step,
                plan.epoch,
                slots=[plan.slots[row] for row in rows],
                starts=[self._at(row, index) for row in rows],
                num_tokens=[1] * len(rows),
                samples=[1] * len(rows),
            )

    def _ends_at(self, row: int, index: int) -> bool:
        """Whether the row has ended at the token that the pass would compute."""
        return self._has_ended(self._plan.slots[row], self._at(row, index))

    def _at(self, row: int, index: int) -> int:
        """Returns the position that a pass computes."""
        return self._plan.starts[row] + self._plan.num_tokens[row] - 1 + index


class OutputOfPasses(AsyncModelRunnerOutput):
    def __init__(
        self,
        plan: SchedulerOutput,
        passes: Sequence[AsyncModelRunnerOutput],
        rows: Sequence[Sequence[int]],
    ) -> None:
        """`passes`: the output of the plan itself, then those of its `ExtraSteps`; `rows`: their
        rows."""
        self._plan, self._passes, self._rows = plan, passes, rows

    def get_output(self) -> ModelRunnerOutput:
        """Merges the outputs of all passes. If a row fails after the first pass, it ends there and
        keeps the tokens before the failure."""
        plan = self._plan
        first, *others = [each.get_output() for each in self._passes]
        failed, with_nans = dict(first.failed), set(first.rows_with_nans)
        invalid, num_nans = set(first.invalid), dict(first.num_nans_in_logits)
        extras = {row: list(found) for row, found in first.extras.items()}
        tokens: dict[int, list[int]] = {}
        sampled = iter(first.sampled_token_ids)
        for row, samples in enumerate(plan.samples):
            if samples:
                token = next(sampled)
                tokens[row] = [] if row in failed or row in with_nans else [token]
        for rows, output in zip(self._rows, others, strict=True):
            sampled = iter(output.sampled_token_ids)
            for at, row in enumerate(rows):
                token = next(sampled)
                if row in failed or row in with_nans:
                    continue
                if at in output.failed:
                    failed[row] = output.failed[at]
                    invalid |= {row} if at in output.invalid else set()
                elif at in output.rows_with_nans:
                    with_nans.add(row)
                    if count := output.num_nans_in_logits.get(at):
                        num_nans[row] = count
                else:
                    tokens[row].append(token)
                    _add_extras(extras, row, output.extras.get(at, []))
        return replace(
            first,
            sampled_token_ids=[token for row in tokens for token in tokens[row]],
            extras=extras,
            failed=failed,
            rows_with_nans=sorted(with_nans),
            invalid=sorted(invalid),
            accepted={row: len(tokens[row]) - 1 for row in tokens},
            num_nans_in_logits=num_nans,
        )


def _add_extras(extras: dict[int, list[Extra]], row: int, found: list[Extra]) -> None:
    if found:
        extras.setdefault(row, []).extend(found)
