"""The messages between an engine and its workers.

The engine sends one `SchedulerOutput` per step to each worker; the output rank answers with one
`ModelRunnerOutput`. New fields are only ever appended, so that an older decoder accepts messages of
a newer sender.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec

from swell.configs.lora import Adapter
from swell.configs.runtime.secret import HoldsSecrets, SecretBytes
from swell.worker.sampler_wire import Extra, PromptEmbeds, SamplerParams


class NewRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that takes a slot: for the first time, or again after preemption or failover.

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
    """Each of these tokens ends the request. Sent only with `min_tokens`, or if plans may have
    several passes."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings that replace those of the prompt's tokens."""
    adapter: str = ""
    """The digest of the request's adapter, which all workers have loaded; empty: no adapter."""


class NewBlocks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks appended to a slot's table."""

    slot: int
    block_ids: list[int]


DEVICE = 0
"""The memory tier of the blocks that steps compute with; the other tiers are those of
`OffloadTiers`."""


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copies the KV of one block, in all layers, from one memory tier to another."""

    source_tier: int
    source_block: int
    target_tier: int
    target_block: int


HANDOVER_FOLDER = "swell-kv"
"""The folder of the files of blocks, inside `cache.handover_folder`."""
CLAIMED = ".claimed"
"""The suffix of the name of a file of blocks that an engine is about to read."""


class BlockFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks in a file that one engine writes for another one (see `block_files.py`)."""

    name: str
    places: list[int]
    """Indices of the blocks in the file."""
    block_ids: list[int]
    """The corresponding blocks in the KV cache."""


