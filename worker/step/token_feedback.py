"""Sends tokens sampled by the last pipeline stage to the first, which embeds them.

The protocol, for each tensor rank: after every step in which S > 0 rows sample, the last stage
sends the tokens [S] to its peer of stage 0. Both sides execute the same plans, so the messages
carry no identifiers: the first stage keeps a queue of the expected messages and receives them in
order, but as late as possible, so that several steps can be in flight. Before the first stage
builds a step, it receives all messages up to the last one that

- holds a token at a position that the step computes, or
- belongs to a slot that a new row takes (otherwise the late token would overwrite the new request),
  or
- lies more than `MAX_OUTSTANDING` messages back.

There is no deadlock: a message that the first stage waits for depends only on steps whose
activations it has sent already, and the last stage waits for a send only when the first stage must
have received it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swell.worker.comm.mesh import Group, Handle, Mesh
from swell.worker.step.input_batch import InputBatch
from swell.worker.step.request_states import RequestStates
from swell.worker.wire import SchedulerOutput

MAX_OUTSTANDING = 32
"""More than the steps that may be in flight, so that this limit never delays a step."""


class TokenFeedback:
    """One stage's side of the protocol. This base class is for a stage that neither sends nor
    receives tokens."""

    def before_step(self, plan: SchedulerOutput) -> None:
        """Receives the tokens that the plan needs; called before the plan's new requests are
        applied."""

    def after_forward(self, batch: InputBatch) -> None:
        """Called after the stage has computed its layers for the batch."""

    def after_sampling(self, tokens: Tensor) -> None:
        """Called after `tokens` [S] int64 have been sampled and written to this stage's states."""

    def drain(self) -> None:
        """Waits for all messages in flight."""


class PendingSends:
    """Sends in flight. `add` waits for the oldest ones when more than `limit` are in flight; their
    tensors are kept until then."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sends: deque[list[Handle]] = deque()

    def add(self, handles: Iterable[Handle]) -> None:
        """Adds the sends of one step."""
        self._sends.append(list(handles))
        self._wait_for_all_but(self._limit)

    def drain(self) -> None:
        """Waits for all sends."""
        self._wait_for_all_but(0)

    def _wait_for_all_but(self, youngest: int) -> None:
        while len(self._sends) > youngest:
            for handle in self._sends.popleft():
                handle.wait()


class LastStageFeedback(TokenFeedback):
    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending_sends = PendingSends(MAX_OUTSTANDING + 1)

    def after_sampling(self, tokens: Tensor) -> None:
        self._pending_sends.add([self._group.send(tokens, 0)])

    def drain(self) -> None:
        self._pending_sends.drain()


@dataclass(frozen=True, slots=True)
class _Expected:
    """The tokens of one step that have not been received yet."""

    # [S] int64 each: where the tokens are written; the `_np` arrays are the host's copies
    slots: Tensor
    positions: Tensor
    slots_np: np.ndarray
    positions_np: np.ndarray


class FirstStageFeedback(TokenFeedback):
    def __init__(self, group: Group, states: RequestStates) -> None:
        self._group = group
        self._states = states
        self._expected: deque[_Expected] = deque()

    def after_forward(self, batch: InputBatch) -> None:
        if batch.num_samples:
            self._expected.append(
                _Expected(
                    batch.sample_slots.clone(),
                    batch.sample_positions.clone(),
                    batch.sample_slots_np,
                    batch.sample_positions_np,
                )
            )

    def before_step(self, plan: SchedulerOutput) -> None:
        self._receive(self._needed(plan))

    def drain(self) -> None:
        self._receive(len(self._expected))

    def _receive(self, messages: int) -> None:
        for _ in range(messages):
            message = self._expected.popleft()
            tokens = torch.empty_like(message.slots)
            self._group.recv(tokens, self._group.size - 1)
            self._states.write_sampled(message.slots, message.positions, tokens)

    def _needed(self, plan: SchedulerOutput) -> int:
        """Returns how many messages, starting with the oldest, must be received before the plan."""
        needed = max(0, len(self._expected) - MAX_OUTSTANDING)
        if not self._expected:
            return needed
        # [max_rows] the step reads or replaces the positions low .. high - 1 of each slot
        low = np.zeros(self._states.max_rows, dtype=np.int64)
        high = np.zeros(self._states.max_rows, dtype=np.int64)
        slots, starts = np.array(plan.slots, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
        low[slots] = starts
        high[slots] = starts + np.array(plan.num_tokens, dtype=np.int64)
        for row in plan.new_requests:
            low[row.slot], high[row.slot] = 0, np.iinfo(np.int64).max
        for index, message in enumerate(self._expected):
            at, position = message.slots_np, message.positions_np
            if ((low[at] <= position) & (position < high[at])).any():
                needed = max(needed, index + 1)
        return needed


def make_feedback(mesh: Mesh, states: RequestStates) -> TokenFeedback:
    """Returns the implementation for this stage of the mesh's pipeline."""
    if mesh.pipeline.size == 1:
        return TokenFeedback()
    if mesh.is_first_stage:
        return FirstStageFeedback(mesh.feedback, states)
    if mesh.is_last_stage:
        return LastStageFeedback(mesh.feedback)
    return TokenFeedback()
