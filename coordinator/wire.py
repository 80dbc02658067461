"""Messages between the coordinator, the engines and the ingresses: counts, never text or tokens.

Both directions are defined here, because both are the coordinator's: engines and ingresses import
it. Every message of an engine carries its incarnation, so that nothing a dead engine sent is taken
for its successor's, and its epoch; a message of an older epoch than the receiver's is dropped. The
rules of the messages about waves are in `waves.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import astuple, replace

from swell.configs.lora import Adapter
from swell.coordinator.manager_state import ManagerState, Sleep
from swell.coordinator.roster import Member, Roster
from swell.coordinator.scaling_counts import ScalingCounts

# ---------------------------------------------------------------- ingresses

Counts = dict[str, list[float]]
"""Counts since the start of an ingress: numbers that only grow, by metric."""
FIRST_TOKENS = "swell_time_to_first_token_seconds"
"""Of them, the requests by their time to first token, and the sum of these times."""


class Subscribe(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """An ingress wants every `Publication`; repeated every `heartbeat_s`, else it is forgotten."""

    client_index: int
    epoch: int = 0
    """The newest roster that it has seen: a restarted coordinator goes on from there, and one that
    has a newer one sends it."""
    counts: Counts = {}
    """Of its requests. Unless empty, the answer is `OtherIngressCounts`."""
    versions: list[str] | None = None
    """Of engines by which its unfinished answers have begun; None: as it said before."""


class EngineReport(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """The load of an engine: sent on change within a deadline, else as a heartbeat."""

    rank: int
    incarnation: int = 0
    """A number that only this start of the engine has."""
    epoch: int = 0
    """Of its group."""
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Tokens known but not computed."""
    kv_usage: float = 0.0
    steps: int = 0
    """Steps done since the start."""
    progress_counter: int = 0
    """Steps and layers computed since the start: the measure of progress."""
    progress_at_forming: int = 0
    """Of it, what was before its group had formed: those of one group began together then."""
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those that were found."""
    wave: int = 0
    wave_phase: int = 0
    """A `waves.Phase`, as a number."""
    pausing: bool = False
    """It votes for a pause, or is paused."""
    waves: int = 0
    """Waves completed since the start."""
    dummy_steps: int = 0
    """Lockstep steps without rows."""
    sync_s: float = 0.0
    """Seconds that steps waited for other engines, in all."""
    repairs: int = 0
    """Times that workers were replaced, or that it woke up, since the start."""
    resets: int = 0
    """Times that its groups broke and were formed again."""
    nans_in_logits: int = 0
    """Requests that ended because their logits were NaN or infinite."""
    started_requests: int = 0
    """Requests whose computation has begun, each once, since the start."""
    started_tokens: int = 0
    """Tokens that they had then."""
    roster_epoch: int = 0
    """The newest roster that a coordinator had named to it: it has requests of none before."""
    saved_blocks: int = 0
    """KV blocks that left the device for host memory or disk, since the start."""
    loaded_blocks: int = 0
    """Those that came back."""
    drafts: int = 0
    """Tokens that were guessed and computed ahead, since the start."""
    accepted_drafts: int = 0
    """Those of them that were right."""
    adapters_loaded: int = 0
    """Adapters that its requests have used, and that are in memory."""
    adapters_waited_for: int = 0
    """Requests that wait for an adapter."""
    adapter_loads: int = 0
    """Adapters that all of its workers loaded since the start, each time."""
    adapter_load_failures: int = 0
    """Those that they could not load."""
    sleep_level: int = 0
    """See `Sleep`."""
    wakes: int = 0
    """Those of the `repairs` that replaced no worker: it woke up."""
    expert_imbalance: float = 0.0
    """Of the experts that engines share, at the last look; 0: none (`docs/operate/experts.md`)."""
    freed_bytes: int = 0
    """Memory that its workers have given back while it sleeps."""


class EngineLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a report by which an ingress routes."""

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
        """The report with this load."""
        return replace(
            report,
            running=self.running,
            waiting=self.waiting,
            waiting_tokens=self.waiting_tokens,
            kv_usage=self.kv_usage,
            steps=self.steps,
        )


class ClusterView(msgspec.Struct, frozen=True, tag=0, array_like=True, gc=False):
    """Everything that an ingress routes by: the first message to it, and with each new roster.

    Then come `EngineLoads` of those that have changed, and every `heartbeat_s` `ClusterReports` of
    all. Both name the roster's epoch: an ingress that has missed it says so with its next
    `Subscribe`, and gets the whole again.
    """

    roster: Roster
    reports: list[EngineReport] = []
    wave: int = 0
    state: str = "serving"
    """serving | pausing | paused | forming: of the engines that share experts, or all if paused."""
    stalls: int = 0
    """Engines that were found without progress."""
    commit_s: float = 0.0
    """How long the last change of the group kept its engines from stepping, in seconds."""
    phase: str = "idle"
    """Of the manager's change of engines: idle | pending | prepare | commit | drain | failed."""
    scaling: ScalingCounts = ScalingCounts()
    adapters: tuple[Adapter, ...] = ()
    """Those that came while the server ran."""
    sleep: Sleep = Sleep()

    def with_loads(self, loads: Mapping[int, EngineLoad]) -> ClusterView:
        """The view after these newer loads, by rank."""
        known = {rank: EngineReport(rank) for rank in loads}
        known |= {report.rank: report for report in self.reports}
        reports = [
            loads[rank].update(report) if rank in loads else report
            for rank, report in sorted(known.items())
        ]
        return replace(self, reports=reports)


