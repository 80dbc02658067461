"""The messages between an engine and its workers.

Each worker gets one `SchedulerOutput` per step; the output rank answers with one
`ModelRunnerOutput`. Fields are only ever appended, so that an older decoder accepts messages of a
newer sender.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from swell.configs.lora import Adapter
from swell.configs.secret import HoldsSecrets, SecretBytes
from swell.worker.sample.wire import Extra, PromptEmbeds, SamplerParams


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    """Each ends the request; known with `min_tokens`, or if plans may have several passes."""
    prompt_embeds: PromptEmbeds | None = None
    """They take the place of the embeddings of the prompt's tokens."""
    adapter: str = ""
    """The digest of the adapter with which it is computed; empty: none. All workers have it."""


class BlockGrowth(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks appended to a slot's table."""

    slot: int
    block_ids: list[int]


DEVICE = 0
"""The tier of the blocks that steps compute with; the others are those of `OffloadTiers`."""


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy the KV of one block, in all layers, from one tier of memory to another one."""

    source_tier: int
    source_block: int
    target_tier: int
    target_block: int


HANDOVER_FOLDER = "swell-kv"
"""Where files of blocks are, in `cache.handover_folder`."""
CLAIMED = ".claimed"
"""The end of the name of a file of blocks that an engine is about to read."""


class BlockFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks in a file that one engine writes for another one (`block_files.py`)."""

    name: str
    places: list[int]
    """Which blocks of the file."""
    block_ids: list[int]
    """Their blocks in the KV cache."""


class SchedulerOutput(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """One step. Applied in order: `copies`, `imports`, `new_rows`, `growths`, then the rows are
    computed, then `exports` are written.

    The rows are columns of equal length, decode rows first:

        slots       which request
        starts      first position computed; every earlier one lies in the KV cache
        num_tokens  positions computed: starts[i] .. starts[i] + num_tokens[i] - 1
        samples     how many tokens are sampled: after each of the last so many positions

    `drafts` are guesses: the tokens of a row's last positions, not known to be its own (see
    `drafts.py`). A row with drafts samples after each of them and after the token before them; any
    other row samples at most once.

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
    samples: list[int] = []
    work: bool = False
    """Lockstep engines: this one wants another step after this one."""
    pause: bool = False
    """Lockstep engines: this one votes for a pause."""
    copies: list[BlockCopy] = []
    """One after the other."""
    drafts: dict[int, list[int]] = {}
    """Row -> its drafts."""
    proposals: dict[int, int] = {}
    """Row that samples -> how many tokens the draft model shall guess behind its new ones: as far
    as its blocks hold these, and of a row with a wrong draft at most one more than were right."""
    further: dict[int, int] = {}
    """Row that samples, without drafts -> how many more tokens are computed and sampled, one pass
    after the other (see `multi_step.py`). Its blocks hold all of them but the last."""
    imports: list[BlockFile] = []
    exports: list[BlockFile] = []
    """They are there before the result of the step is."""


class WeightsSource(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Weights that take the place of those which a worker has."""

    path: str
    """Their folder."""
    number: int
    """Grows with each replacement, so that a folder whose files were replaced is read again. 0: the
    weights of the configuration."""


class GroupPlan(HoldsSecrets, frozen=True, array_like=True, gc=False):
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
    secret: SecretBytes = b""
    """What only the engine's own workers know (see `group_secret.py`)."""
    expert_secret: SecretBytes = b""
    """What only the workers of the engines that share experts know."""
    sleep_level: int = 0
    """What the worker holds until the next plan. 0: all that steps need. 1: no KV cache, and its
    weights in the memory of the host. 2: no weights, which the next plan reads again."""
    weights: WeightsSource | None = None
    """None: those that it has."""


class Regroup(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """Leave the groups and form those of the plan; answered by `Regrouped` or `WorkerFailure`."""

    plan: GroupPlan


class AbortGroups(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """Leave the groups at once, also during an operation: that step fails. Sent on the worker's
    second channel, which no step blocks."""

    generation: int
    """Groups of a later plan are not aborted."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """Forget the adapter of a place, which no request uses, and load this one there, beside the
    steps; answered by `AdapterLoaded`."""

    place: int
    adapter: Adapter
    number: int = 0
    """The answer names it: a later load of the same adapter has another one."""


class Shutdown(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """The worker ends its loop and frees its memory."""


WorkerCommand = SchedulerOutput | Regroup | AbortGroups | LoadAdapter | Shutdown


class ModelRunnerOutput(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """The result of a step: the tokens of each row that samples, in row order, and extras. A row
    with drafts has one more than were accepted, each with an extra of a kind, and so has a row with
    further passes; any other row one."""

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
    accepted: dict[int, int] = {}
    """Row with drafts -> how many of them the sampled tokens confirm, from the first. With further
    passes, of each row that samples: how many tokens it has behind its first, less than planned if
    it has ended; -1: none at all, since it has failed."""
    proposals: dict[int, list[int]] = {}
    """Row of the plan's `proposals` -> what the draft model guesses behind the row's new tokens."""
    imbalance: float = 0.0
    """Engines that share experts, in a step before which these were looked at: what the busiest
    worker has computed over the mean, in the most uneven layer of the last stage. Else 0."""
    invalid: list[int] = []
    """Rows in `failed` whose requests ask for what cannot be done."""


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
    refusal: str = ""
    """Why the new weights cannot be used: it has none until another plan."""
    freed_bytes: int = 0
    """Memory that it has given back while it sleeps; 0: it is awake."""


class AdapterLoaded(msgspec.Struct, frozen=True, tag=6, array_like=True, gc=False):
    """A worker has loaded an adapter, or cannot."""

    rank: int
    digest: str
    failure: str = ""
    """Why it cannot; empty: it has."""
    number: int = 0
    """Of the command."""


WorkerMessage = (
    ModelRunnerOutput
    | WorkerFailure
    | WorkerHello
    | WorkerProgress
    | WorkerHeartbeat
    | Regrouped
    | AdapterLoaded
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
    samples: bool = True
    """The model samples tokens; else it pools."""
    keeps_kv: bool = True
    """K and V are kept for later steps; else every prompt is computed in one step."""
    offload_blocks: tuple[int, int] = (0, 0)
    """Blocks beside the device's, in host memory and on disk."""
