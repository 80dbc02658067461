"""The words that a worker understands and says.

One `SchedulerOutput` goes to each worker per step; the worker that samples answers with one
`ModelRunnerOutput`. Fields are only ever appended, so that an older decoder tolerates a newer
sender.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from swell.worker.sample.wire import Extra, SamplerParams


class NewRow(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A request takes a slot: for the first time, or again after preemption or failover.

    `token_ids` holds everything known: the prompt and the output tokens that exist already.
    `prompt_tokens` counts the prompt alone, so `len(token_ids) - prompt_tokens` outputs exist.
    """

    slot: int
    token_ids: list[int]
    prompt_tokens: int
    block_ids: list[int]
    sampler: SamplerParams
    min_tokens: int = 0
    """No token of `end_token_ids` is drawn before this many outputs exist."""
    end_token_ids: list[int] = []


class BlockGrowth(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks appended to a slot's table."""

    slot: int
    block_ids: list[int]


class SchedulerOutput(
    msgspec.Struct, frozen=True, tag=0, array_like=True, omit_defaults=True, gc=False
):
    """One step. Applied in order: `new_rows`, `growths`, then the rows are computed.

    The rows are columns of equal length, decode rows first:

        slots       which request
        starts      first position computed; every earlier one lies in the KV cache
        num_tokens  positions computed: starts[i] .. starts[i] + num_tokens[i] - 1
        samples     whether a token is drawn after the last of them

    A drawn token is written on the device to the position after the row's last, where the next
    step finds it: the host may not have read it yet. A step without rows is the dummy batch.
    """

    step: int
    epoch: int = 0
    new_rows: list[NewRow] = []
    growths: list[BlockGrowth] = []
    slots: list[int] = []
    starts: list[int] = []
    num_tokens: list[int] = []
    samples: list[bool] = []
    work: bool = False
    """Lockstep engines: this one wants another step after this one."""
    pause: bool = False
    """Lockstep engines: this one votes for a pause."""


class GroupPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The groups that a worker is to be in.

    A store is (host, port): where those who are to meet find each other. Every plan has a
    `generation` that its store has not seen, so that late keys of earlier groups are nobody's.
    """

    generation: int
    """Counts the times that this engine's own groups were formed."""
    store: tuple[str, int] | None = None
    """Where the engine's own workers meet; None: there is one alone, or its groups still stand."""
    epoch: int = 0
    """Of the group of engines that share experts."""
    engines: int = 1
    """How many engines share experts."""
    index: int = 0
    """This engine's place among them."""
    expert_store: tuple[str, int] | None = None
    """Where workers of these engines meet; None if there is one engine."""
    keep_states: bool = False
    """All steps were done: slots and KV cache stay as they are. Else every slot is empty now."""


class Regroup(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """Leave the groups and form those of the plan; answered by `Regrouped` or `WorkerFailure`."""

    plan: GroupPlan


class AbortGroups(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """Leave the groups at once, from inside an operation too: that step fails. Heard by the
    worker's second channel, which is never busy with a step."""

    generation: int
    """Groups of a later plan are left alone."""


class Shutdown(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """The worker leaves its loop and gives its memory back."""


WorkerCommand = SchedulerOutput | Regroup | AbortGroups | Shutdown


class ModelRunnerOutput(
    msgspec.Struct, frozen=True, tag=0, array_like=True, omit_defaults=True, gc=False
):
    """What a step gave: one token for each row with `samples`, in row order, and extras."""

    step: int
    sampled_token_ids: list[int] = []
    working: int = 0
    """Lockstep: engines that want another step."""
    pausing: int = 0
    """Lockstep: engines that vote for a pause."""
    sync_s: float = 0.0
    """Lockstep: how long this worker waited for the other engines before the step."""
    extras: dict[int, list[Extra]] = {}
    """What was asked for beside the tokens, by row of the step."""
    failed: dict[int, str] = {}
    """Rows whose requests cannot go on, each by its own fault, and why. Where they sample they have
    a token that means nothing; the other rows are as they would be without them."""
    rows_with_nans: list[int] = []
    """Rows whose logits are no numbers (NaN, +inf, or nothing but -inf), which have such a token
    too."""


class WorkerFailure(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """A step or a regrouping raised. The worker keeps its weights and waits for a `Regroup`."""

    step: int
    rank: int
    message: str
    group: bool = False
    """A group failed: a peer has gone. Else it is the worker's own fault."""
    generation: int = 0
    """Of the groups that it was in, or was to form."""


class WorkerHello(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """First message of a worker on its engine's channel."""

    rank: int
    epoch: int = 0


class WorkerProgress(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """How much of its weights a worker has read."""

    rank: int
    done_bytes: int
    total_bytes: int


class WorkerHeartbeat(msgspec.Struct, frozen=True, tag=4, array_like=True, gc=False):
    """Sent every `cluster.heartbeat_s` by a thread of its own: the process runs."""

    rank: int
    progress_counter: int
    """Layers computed since the start: the measure of progress."""
    generation: int = 0
    """Of the groups that it is in, or is forming."""


class Regrouped(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """A worker is in the groups of a plan."""

    rank: int
    generation: int
    experts_moved: int = 0
    """Experts that came from a peer."""
    experts_loaded: int = 0
    """Experts that nobody had, read from the checkpoint."""


WorkerMessage = (
    ModelRunnerOutput | WorkerFailure | WorkerHello | WorkerProgress | WorkerHeartbeat | Regrouped
)


class AsyncModelRunnerOutput(ABC):
    """The result of a step that the device may still be computing."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the result. Called once. Raises what the step raised."""


class WorkerLimits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a loaded worker can hold, told once at start."""

    num_blocks: int
    """KV blocks that its memory has room for."""
    max_model_len: int
    """Longest sequence that the model's positions allow (or `model.max_model_len`), in tokens."""
    vocab_size: int
    weight_bytes: int = 0
    pid: int = 0