class ClusterReports(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """A `ClusterView` with the roster that is known."""

    epoch: int
    """Of that roster."""
    reports: list[EngineReport] = []
    wave: int = 0
    state: str = "serving"
    stalls: int = 0
    commit_s: float = 0.0
    phase: str = "idle"
    scaling: ScalingCounts = ScalingCounts()
    adapters: tuple[Adapter, ...] = ()
    sleep: Sleep = Sleep()

    @classmethod
    def of(cls, view: ClusterView) -> ClusterReports:
        return cls(view.roster.epoch, *astuple(view)[1:])

    def view(self, roster: Roster) -> ClusterView:
        """The whole, with the roster of this epoch."""
        return ClusterView(roster, *astuple(self)[1:])


class EngineLoads(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """The loads that have changed."""

    epoch: int
    """Of the roster."""
    loads: list[EngineLoad]


class OtherIngressCounts(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """Answers a `Subscribe` with counts: the sums over all other ingresses, past ones too."""

    counts: Counts


Publication = ClusterView | ClusterReports | EngineLoads

IngressMessage = Publication | OtherIngressCounts


# ---------------------------------------------------------------- the manager's state


# ---------------------------------------------------------------- engine -> coordinator


class EngineHello(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """An engine introduces itself: at its start, and as the answer to `Introduce`."""

    member: Member
    epoch: int = 0
    """Of its group; 0 if it was in none yet."""
    ranks: list[int] = []
    """The group, in order."""
    wave: int = 0
    phase: int = 0
    """A `waves.Phase`, as a number."""
    pause_number: int = 0
    """Of the newest `Pause` of this epoch."""
    roster_epoch: int = 0
    """The newest that a coordinator has sent it: a restarted one goes on from there."""
    manager_state: ManagerState = ManagerState()
    """The newest that it was sent."""


class GroupMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message of one engine about its group."""

    rank: int
    incarnation: int
    epoch: int
    """Of its group; the coordinator drops the message if its own differs."""


class StartWave(GroupMessage, frozen=True, tag=3, array_like=True, gc=False):
    """A stopped engine has work and began wave `wave` of `epoch`."""

    wave: int


class WaveComplete(GroupMessage, frozen=True, tag=4, array_like=True, gc=False):
    """No engine has work; sent by the group's first engine."""

    wave: int


class Paused(GroupMessage, frozen=True, tag=5, array_like=True, gc=False):
    """The vote was unanimous; this engine has no step in flight."""

    number: int = 0
    """Of the newest `Pause` that it has received."""


class Joined(GroupMessage, frozen=True, tag=6, array_like=True, gc=False):
    """The engine is in the group of `epoch` and waits for `Resume`."""


class Broken(GroupMessage, frozen=True, tag=7, array_like=True, gc=False):
    """The engine's groups have failed; it keeps its requests and weights.

    `repairing`: one of its own workers was lost, and it stays out of the group until `Repaired`.
    """

    reason: str = ""
    repairing: bool = False
    absent: list[int] = []
    """Ranks of engines that did not come to the group, or that it cannot reach."""


class Repaired(msgspec.Struct, frozen=True, tag=8, array_like=True, gc=False):
    """All workers of the engine run again."""

    rank: int
    incarnation: int
    store: tuple[str, int] | None = None
    """`Member.store`, which may have moved."""


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
    """Another engine has begun wave `wave`."""

    epoch: int
    wave: int


class Pause(msgspec.Struct, frozen=True, tag=1, array_like=True, gc=False):
    """Vote for a pause, and keep stepping until all do. An engine without a group stops alone."""

    epoch: int
    number: int = 0
    """Counts the pauses of an epoch."""


class Resume(msgspec.Struct, frozen=True, tag=2, array_like=True, gc=False):
    """Step again; or withdraw the vote."""

    epoch: int


class ReconfigureDistributedRequest(msgspec.Struct, frozen=True, tag=3, array_like=True, gc=False):
    """Leave the group, whatever it is doing, and form that of `epoch` with these ranks, in order.

    Answered by `Joined` or `Broken`. An engine that is not listed stays out until the next one.
    """

    epoch: int
    ranks: list[int]
    wave: int = 0
    """The wave at which the group begins."""
    store: tuple[str, int] | None = None
    """Where the workers meet; None if there is one engine."""
    coordinator: int = 0
    """A number of the coordinator that commands it. One before it may have named the same epoch to
    engines that are lost, and keys of that group may be left in the store."""


class Introduce(msgspec.Struct, frozen=True, tag=4, array_like=True, gc=False):
    """Send `EngineHello`: the coordinator does not know this engine."""


class CoordinatorHeartbeat(msgspec.Struct, frozen=True, tag=5, array_like=True, gc=False):
    """What engines keep for the next coordinator: they send it in `EngineHello`.

    Sent when it changes, and repeated: an engine that receives nothing for `stall_timeout_s` looks
    for the coordinator (`finder.py`).
    """

    roster_epoch: int
    manager_state: ManagerState
    load_report_s: float = 0.0
    """The least time between two reports of one engine: there are many of them."""


EngineCommand = (
    StartDPWave | Pause | Resume | ReconfigureDistributedRequest | Introduce | CoordinatorHeartbeat
)
