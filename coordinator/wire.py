"""Messages between the coordinator, the engines and the ingresses: counts, never text or tokens.

Both directions are defined here, in the coordinator's package, which engines and ingresses import.
Every message of an engine carries its incarnation, so that a message of a dead engine is not
mistaken for one of its replacement. It also carries its epoch; a message of an epoch older than the
receiver's is dropped. The rules of the messages about waves are in `waves.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from swell.configs.lora import Adapter
from swell.coordinator.manager_state import ManagerState, ScalingCounts, Sleep
from swell.coordinator.roster import Member, Roster

# ---------------------------------------------------------------- ingresses

Counts = dict[str, list[float]]
"""Metric -> counts since the start of an ingress, which only increase."""
FIRST_TOKENS = "swell_time_to_first_token_seconds"
"""The metric that counts requests by their time to first token, with the sum of these times."""


class Subscribe(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """Subscribes an ingress to every `Publication`; repeated every `heartbeat_s`, else it
    expires."""

    client_index: int
    epoch: int = 0
    """The newest roster epoch that the ingress has seen: a restarted coordinator continues from
    there, and one with a newer roster sends it."""
    counts: Counts = {}
    """Counts of its requests. Unless empty, the answer is `OtherIngressCounts`."""
    versions: list[str] | None = None
    """Versions of the engines that began its unfinished answers; None: unchanged."""


class WorkerStatus(enum.IntEnum):
    """The state of a worker."""

    LOADING = 0
    READY = 1
    LOST = 2
    """The worker has died or stopped, and is not replaced yet."""


class WorkerReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker of an engine."""

    status: WorkerStatus
    pid: int
    """0: unknown, because its process is starting."""
    replaced: int = 0
    """Number of lost workers that had its rank before, since the start of the engine."""


