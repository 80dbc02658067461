"""Events of `GET /admin/events`: what changes in a cluster from second to second."""

from __future__ import annotations

from swell.cluster.api.admin.protocol import ClusterState
from swell.cluster.api.bodies.protocol_base import Body


class LiveWorker(Body, kw_only=True):
    """A worker, as its engine reports it to the coordinator."""

    status: str
    """loading, ready, or lost: it has died or stopped, and is not replaced yet."""
    pid: int | None
    """None: its process is starting."""
    replaced: int
    """Number of lost workers that had its rank before, since the start of the engine."""


class LiveEngine(Body, kw_only=True):
    """An engine as this ingress sees it, also while the manager is away."""

    rank: int
    state: str
    """active, leaving or repairing."""
    running: int
    waiting: int
    kv_usage: float
    """Share of the KV blocks in use, 0 .. 1."""
    steps: int
    prefix_queries: int
    """Number of prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int
    preemptions: int
    epoch: int
    wave: int
    version: str
    sleep_level: int
    """0: the engine is awake; see `/admin/sleep`."""
    workers: list[LiveWorker]
    """The workers by rank; empty before the first report of the engine."""


class LiveRates(Body, kw_only=True):
    """The requests of all ingresses since the sample before. Times are null if nothing was
    measured."""

    at: float
    """Seconds since 1970."""
    prompt_tokens_per_s: float
    tokens_per_s: float
    requests_per_s: float
    """Requests that finished."""
    running: int
    waiting: int
    ttft_p50_s: float | None = None
    """The median of the time to first token."""
    ttft_p99_s: float | None = None
    itl_p50_s: float | None = None
    """The median of the time between two tokens."""
    itl_p99_s: float | None = None


class LogEntry(Body, kw_only=True):
    """Something that happened. `kind` is joined, left, died, moved, upgraded, changed, lost or
    found."""

    at: float
    kind: str
    text: str


class RecentRequest(Body, kw_only=True):
    """A request of this ingress; `GET /admin/requests/ID` has its timeline."""

    id: str
    operation: str
    model: str
    received_at: float
    duration_s: float
    running: bool
    ranks: list[int]
    """Ranks of the engines that it was placed on, in order."""


class LiveEvent(Body, kw_only=True):
    """The state of the cluster, and what is new since the event before. The first event of a stream
    has what this ingress has kept: samples of up to an hour, taken while a stream was open."""

    at: float
    ingress: int
    cluster: ClusterState | None
    """The newest answer of the manager; null: there was none yet."""
    cluster_at: float | None = None
    """The time of that answer."""
    manager_error: str | None
    """Why the manager did not answer the last call; null: it did, or the first call is in
    progress."""
    coordinator_answers: bool
    """False: this ingress has received nothing from the coordinator for `cluster.stall_timeout_s`,
    or it does not answer the manager."""
    not_ready: str | None
    """Why no engine can make progress."""
    engines: list[LiveEngine]
    rates: list[LiveRates]
    log: list[LogEntry]
    requests: list[RecentRequest]
    """The newest requests of this ingress, newest first."""
