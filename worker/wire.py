"""The messages between an engine and its workers.

Each worker gets one `SchedulerOutput` per step; the output rank answers with one
`ModelRunnerOutput`. Fields are only ever appended, so that an older decoder accepts messages of a
newer sender.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from swell.worker.sample.wire import Extra, SamplerParams


class NewRow(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A request takes a slot: for the first time, or again after preemption or failover.

    `token_ids` holds all known tokens: the prompt and the output tokens that exist already.
    `prompt_tokens` counts only the prompt, so `len(token_ids) - prompt_tokens` outputs exist.
    """

    slot: int
    token_ids: list[int]
    prompt_tokens: int
    block_ids: list[int]
    sampler: SamplerParams
    min_tokens: int = 0
    """No token of `end_token_ids` is sampled before this many outputs exist."""
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
        samples     whether a token is sampled after the last of them

    A sampled token is written on the device to the position after the row's last, where the next
    step reads it: the host may not have read it yet. A step without rows is the dummy batch.
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
    """The groups that a worker shall form.

    A store is (host, port): through it the members of a group find each other. Every plan has a
    `generation` that is new to its store, so that no group reads late keys of earlier groups.
    """

    generation: int
    """Counts how often this engine's own groups were formed."""
    store: tuple[str, int] | None = None
    """The store of the engine's own workers; None: it has one worker, or keeps its groups."""
    epoch: int = 0
    """The epoch of the engines that share experts."""
    engines: int = 1
    """How many engines share experts."""
    index: int = 0
    """This engine's index among them."""
    expert_store: tuple[str, int] | None = None
    """The store of the workers of these engines; None if there is one engine."""
    keep_states: bool = False
    """True: all steps are done, slots and KV cache stay valid. False: all slots become empty."""
    secret: bytes = b""
    """What only the engine's own workers know (see `group_secret.py`)."""
    expert_secret: bytes = b""
    """What only the workers of the engines that share experts know."""


class Regroup(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """Leave the groups and form those of the plan; answered by `Regrouped` or `WorkerFailure`."""

    plan: GroupPlan


class AbortGroups(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """Leave the groups at once, also during an operation: that step fails. Sent on the worker's
    second channel, which no step blocks."""

    generation: int
    """Groups of a later plan are not aborted."""


class Shutdown(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """The worker ends its loop and frees its memory."""


WorkerCommand = SchedulerOutput | Regroup | AbortGroups | Shutdown


class ModelRunnerOutput(
    msgspec.Struct, frozen=True, tag=0, array_like=True, omit_defaults=True, gc=False
):
    """The result of a step: one token for each row with `samples`, in row order, and extras."""

    step: int
    sampled_token_ids: list[int] = []
    working: int = 0
    """Lockstep: engines that want another step."""
    pausing: int = 0
    """Lockstep: engines that vote for a pause."""
    sync_s: float = 0.0
    """Lockstep: how long this worker waited for the other engines before the step."""
    extras: dict[int, list[Extra]] = {}
    """Row of the step -> its results beside the token."""
    failed: dict[int, str] = {}
    """Row -> reason, for requests that failed by their own fault. If such a row samples, its token
    has no meaning; the other rows are not affected."""
    rows_with_nans: list[int] = []
    """Rows whose logits are no numbers (NaN, +inf, or only -inf); their tokens have no meaning
    either."""


class WorkerFailure(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """A step or a regrouping raised. The worker keeps its weights and waits for a `Regroup`."""

    step: int
    rank: int
    message: str
    group: bool = False
    """True: a group failed, so a peer is gone. False: the error is the worker's own."""
    generation: int = 0
    """The generation of its groups, or of those that it was forming."""
    absent: list[int] = []
    """As `GroupError.absent`."""


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
    """Layers computed since the start."""
    generation: int = 0
    """The generation of its groups, or of those that it is forming."""


class Regrouped(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """A worker has formed the groups of a plan."""

    rank: int
    generation: int
    experts_moved: int = 0
    """Experts that came from a peer."""
    experts_loaded: int = 0
    """Experts that no worker had, read from the checkpoint."""


WorkerMessage = (
    ModelRunnerOutput | WorkerFailure | WorkerHello | WorkerProgress | WorkerHeartbeat | Regrouped
)


class AsyncModelRunnerOutput(ABC):
    """The result of a step, which the device may still be computing."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Wait for the result. Called once. Raises what the step raised."""


class WorkerLimits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The capacity of a loaded worker, reported once at start."""

    num_blocks: int
    """KV blocks that fit into its memory."""
    max_model_len: int
    """Longest sequence that the model's positions allow (or `model.max_model_len`), in tokens."""
    vocab_size: int
    weight_bytes: int = 0
    pid: int = 0