class EngineReport(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """The load of an engine: sent within a deadline after a change, otherwise as a heartbeat."""

    rank: int
    incarnation: int = 0
    """A number that is unique to this start of the engine."""
    epoch: int = 0
    """The epoch of its group."""
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Number of tokens that are known but not computed."""
    kv_usage: float = 0.0
    steps: int = 0
    """Number of steps since the start."""
    progress_counter: int = 0
    """Number of steps and layers computed since the start: the measure of progress."""
    progress_at_forming: int = 0
    """Value of `progress_counter` when its group was formed: the engines of a group start together
    from there."""
    preemptions: int = 0
    prefix_queries: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Number of these tokens that were found."""
    wave: int = 0
    wave_phase: int = 0
    """A `wave_interface.Phase`, as a number."""
    pausing: bool = False
    """Whether it votes for a pause, or is paused."""
    waves: int = 0
    """Number of waves completed since the start."""
    dummy_steps: int = 0
    """Number of lockstep steps without rows."""
    sync_s: float = 0.0
    """Total time that steps waited for other engines, in seconds."""
    repairs: int = 0
    """How often workers were replaced, or the engine woke up, since the start."""
    resets: int = 0
    """How often its groups broke and were formed again."""
    nans_in_logits: int = 0
    """Number of requests that failed because their logits were NaN or infinite."""
    started_requests: int = 0
    """Number of requests whose computation has started, each counted once, since the start."""
    started_tokens: int = 0
    """Number of tokens that these requests had then."""
    roster_epoch: int = 0
    """The newest roster epoch that the engine had received when it made this report."""
    saved_blocks: int = 0
    """Number of KV blocks that were offloaded to host memory or disk, since the start."""
    loaded_blocks: int = 0
    """Number of KV blocks that were loaded back."""
    drafts: int = 0
    """Number of draft tokens that were verified, since the start."""
    accepted_drafts: int = 0
    """Number of draft tokens that were accepted."""
    adapters_loaded: int = 0
    """Number of adapters that its requests have used and that are in memory."""
    adapters_waited_for: int = 0
    """Number of requests that wait for an adapter."""
    adapter_loads: int = 0
    """Number of adapter loads by all of its workers since the start."""
    adapter_load_failures: int = 0
    """Number of adapter loads that failed."""
    sleep_level: int = 0
    """The sleep level, see `Sleep`."""
    wakes: int = 0
    """How often the engine woke up: included in `repairs`, although no worker was replaced."""
    expert_imbalance: float = 0.0
    """Imbalance of the experts that engines share, at the last check; 0: not measured
    (`docs/tune/experts.md`)."""
    freed_bytes: int = 0
    """Bytes that its workers have released while it sleeps."""
    is_repairing: bool = False
    """Whether it replaces a worker or wakes up: a coordinator that does not know `Broken` learns it
    here."""
    workers: tuple[WorkerReport, ...] = ()
    """The workers by rank."""
    hang_report: str = ""
    """See `Executor.hang_report`."""


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a report that an ingress uses for routing."""

    rank: int
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    steps: int = 0

    @classmethod
    def of(cls, report: EngineReport) -> EngineLoad:
        return cls(
            report.rank,
            report.running,
            report.waiting,
            report.waiting_tokens,
            report.kv_usage,
            report.steps,
        )

    def update(self, report: EngineReport) -> EngineReport:
        """Returns the report with this load."""
        return replace(
            report,
            running=self.running,
            waiting=self.waiting,
            waiting_tokens=self.waiting_tokens,
            kv_usage=self.kv_usage,
            steps=self.steps,
        )


class ClusterReports(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """State of the cluster besides its roster: sent every `heartbeat_s`."""

    epoch: int = 0
    """Epoch of the roster to which the reports belong."""
    engines: list[EngineReport] = []
    """The newest report of each engine, in the order of their ranks."""
    wave: int = 0
    state: str = "serving"
    """serving | pausing | paused | forming: state of the engines that share experts, or of all if
    paused."""
    stalls: int = 0
    """Number of engines that were found without progress."""
    commit_s: float = 0.0
    """For how long the last change of the group kept its engines from stepping, in seconds."""
    phase: str = "idle"
    """Phase of the manager's change of engines: idle | pending | prepare | commit | drain |
    failed."""
    scaling: ScalingCounts = ScalingCounts()
    adapters: tuple[Adapter, ...] = ()
    """Adapters that were loaded at run time."""
    sleep: Sleep = Sleep()
    cache_generation: int = 0
    """See `DesiredState`."""

    def with_loads(self, loads: Mapping[int, EngineLoad]) -> ClusterReports:
        """Returns the reports with these newer loads, by rank."""
        known = {rank: EngineReport(rank) for rank in loads}
        known |= {report.rank: report for report in self.engines}
        engines = [
            loads[rank].update(report) if rank in loads else report
            for rank, report in sorted(known.items())
        ]
        return replace(self, engines=engines)


class ClusterView(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """Everything that an ingress uses for routing: sent first, and with each new roster.

    It is followed by `EngineLoads` of engines whose load has changed, and every `heartbeat_s` by
    `ClusterReports` of all. Both carry the roster's epoch: an ingress that has missed the roster
    reports this with its next `Subscribe`, and receives a whole view again.
    """

    roster: Roster
    reports: ClusterReports = ClusterReports()


class EngineLoads(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """The loads that have changed."""

    epoch: int
    """Epoch of the roster."""
    loads: list[EngineLoad]


class OtherIngressCounts(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """The answer to a `Subscribe` with counts: the sums over all other ingresses, also past
    ones."""

    counts: Counts


Publication = ClusterView | ClusterReports | EngineLoads

IngressMessage = Publication | OtherIngressCounts


# ---------------------------------------------------------------- engine -> coordinator


class EngineHello(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """Introduces an engine: sent at its start, and as the answer to `Introduce`."""

    member: Member
    epoch: int = 0
    """The epoch of its group; 0 if it was in no group yet."""
    ranks: list[int] = []
    """Ranks of the group, in order."""
    wave: int = 0
    phase: int = 0
    """A `wave_interface.Phase`, as a number."""
    pause_number: int = 0
    """Number of the newest `Pause` of this epoch."""
    roster_epoch: int = 0
    """The newest roster epoch that a coordinator has sent it: a restarted one continues from
    there."""
    manager_state: ManagerState = ManagerState()
    """The newest state that a coordinator has sent it."""


class GroupMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message of one engine about its group."""

    rank: int
    incarnation: int
    epoch: int
    """Epoch of its group; the coordinator drops the message if its own epoch differs."""


class StartWave(GroupMessage, frozen=True, tag=3, array_like=True, gc=False):
    """A stopped engine has work and has started wave `wave` of `epoch`."""

    wave: int


class WaveComplete(GroupMessage, frozen=True, tag=4, array_like=True, gc=False):
    """No engine has work; sent by the group's first engine."""

    wave: int


class Paused(GroupMessage, frozen=True, tag=5, array_like=True, gc=False):
    """The vote was unanimous; no step of this engine is in flight."""

    number: int = 0
    """Number of the newest `Pause` that it has received."""


class Joined(GroupMessage, frozen=True, tag=6, array_like=True, gc=False):
    """The engine is in the group of `epoch` and waits for `Resume`."""


class Broken(GroupMessage, frozen=True, tag=7, array_like=True, gc=False):
    """The engine's groups have failed; it keeps its requests and weights.

    `repairing`: one of its own workers was lost, and it stays out of the group until `Repaired`.
    """

    reason: str = ""
    repairing: bool = False
    absent: list[int] = []
    """Ranks of engines that did not join the group, or that it cannot reach."""


class Repaired(msgspec.Struct, frozen=True, tag=8, array_like=True, gc=False):
    """All workers of the engine are running again."""

    rank: int
    incarnation: int
    store: tuple[str, int] | None = None
    """The new `Member.store`, which may have moved."""


CoordinatorMessage = (
    Subscribe
    | EngineReport
    | EngineHello
    | StartWave
    | WaveComplete
    | Paused
    | Joined
    | Broken
    | Repaired
)


# ---------------------------------------------------------------- coordinator -> engine


class StartDPWave(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """Another engine has started wave `wave`."""

    epoch: int
    wave: int


class Pause(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """Vote for a pause, and keep stepping until all do. An engine without a group stops
    immediately."""

    epoch: int
    number: int = 0
    """Number of the pause within its epoch."""


class Resume(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """Step again, or withdraw the vote for a pause."""

    epoch: int


class ReconfigureDistributedRequest(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """Leave the group in any state, and form the group of `epoch` with these ranks, in order.

    Answered by `Joined` or `Broken`. An engine that is not listed stays out until the next request.
    """

    epoch: int
    ranks: list[int]
    wave: int = 0
    """The wave with which the group starts."""
    store: tuple[str, int] | None = None
    """Address of the store at which the workers meet; None for a single engine."""
    coordinator: int = 0
    """Random number of the coordinator that sends it. An earlier coordinator may have sent the same
    epoch to engines that are lost, and left keys of that group in the store."""


class Introduce(msgspec.Struct, frozen=True, tag=4, array_like=True, gc=False):
    """Send `EngineHello`: the coordinator does not know this engine."""


class CoordinatorHeartbeat(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """The state that engines store for the next coordinator: they send it in `EngineHello`.

    Sent after changes and periodically: an engine that receives nothing for `stall_timeout_s`
    searches for the coordinator (`finder.py`).
    """

    roster_epoch: int
    manager_state: ManagerState
    load_report_s: float = 0.0
    """Minimum time between two reports of one engine, which increases with the number of
    engines."""


EngineCommand = (
    StartDPWave | Pause | Resume | ReconfigureDistributedRequest | Introduce | CoordinatorHeartbeat
)
