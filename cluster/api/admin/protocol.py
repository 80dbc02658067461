"""Response bodies of the admin API, and of the routes that describe the server and its model."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.api.bodies.timings import Timings
from swell.engine.serving.start_timeline import StartPhase


class ChangeResult(msgspec.Struct, frozen=True):
    """The manager's answer to a requested change."""

    target: int
    """The target number of engines."""
    refusal: str | None = None
    """The reason of a refusal; None: accepted."""
    kept: list[str] = []
    """Keys of a requested configuration that differ but do not change."""
    version: str = ""
    """The version of a requested configuration."""
    is_stored: bool = True
    """The change is in the checkpoint. False: it has begun, and is stored when the GCS answers."""


NOT_STORED = (
    "the change has begun, but it is not stored yet, because Ray's GCS does not answer: if the "
    "manager is replaced before it answers, the change may be lost; check it with swell status"
)


class Accepted(Body, kw_only=True):
    """A change has begun, and replaces the one in progress, if any. `GET /admin/cluster` shows its
    phase."""

    status: str = "accepted"
    target: int | None = None
    """The target number of engines."""
    stored: bool = True
    """The change survives every process. False: Ray's GCS does not answer, so the change is stored
    later, and may be lost if the manager is replaced before."""
    kept: list[str] | UnsetType = UNSET
    """For an upgrade: keys of the configuration that differ but do not change."""
    version: str | UnsetType = UNSET
    """For an upgrade: the target version of all engines."""


class WorkerState(Body, kw_only=True):
    rank: int
    tensor: int
    pipeline: int
    pid: int | None
    """None: its process is starting."""
    status: str
    """loading, ready, or lost: it has died or stopped, and is not replaced yet."""
    replaced: int = 0
    """Number of lost workers that had its rank before, since the start of the engine."""


class EngineState(Body, kw_only=True):
    rank: int
    state: str
    version: str = ""
    """The version of weights and limits."""
    numerics: str = ""
    """The numerics class: engines of one class find the same bits for a request."""
    pid: int | None = None
    node: str | None = None
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV blocks in use, 0 .. 1."""
    steps: int = 0
    epoch: int = 0
    """The epoch of the engine's group."""
    wave: int = 0
    repairs: int = 0
    """How often workers were replaced, or the engine woke up, since its start."""
    sleep_level: int = 0
    """0: the engine is awake."""
    freed_bytes: int = 0
    """Memory that the workers have freed while the engine sleeps."""
    workers: list[WorkerState] = []
    starting: str = ""
    """The work of a starting engine, for people."""
    start: list[StartPhase] = []
    """The phases of its start. The first one is missing if another manager started the engine."""


class CoordinatorState(Body, kw_only=True):
    pid: int | None = None
    error: str | None = None
    """Why the coordinator does not answer; the other fields then hold their last known values."""


class RescaleState(Body, kw_only=True):
    """`phase` is idle, pending (engines wait for resources), prepare, commit, drain or failed;
    `error` says why it failed. A start that fails without a requested change is retried with
    growing pauses."""

    phase: str
    error: str | None = None
    failures: int = 0
    """Consecutive failed starts of the missing engine."""
    next_try_s: float | None = None
    """Seconds until the next attempt; 0: an attempt is running."""


class UpgradeState(Body, kw_only=True):
    """`phase` is idle, in progress, rolling back, failed (and rolled back), cancelling or
    cancelled; `error` says why it failed, or what fails to start now."""

    phase: str = "idle"
    version: str = ""
    """The target version of all engines."""
    previous: str | None = None
    """The version that the target version replaces; null if no upgrade is in progress."""
    model: str = ""
    """`model.path` of the target version."""
    error: str | None = None
    failures: int = 0
    """Consecutive failed starts of the target version, or of one that unfinished answers need."""
    next_try_s: float | None = None
    """Seconds until the next attempt; 0: an attempt is running."""


class LeftoverState(Body, kw_only=True):
    """Resources that terminated engines may still hold in Ray. Removing them is retried with
    growing pauses."""

    names: list[str] = []
    """Names of the known actors and placement groups."""
    reason: str
    failures: int = 0
    """Consecutive failed attempts."""
    next_try_s: float = 0.0
    """Seconds until the next attempt; 0: an attempt is running."""


class ScalingDecision(Body, kw_only=True):
    """A change of the target number of engines by the autoscaler."""

    before: int
    engines: int
    reason: str
    age_s: float


