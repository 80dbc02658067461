"""Answers of the admin API, and of the routes that describe the server and its model."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from swell.cluster.api.protocol_base import Body
from swell.cluster.api.timings import Timings


class ChangeResult(msgspec.Struct, frozen=True):
    """The manager's answer to a requested change."""

    target: int
    """The number of engines that is wanted now."""
    refusal: str | None = None
    """The reason of a refusal; None: accepted."""
    kept: list[str] = []
    """Keys of a requested configuration that differ, and stay as they are."""
    version: str = ""
    """Of a requested configuration."""


class Accepted(Body, kw_only=True):
    """A change has begun, and replaces one that was under way; `GET /admin/cluster` has its
    phase."""

    status: str = "accepted"
    target: int | None = None
    """The number of engines that is wanted now."""
    kept: list[str] | UnsetType = UNSET
    """Of an upgrade: keys of the configuration that differ, and stay as they are."""
    version: str | UnsetType = UNSET
    """Of an upgrade: the version of which all engines are to be."""


class WorkerState(Body, kw_only=True):
    rank: int
    tensor: int
    pipeline: int
    pid: int


class EngineState(Body, kw_only=True):
    rank: int
    state: str
    version: str = ""
    """Of weights and limits."""
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
    """Times that workers were replaced, or that it woke up, since the start."""
    sleep_level: int = 0
    """0: it is awake."""
    freed_bytes: int = 0
    """Memory that its workers have given back while it sleeps."""
    workers: list[WorkerState] = []


class CoordinatorState(Body, kw_only=True):
    pid: int | None = None
    error: str | None = None
    """Why the engine does not answer; the other fields then have their last known values."""


class RescaleState(Body, kw_only=True):
    """`phase` is idle, pending (engines wait for room), prepare, commit, drain or failed; `error`
    says why it failed. A start that fails without a requested change is retried, ever more slowly.
    """

    phase: str
    error: str | None = None
    failures: int = 0
    """Consecutive failed starts of the missing engine."""
    next_try_s: float | None = None
    """Seconds until the next attempt; 0: one is running."""


class UpgradeState(Body, kw_only=True):
    """`phase` is idle, in progress, rolling back or failed (and rolled back), cancelling or
    cancelled; `error` says why it failed, and what does not start now."""

    phase: str = "idle"
    version: str = ""
    """Of which all engines are to be."""
    previous: str | None = None
    """The one that was wanted before, until no engine is of it."""
    model: str = ""
    """`model.path` of the version that is wanted."""
    error: str | None = None
    failures: int = 0
    """Consecutive failed starts of a version that is wanted, or by which answers have begun."""
    next_try_s: float | None = None
    """Seconds until the next attempt; 0: one is running."""


class LeftoverState(Body, kw_only=True):
    """Resources that ended engines may still hold in Ray: ending them is retried, ever more
    slowly."""

    names: list[str] = []
    """Names of the actors and placement groups that are known."""
    reason: str
    failures: int = 0
    """Consecutive failed attempts."""
    next_try_s: float = 0.0
    """Seconds until the next attempt; 0: one is running."""


class ScalingDecision(Body, kw_only=True):
    """The autoscaler has moved the target."""

    before: int
    engines: int
    reason: str
    age_s: float


class AutoscalingState(Body, kw_only=True):
    """The load that the autoscaler follows, and what it wants."""

    min_engines: int
    max_engines: int
    queue_s: float | None = None
    """How long a new request would wait for a slot; null, here and below: not known."""
    kv_usage: float | None = None
    """Share of the KV blocks in use, on average over the engines."""
    ttft_s: float | None = None
    """Time to first token of nine of ten requests of the last seconds."""
    recommended: int | None = None
    """Engines that this load wants. The target follows when it has wanted them for
    `autoscaling.grow_after_s`, or fewer for `shrink_after_s`."""
    reason: str
    shrink_after_s: float
    last_decision: ScalingDecision | None = None


class PendingEngines(Body, kw_only=True):
    """Engines that wait for room in the Ray cluster: their placement groups are there, so that
    Ray's autoscaler adds hosts for them."""

    ranks: list[int]
    reason: str
    bundles: list[dict[str, float]]
    """Ray resources that each of them asks for; a bundle must fit on one host."""


class DrainingNode(Body, kw_only=True):
    """A host that Ray takes away: its engines are replaced elsewhere, and leave."""

    node: str
    left_s: float | None = None
    """Seconds until it is taken away; null: not known."""
    engines: list[int] = []
    """Ranks of those that are there yet."""


class ClusterState(Body, kw_only=True):
    """`epoch` counts memberships, `wave` counts waves, `target` is the wanted number of engines;
    `state` is starting, serving, changing, paused, degraded (engines are missing, and starting them
    fails) or failed (none is left)."""

    epoch: int
    wave: int
    state: str
    target: int
    engines: list[EngineState]
    coordinator: CoordinatorState
    rescale: RescaleState
    upgrade: UpgradeState = msgspec.field(default_factory=UpgradeState)
    leftovers: LeftoverState | None = None
    """None: there are none."""
    autoscaling: AutoscalingState | None = None
    """None: it is off."""
    pending: PendingEngines | None = None
    """None: none waits for room."""
    draining_nodes: list[DrainingNode] = []


class Health(Body, kw_only=True):
    status: str = "ok"


class Readiness(Body, kw_only=True):
    """The ranks that take requests and can make progress; `coordinator` is ok or silent."""

    status: str = "ready"
    engines: list[int]
    coordinator: str = "ok"


class IdleEngine(Body, kw_only=True):
    """Whether all slots and blocks of an engine are free; if not, what is held."""

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
    """The name of the model itself: folders are not shown to users."""
    parent: str | None = None
    """Of an adapter: the model that it adapts."""
    max_model_len: int


class ModelList(Body, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class Version(Body, kw_only=True):
    version: str


class ServerLoad(Body, kw_only=True):
    """`server_load`: requests that run or wait in all engines, by their last reports."""

    server_load: int


class EngineLoad(Body, kw_only=True):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    kv_usage: float
    """Share of the KV blocks in use, 0 .. 1."""


class RequestStory(Body, kw_only=True):
    """One HTTP request, while it runs and for a while after its end."""

    id: str
    """Of the answer."""
    request_id: str
    """The header `x-request-id` of request and answer."""
    operation: str
    model: str
    running: bool
    ingress: int
    """Number of the ingress that serves it; the others have other ones."""
    timings: Timings


class RequestStories(Body, kw_only=True):
    """Requests that were sent under one id, oldest first."""

    requests: list[RequestStory]
    complete: bool = True
    """False: an ingress did not answer, and may know of more."""


class ServerInfo(Body, kw_only=True):
    """What a user may see of the server: no path, no host, no key. Operators use
    `/admin/cluster`."""

    version: str
    served_model_name: str
    context_length: int
    dtype: str
    dp_size: int
    """Engines that are here now."""
    tp_size: int
    pp_size: int
    max_running_requests: int
    """The limit of each engine."""
    internal_states: list[EngineLoad]
