"""Compares two observations of a cluster: names what happened between them, and computes the rates
and quantiles of the requests. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from swell.cluster.api.admin.live_protocol import LiveRates
from swell.cluster.api.admin.protocol import ClusterState
from swell.cluster.client.metrics import FIRST_TOKEN_BOUNDS_S, TOKEN_BOUNDS_S
from swell.coordinator.roster import MemberState, Roster
from swell.coordinator.wire import FIRST_TOKENS, Counts, EngineReport, WorkerStatus

_INTER_TOKEN = "swell_inter_token_latency_seconds"
_PROMPT, _GENERATED = "swell_prompt_tokens", "swell_generation_tokens"
_FINISHED = "swell_request_success"

Found = Iterator[tuple[str, str]]
"""(kind, text) of each entry of the log."""


class Observation(msgspec.Struct, frozen=True):
    """The cluster at one moment."""

    roster: Roster
    reports: tuple[EngineReport, ...]
    cluster: ClusterState | None
    manager_answers: bool
    coordinator_answers: bool
    moved_requests: int
    """Number of requests that moved to another engine, since the start."""


def coordinator_answers(cluster: ClusterState | None, before: bool, *, is_silent: bool) -> bool:
    """Returns whether the coordinator answers. `cluster`: the manager's answer, if it answers.
    `before`: the previous result, which stays if nobody knows better. `is_silent`: it has sent
    nothing to this ingress for long."""
    if is_silent:
        return False
    return before if cluster is None else cluster.coordinator.error is None


def happened(before: Observation, after: Observation) -> Found:
    yield from _members(before.roster, after.roster)
    yield from _workers(before, after)
    moved = after.moved_requests - before.moved_requests
    if moved > 0:
        yield "moved", f"{moved} request{'s' if moved > 1 else ''} moved to another engine"
    yield from _sleep(before.reports, after.reports)
    yield from _contacts(before, after)
    if before.cluster is not None and after.cluster is not None:
        yield from _successor(before, after)
        yield from _changes(before.cluster, after.cluster)


def _members(before: Roster, after: Roster) -> Found:
    was = {member.incarnation: member for member in before.members}
    now = {member.incarnation: member for member in after.members}
    for incarnation, member in was.items():
        if incarnation not in now:
            left = incarnation in after.left
            yield (
                ("left", f"engine {member.rank} left")
                if left
                else (
                    "died",
                    f"engine {member.rank} was lost",
                )
            )
    for incarnation, member in now.items():
        known = was.get(incarnation)
        if known is None:
            version = f" with version {member.version}" if member.version else ""
            yield "joined", f"engine {member.rank} joined{version}"
        elif known.state is not member.state:
            yield "changed", f"engine {member.rank} {_STATES[member.state]}"


def _workers(before: Observation, after: Observation) -> Found:
    was = {report.incarnation: report.workers for report in before.reports}
    for report in after.reports:
        pairs = zip(was.get(report.incarnation, ()), report.workers, strict=False)
        for rank, (old, new) in enumerate(pairs):
            name = f"worker {rank} of engine {report.rank}"
            is_other = new.replaced > old.replaced
            is_lost = old.status is WorkerStatus.LOST
            if (is_other and not is_lost) or (new.status is WorkerStatus.LOST and not is_lost):
                yield "died", f"{name} was lost"
            was_ready = old.status is WorkerStatus.READY and not is_other
            if new.replaced and new.status is WorkerStatus.READY and not was_ready:
                yield "joined", f"{name} was replaced by process {new.pid}"


_STATES = {
    MemberState.ACTIVE: "accepts requests again",
    MemberState.LEAVING: "finishes its requests and leaves",
    MemberState.REPAIRING: "replaces a worker",
}


def _contacts(before: Observation, after: Observation) -> Found:
    contacts = (
        ("coordinator", before.coordinator_answers, after.coordinator_answers),
        ("manager", before.manager_answers, after.manager_answers),
    )
    for name, answered, answers in contacts:
        if answered and not answers:
            yield "lost", f"the {name} does not answer; serving continues"
        if answers and not answered:
            yield "found", f"the {name} answers again"


def _sleep(before: Sequence[EngineReport], after: Sequence[EngineReport]) -> Found:
    if before and after:
        slept, sleeps = (any(report.sleep_level for report in one) for one in (before, after))
        if slept != sleeps:
            yield "changed", "the engines sleep" if sleeps else "the engines are awake"


def _successor(before: Observation, after: Observation) -> Found:
    """Names a coordinator that has replaced another one."""
    assert before.cluster is not None and after.cluster is not None
    pid = after.cluster.coordinator.pid
    if pid is None or pid == before.cluster.coordinator.pid:
        return
    if before.coordinator_answers and after.coordinator_answers:  # nobody noticed its absence
        yield "lost", "the coordinator was lost; serving went on"
    yield "found", f"another coordinator runs, as process {pid}"


def _changes(before: ClusterState, after: ClusterState) -> Found:
    if before.target != after.target:
        yield "changed", f"the target is {after.target} engines, before {before.target}"
    if before.state != after.state:
        yield "changed", f"the cluster is {after.state}, before {before.state}"
    if after.rescale.error and before.rescale.error != after.rescale.error:
        yield "lost", f"a change failed: {after.rescale.error}"
    if before.upgrade.phase != after.upgrade.phase:
        yield "upgraded", f"upgrade to version {after.upgrade.version}: {after.upgrade.phase}"


def rates_between(
    before: Counts, after: Counts, at: float, elapsed_s: float, reports: Sequence[EngineReport]
) -> LiveRates:
    """`before` and `after` are counts that only increase; `elapsed_s` passed between them."""

    def increase(name: str) -> list[float]:
        new = after.get(name, [])
        old = before.get(name, new)  # unknown: the whole count would look like an increase
        # ingresses of two releases may count in other buckets
        return [max(0.0, one - other) for one, other in zip(new, old, strict=False)]

    first, between = increase(FIRST_TOKENS), increase(_INTER_TOKEN)
    return LiveRates(
        at=at,
        prompt_tokens_per_s=round(sum(increase(_PROMPT)) / elapsed_s, 2),
        tokens_per_s=round(sum(increase(_GENERATED)) / elapsed_s, 2),
        requests_per_s=round(sum(increase(_FINISHED)) / elapsed_s, 2),
        running=sum(report.running for report in reports),
        waiting=sum(report.waiting for report in reports),
        ttft_p50_s=quantile(first[:-1], FIRST_TOKEN_BOUNDS_S, 0.5),
        ttft_p99_s=quantile(first[:-1], FIRST_TOKEN_BOUNDS_S, 0.99),
        itl_p50_s=quantile(between[:-1], TOKEN_BOUNDS_S, 0.5),
        itl_p99_s=quantile(between[:-1], TOKEN_BOUNDS_S, 0.99),
    )


def quantile(buckets: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """Returns the value below which `share` of the values of a histogram lie, interpolated in its
    bucket. Returns None if there are no values. A value above all bounds counts as the last bound.
    """
    left = sum(buckets) * share
    if left <= 0:
        return None
    low = 0.0
    for number, high in zip(buckets, bounds, strict=False):
        if number and number >= left:
            return round(low + (high - low) * left / number, 6)
        left -= number
        low = high
    return low