class AutoscalingState(Body, kw_only=True):
    """The load that the autoscaler follows, and its recommendation."""

    min_engines: int
    max_engines: int
    queue_s: float | None = None
    """How long a new request would wait for a slot; null, here and below: unknown."""
    kv_usage: float | None = None
    """Share of the KV blocks in use, on average over the engines."""
    ttft_s: float | None = None
    """The 90th percentile of the time to first token over the last seconds."""
    recommended: int | None = None
    """The number of engines that this load needs. The target follows after the load has needed more
    for `autoscaling.grow_after_s`, or fewer for `shrink_after_s`."""
    reason: str
    shrink_after_s: float
    last_decision: ScalingDecision | None = None


class PendingEngines(Body, kw_only=True):
    """Engines that wait for resources in the Ray cluster. Their placement groups exist, so that
    Ray's autoscaler adds hosts for them."""

    ranks: list[int]
    reason: str
    bundles: list[dict[str, float]]
    """Ray resources that each of them requests; each bundle must fit on one host."""


class DrainingNode(Body, kw_only=True):
    """A host that Ray will remove: its engines are replaced elsewhere, and leave."""

    node: str
    left_s: float | None = None
    """Seconds until the host is removed; null: unknown."""
    engines: list[int] = []
    """Ranks of the engines that are still on the host."""


class ClusterState(Body, kw_only=True):
    """`epoch` counts memberships, `wave` counts waves, `target` is the target number of engines.
    `state` is starting, serving, changing, paused, degraded (engines are missing, and starting them
    fails) or failed (no engine is left)."""

    epoch: int
    wave: int
    state: str
    target: int
    engines: list[EngineState]
    coordinator: CoordinatorState
    rescale: RescaleState
    upgrade: UpgradeState = msgspec.field(default_factory=UpgradeState)
    leftovers: LeftoverState | None = None
    """Null: nothing is left over."""
    autoscaling: AutoscalingState | None = None
    """Null: autoscaling is off."""
    pending: PendingEngines | None = None
    """Null: no engine waits for resources."""
    draining_nodes: list[DrainingNode] = []
    hang_reports: list[str] = []
    """Files with the state of engines whose processes hung, `HOST:PATH`."""
    cache_generation: int = 0
    """How often operators have emptied the prefix caches."""


class Health(Body, kw_only=True):
    status: str = "ok"


class Readiness(Body, kw_only=True):
    """`engines` are the ranks that accept requests and can make progress; `coordinator` is ok or
    silent."""

    status: str = "ready"
    engines: list[int]
    coordinator: str = "ok"


class IdleEngine(Body, kw_only=True):
    """Whether all slots and blocks of an engine are free; `reason` says what is held."""

    rank: int
    idle: bool
    reason: str | None = None


class IdleReport(Body, kw_only=True):
    engines: list[IdleEngine]


class ModelCard(Body, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "swell"
    root: str | None = None
    """The name of the base model: users do not see its folder."""
    parent: str | None = None
    """For an adapter: the name of its base model."""
    max_model_len: int


class ModelList(Body, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class Version(Body, kw_only=True):
    version: str


class ServerLoad(Body, kw_only=True):
    """`server_load` counts the requests that run or wait in all engines, from their last
    reports."""

    server_load: int


class EngineLoad(Body, kw_only=True):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    kv_usage: float
    """Share of the KV blocks in use, 0 .. 1."""


class RequestStory(Body, kw_only=True):
    """One HTTP request, while it runs and for a while after it has finished."""

    id: str
    """The id of the answer."""
    request_id: str
    """The header `x-request-id` of the request and of its answer."""
    operation: str
    model: str
    running: bool
    ingress: int
    """The number of the ingress that serves the request."""
    timings: Timings


class RequestStories(Body, kw_only=True):
    """The requests that were sent under one id, oldest first."""

    requests: list[RequestStory]
    complete: bool = True
    """False: an ingress did not answer, and may know more requests."""


class ServerInfo(Body, kw_only=True):
    """The description of the server for users: without paths, hosts or keys. Operators use
    `/admin/cluster`."""

    version: str
    served_model_name: str
    context_length: int
    dtype: str
    dp_size: int
    """The current number of engines."""
    tp_size: int
    pp_size: int
    max_running_requests: int
    """The limit of each engine."""
    internal_states: list[EngineLoad]