class SchedulerOutput(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """The plan of one step. Workers apply `copies`, `imports`, `new_requests` and `new_blocks` in
    this order, then compute the rows, then write `exports`.

    The rows are given as parallel lists, decode rows first:

        slots       the slot of the row's request
        starts      first position to compute; all earlier positions are in the KV cache
        num_tokens  number of positions to compute: starts[i] .. starts[i] + num_tokens[i] - 1
        samples     number n of tokens to sample: one after each of the row's last n positions

    `drafts` holds draft tokens: proposals for the row's last positions that are not verified yet
    (see `draft_verification.py`). A row with drafts samples after each draft and after the token
    before the drafts; any other row samples at most once.

    A sampled token is written on the device to the position after the row's last, where the next
    step reads it: the host may not have read it yet. A step without rows is the dummy batch.
    """

    step: int
    epoch: int = 0
    new_requests: list[NewRequest] = []
    new_blocks: list[NewBlocks] = []
    slots: list[int] = []
    starts: list[int] = []
    num_tokens: list[int] = []
    samples: list[int] = []
    work: bool = False
    """Lockstep engines: this engine wants another step after this one."""
    pause: bool = False
    """Lockstep engines: this engine votes for a pause."""
    copies: list[BlockCopy] = []
    """Copied one after the other, in this order."""
    drafts: dict[int, list[int]] = {}
    """Row -> its draft tokens."""
    proposals: dict[int, int] = {}
    """Row that samples -> how many tokens the draft model should propose after the new ones, at
    most as many as the row's blocks hold. In a row with a rejected draft the draft model proposes
    at most one token more than were accepted."""
    extra_steps: dict[int, int] = {}
    """Row that samples, without drafts -> how many more tokens are computed and sampled, one per
    pass (see `multi_step.py`). The row's blocks hold all of these tokens except the last."""
    imports: list[BlockFile] = []
    exports: list[BlockFile] = []
    """Blocks to write to files. The files exist before the step's result is returned."""

    @property
    def summary(self) -> str:
        """The size of the step, for people."""
        rows, tokens = len(self.slots), sum(self.num_tokens)
        return f"{self.step}: {rows} rows, {tokens} tokens, epoch {self.epoch}"


class WeightsSource(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The weights that replace the worker's current ones."""

    path: str
    """The folder of the weights."""
    number: int
    """Increases with each replacement, so that a folder is read again if its files were replaced.
    0: the weights of the configuration."""


class GroupPlan(HoldsSecrets, frozen=True, array_like=True, gc=False):
    """The groups that a worker should form.

    The members of a group find each other through a store, whose address is (host, port). Every
    plan has a `generation` that is new to its store, so that no group reads stale keys of earlier
    groups.
    """

    generation: int
    """Counts how often this engine's own groups have been formed."""
    store: tuple[str, int] | None = None
    """The store of the engine's own workers. None: the engine has one worker, or keeps its
    groups."""
    epoch: int = 0
    """The epoch of the engines that share experts."""
    engines: int = 1
    """How many engines share experts."""
    index: int = 0
    """This engine's index among them."""
    expert_store: tuple[str, int] | None = None
    """The store of the workers of these engines; None if there is only one engine."""
    keep_states: bool = False
    """True: all steps are done, and slots and KV cache stay valid. False: all slots become
    empty."""
    secret: SecretBytes = b""
    """A secret that only the engine's own workers know (see `group_secret.py`)."""
    expert_secret: SecretBytes = b""
    """A secret that only the workers of the engines that share experts know."""
    sleep_level: int = 0
    """How deeply the worker sleeps until the next plan. 0: awake. 1: it frees the KV cache and
    keeps its weights in host memory. 2: it also frees the weights, which the next plan loads
    again."""
    weights: WeightsSource | None = None
    """New weights; None: the worker keeps those that it has."""


class Regroup(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """Tells a worker to leave its groups and form those of the plan. The worker answers with
    `Regrouped` or `WorkerFailure`."""

    plan: GroupPlan


class AbortGroups(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """Tells a worker to leave its groups at once, even during an operation, whose step then fails.
    Sent on the worker's second channel, which no step blocks."""

    generation: int
    """The generation to abort; groups of a later plan are not aborted."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """Tells a worker to replace the adapter in a place that no request uses by this one. The worker
    loads it in the background while it computes steps, and answers with `AdapterLoaded`."""

    place: int
    adapter: Adapter
    number: int = 0
    """Repeated in the answer, so that two loads of the same adapter can be told apart."""


class MeasureMemory(msgspec.Struct, frozen=True, tag=6, array_like=True, gc=False):
    """Tells a worker, whose groups are formed, to measure how large its KV cache can be. The worker
    answers with `MemoryMeasured` or `WorkerFailure`."""


class InitCache(msgspec.Struct, frozen=True, tag=7, array_like=True, gc=False):
    """Tells a worker to allocate its KV cache, with the smallest limits of all workers of the
    engine. The worker answers with `CacheReady` or `WorkerFailure`."""

    num_blocks: int
    max_model_len: int
    """The longest sequence, in tokens."""
    offload_blocks: tuple[int, int] = (0, 0)
    """Number of blocks outside the device: in host memory, and on disk."""


class Shutdown(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """Tells the worker to stop its loop and free its memory."""


WorkerCommand = (
    SchedulerOutput | Regroup | AbortGroups | LoadAdapter | MeasureMemory | InitCache | Shutdown
)


class ModelRunnerOutput(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """The result of a step: the sampled tokens of each row that samples, in row order, and extras.
    A row with drafts, or with further passes, has one token more than `accepted` says, and one
    extra of each kind per token; any other row that samples has one token."""

    step: int
    sampled_token_ids: list[int] = []
    working: int = 0
    """Lockstep: the number of engines that want another step."""
    pausing: int = 0
    """Lockstep: the number of engines that vote for a pause."""
    sync_s: float = 0.0
    """Lockstep: how long this worker waited for the other engines before the step, in seconds."""
    extras: dict[int, list[Extra]] = {}
    """Row of the step -> its results other than tokens."""
    failed: dict[int, str] = {}
    """Row -> reason, for requests that failed by their own fault. If such a row samples, its token
    is meaningless; the other rows are not affected."""
    rows_with_nans: list[int] = []
    """Rows whose logits contain NaN or +inf, or only -inf; their tokens are meaningless, too."""
    accepted: dict[int, int] = {}
    """Row with drafts -> how many of its drafts, counted from the first, the sampled tokens
    confirm. With further passes, each row that samples -> how many tokens it has after its first:
    fewer than planned if the row has ended, -1 if it has none because it failed."""
    proposals: dict[int, list[int]] = {}
    """Row of the plan's `proposals` -> the tokens that the draft model proposes after the new
    ones."""
    imbalance: float = 0.0
    """Set in a step before which engines that share experts measured their load: the load of the
    busiest worker divided by the mean, in the most uneven layer of the last stage. Otherwise 0."""
    invalid: list[int] = []
    """Rows in `failed` whose requests were invalid."""
    num_nans_in_logits: dict[int, int] = {}
    """Row -> the number of NaN in the model's logits of its samples, if it has any. Always empty
    without `model.compute_nans_in_logits`. All these rows are in `rows_with_nans`."""


class WorkerFailure(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """Reports that a step or a regrouping raised. The worker keeps its weights and waits for a
    `Regroup`."""

    step: int
    rank: int
    message: str
    group: bool = False
    """True: a group failed, so a peer is gone. False: the error is the worker's own."""
    generation: int = 0
    """The generation of the groups that the worker had, or was forming."""
    absent: list[int] = []
    """The same as `GroupError.absent`."""


class WorkerHello(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """The first message of a worker on its engine's channel."""

    rank: int
    epoch: int = 0


class WorkerProgress(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """How much of its weights a worker has read."""

    rank: int
    done_bytes: int
    total_bytes: int
    """0: not known yet."""
    tensor: int = 0
    """The number of the tensor that it reads, from 1."""
    total_tensors: int = 0


class WorkerHeartbeat(msgspec.Struct, frozen=True, tag=4, array_like=True, gc=False):
    """Shows that the worker's process runs. A separate thread sends it every
    `cluster.heartbeat_s`."""

    rank: int
    progress_counter: int
    """Layers computed since the start, and other units of progress (see
    `Worker.progress_counter`)."""
    generation: int = 0
    """The generation of the groups that the worker has, or is forming."""


class Regrouped(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """Reports that a worker has formed the groups of a plan."""

    rank: int
    generation: int
    experts_moved: int = 0
    """Number of experts that came from a peer."""
    experts_loaded: int = 0
    """Number of experts that no worker had, which were read from the checkpoint."""
    refusal: str = ""
    """Why the new weights cannot be used; then the worker stays without weights until another
    plan."""
    freed_bytes: int = 0
    """Bytes of memory that the sleeping worker has freed; 0: it is awake."""


class AdapterLoaded(msgspec.Struct, frozen=True, tag=6, array_like=True, gc=False):
    """Reports that a worker has loaded an adapter, or has failed to."""

    rank: int
    digest: str
    failure: str = ""
    """Why the adapter cannot be loaded; empty: it is loaded."""
    number: int = 0
    """The number of the `LoadAdapter` command."""


class WorkerLimits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The capacity of a worker, measured once at the start."""

    num_blocks: int
    """KV blocks that fit into the worker's memory."""
    max_model_len: int
    """Longest sequence that the model's positions allow (or `model.max_model_len`), in tokens."""
    vocab_size: int
    samples: bool = True
    """Whether the model samples tokens; otherwise it pools."""
    keeps_kv: bool = True
    """Whether K and V are kept for later steps; otherwise every prompt is computed in one step."""
    offload_blocks: tuple[int, int] = (0, 0)
    """See `InitCache`."""
    numerics: str = ""
    """The numerics class, see `worker/exactness.py`; empty: unknown."""


class MemoryMeasured(msgspec.Struct, frozen=True, tag=7, array_like=True, gc=False):
    """Reports what fits into a worker's memory."""

    rank: int
    limits: WorkerLimits | None
    """None: nothing fits."""
    refusal: str = ""
    """Why nothing fits, and which key of the configuration to change."""


class CacheReady(msgspec.Struct, frozen=True, tag=8, array_like=True, gc=False):
    """Reports that a worker has allocated its KV cache and can compute steps."""

    rank: int


class CompileProgress(msgspec.Struct, frozen=True, tag=9, array_like=True, gc=False):
    """How many files of its kernels are compiled, by this worker or by another one on its host."""

    rank: int
    done_files: int
    total_files: int


class CacheProgress(msgspec.Struct, frozen=True, tag=10, array_like=True, gc=False):
    """How many KV blocks a worker has allocated, on the device, in host memory and on disk."""

    rank: int
    done_blocks: int
    total_blocks: int


class CaptureProgress(msgspec.Struct, frozen=True, tag=11, array_like=True, gc=False):
    """How many of the steps that it captures at its start a worker has captured."""

    rank: int
    done_steps: int
    total_steps: int


StartMessage = WorkerProgress | CompileProgress | CacheProgress | CaptureProgress
"""A report of a worker while it starts."""

WorkerMessage = (
    ModelRunnerOutput
    | WorkerFailure
    | WorkerHello
    | WorkerProgress
    | WorkerHeartbeat
    | Regrouped
    | AdapterLoaded
    | MemoryMeasured
    | CacheReady
    | CompileProgress
    | CacheProgress
    | CaptureProgress
)


class AsyncModelRunnerOutput(ABC):
    """The result of a step, which the device may still be computing."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Waits for the result and returns it; called once. Raises what the step raised."""
