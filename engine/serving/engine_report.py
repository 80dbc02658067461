"""Builds what an engine reports to the coordinator about itself, and decides when it does. Pure."""

from __future__ import annotations

from swell.configs.schema import ClusterConfig
from swell.coordinator.roster import Member
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import EngineReport, WorkerReport
from swell.engine.core import EngineCore


def member_of(
    core: EngineCore, rank: int, incarnation: int, address: ChannelAddress, version: str
) -> Member:
    """Returns the engine as the roster lists it."""
    limits = core.limits
    return Member(
        rank,
        address,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        incarnation=incarnation,
        store=core.executor.store,
        num_blocks=limits.num_blocks,
        version=version,
        numerics=limits.numerics,
    )


def worker_reports(core: EngineCore) -> tuple[WorkerReport, ...]:
    """Returns the state of the workers by rank; may be called from any thread."""
    return tuple(worker.report for worker in core.executor.workers())


def report_of(
    core: EngineCore,
    *,
    rank: int,
    incarnation: int,
    progress_at_forming: int,
    repairs: int,
    resets: int,
    roster_epoch: int,
    is_repairing: bool = False,
) -> EngineReport:
    """Returns the current load, progress and counters of the engine. `progress_at_forming`:
    progress when it joined its group. `repairs`, `resets`: how often workers were replaced, and
    groups broke. `roster_epoch`: the newest that a coordinator has sent. `is_repairing`: whether it
    replaces a worker or wakes up."""
    scheduler, member = core.scheduler, core.wave_member
    return EngineReport(
        rank=rank,
        incarnation=incarnation,
        epoch=member.epoch,
        running=len(scheduler.running),
        waiting=scheduler.num_waiting + core.adapters.num_held,
        waiting_tokens=scheduler.waiting_tokens() + core.adapters.waiting_tokens(),
        kv_usage=scheduler.kv.usage,
        steps=core.num_steps,
        progress_counter=core.progress,
        progress_at_forming=progress_at_forming,
        preemptions=scheduler.num_preemptions,
        prefix_queries=scheduler.kv.num_queried_tokens,
        prefix_hits=scheduler.kv.num_hit_tokens,
        wave=member.wave,
        wave_phase=int(member.phase),
        pausing=member.voting,
        waves=core.num_waves,
        dummy_steps=core.num_dummy_steps,
        sync_s=core.sync_s,
        repairs=repairs,
        resets=resets,
        nans_in_logits=scheduler.num_nans_in_logits,
        started_requests=scheduler.num_started_requests,
        started_tokens=scheduler.num_started_tokens,
        roster_epoch=roster_epoch,
        saved_blocks=scheduler.kv.offload.num_saved,
        loaded_blocks=scheduler.kv.offload.num_loaded,
        drafts=scheduler.drafter.num_drafts,
        accepted_drafts=scheduler.drafter.num_accepted,
        adapters_loaded=core.adapters.num_loaded,
        adapters_waited_for=core.adapters.num_held,
        adapter_loads=core.adapters.num_loads,
        adapter_load_failures=core.adapters.num_failures,
        sleep_level=core.memory.sleep_level,
        wakes=core.memory.num_wakes,
        expert_imbalance=core.expert_imbalance,
        hang_report=core.executor.hang_report,
        freed_bytes=core.memory.freed_bytes,
        is_repairing=is_repairing,
        workers=worker_reports(core),
    )


class LoadReporter:
    """Decides when a report is due: within a deadline after a change, otherwise as a heartbeat."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._changed = False
        self._last_at = -1e9

    def changed(self) -> None:
        """Records that something has happened that is not in the last report."""
        self._changed = True

    def reported(self, now: float) -> None:
        self._changed, self._last_at = False, now

    def wait_s(self, now: float, requested_s: float = 0.0) -> float:
        """Returns the time until a report is due: for this long an idle engine may sleep.
        `requested_s`: the interval that the coordinator requests; with many engines, it is longer
        than the configured one."""
        config = self._config
        period_s = config.heartbeat_s
        if self._changed:
            period_s = min(max(config.load_report_s, requested_s), period_s)
        left_s = self._last_at + period_s - now
        return left_s if left_s > 0.0 else 0.0
