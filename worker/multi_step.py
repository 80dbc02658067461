"""A plan that computes its rows several times, one token further each time.

Each pass is a step like any other: whatever a step holds, a pass does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from swell.worker.sample.wire import Extra
from swell.worker.wire import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput


def further_passes(plan: SchedulerOutput) -> Iterator[SchedulerOutput]:
    """The passes behind the first one."""
    for index in range(1, 1 + max(plan.further.values(), default=0)):
        rows = _rows(plan, index)
        yield SchedulerOutput(
            plan.step,
            plan.epoch,
            slots=[plan.slots[row] for row in rows],
            starts=[plan.starts[row] + plan.num_tokens[row] - 1 + index for row in rows],
            num_tokens=[1] * len(rows),
            samples=[1] * len(rows),
        )


def _rows(plan: SchedulerOutput, index: int) -> list[int]:
    """The rows of the plan that a pass computes, in order."""
    return [row for row in range(len(plan.slots)) if plan.further.get(row, 0) >= index]


class OutputOfPasses(AsyncModelRunnerOutput):
    def __init__(self, plan: SchedulerOutput, passes: Sequence[AsyncModelRunnerOutput]) -> None:
        """`passes`: of the plan itself, then of `further_passes`."""
        self._plan, self._passes = plan, passes

    def get_output(self) -> ModelRunnerOutput:
        """What failed behind the first pass ends a row there: it has the tokens before that."""
        plan = self._plan
        first, *others = [each.get_output() for each in self._passes]
        failed, with_nans = dict(first.failed), set(first.rows_with_nans)
        extras = {row: list(found) for row, found in first.extras.items()}
        tokens: dict[int, list[int]] = {}
        sampled = iter(first.sampled_token_ids)
        for row, samples in enumerate(plan.samples):
            if samples:
                token = next(sampled)
                tokens[row] = [] if row in failed or row in with_nans else [token]
        for index, output in enumerate(others, 1):
            sampled = iter(output.sampled_token_ids)
            for at, row in enumerate(_rows(plan, index)):
                token = next(sampled)
                if row in failed or row in with_nans:
                    continue
                if at in output.failed:
                    failed[row] = output.failed[at]
                elif at in output.rows_with_nans:
                    with_nans.add(row)
                else:
                    tokens[row].append(token)
                    _add_extras(extras, row, output.extras.get(at, []))
        return replace(
            first,
            sampled_token_ids=[token for row in tokens for token in tokens[row]],
            extras=extras,
            failed=failed,
            rows_with_nans=sorted(with_nans),
            accepted={row: len(tokens[row]) - 1 for row in tokens},
        )


def _add_extras(extras: dict[int, list[Extra]], row: int, found: list[Extra]) -> None:
    if found:
        extras.setdefault(row, []).extend(found)
