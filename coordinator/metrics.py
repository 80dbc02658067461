"""The Prometheus metrics of the cluster: every engine in the coordinator's view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swell.coordinator.scaling_counts import ScalingCounts, UpgradeStatus
from swell.coordinator.wire import ClusterView, EngineReport

# swell_sync_seconds only increases, but as a counter its name would be swell_sync_seconds_total.
_GAUGES: dict[str, tuple[str, Callable[[EngineReport], float]]] = {
    "swell_num_requests_running": ("Requests that hold a slot.", lambda r: r.running),
    "swell_num_requests_waiting": ("Requests that wait for a slot.", lambda r: r.waiting),
    "swell_kv_cache_usage_ratio": ("Share of KV blocks held.", lambda r: r.kv_usage),
    "swell_adapters_loaded": (
        "Adapters in memory that requests have used.",
        lambda r: r.adapters_loaded,
    ),
    "swell_num_requests_waiting_for_adapters": (
        "Requests that wait for their adapter.",
        lambda r: r.adapters_waited_for,
    ),
    "swell_engine_sleep_level": (
        "How deeply the engine sleeps; 0: it is awake.",
        lambda r: r.sleep_level,
    ),
    "swell_expert_imbalance": (
        "What the busiest worker computes of shared experts, over the mean.",
        lambda r: r.expert_imbalance,
    ),
    "swell_sync_seconds": ("Time that steps waited for other engines.", lambda r: r.sync_s),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineReport], float]]] = {
    "swell_engine_steps": ("Steps done.", lambda r: r.steps),
    "swell_num_preemptions": ("Requests that lost their blocks.", lambda r: r.preemptions),
    "swell_prefix_cache_queries": (
        "Prompt tokens looked up, once a request.",
        lambda r: r.prefix_queries,
    ),
    "swell_prefix_cache_hits": ("Prompt tokens found.", lambda r: r.prefix_hits),
    "swell_kv_offload_saved_blocks": (
        "KV blocks that left the device for host memory or disk.",
        lambda r: r.saved_blocks,
    ),
    "swell_kv_offload_loaded_blocks": (
        "KV blocks that came back to the device.",
        lambda r: r.loaded_blocks,
    ),
    "swell_draft_tokens": ("Tokens guessed and computed ahead.", lambda r: r.drafts),
    "swell_accepted_draft_tokens": ("Those of them that were right.", lambda r: r.accepted_drafts),
    "swell_waves": ("Waves completed.", lambda r: r.waves),
    "swell_dummy_steps": ("Lockstep steps without rows.", lambda r: r.dummy_steps),
    "swell_engine_repairs": ("Workers replaced.", lambda r: r.repairs - r.wakes),
    "swell_engine_wakes": ("Times that it woke up from sleep.", lambda r: r.wakes),
    "swell_engine_resets": ("Times that groups broke.", lambda r: r.resets),
    "swell_nan_logits": (
        "Requests that ended because logits were NaN or infinite.",
        lambda r: r.nans_in_logits,
    ),
    "swell_adapter_loads": ("Adapters loaded.", lambda r: r.adapter_loads),
    "swell_adapter_load_failures": (
        "Adapters that could not be loaded.",
        lambda r: r.adapter_load_failures,
    ),
}
_PHASES = ("idle", "pending", "prepare", "commit", "drain", "failed")
_UPGRADE_PHASES = ("idle", "in progress", "rolling back", "failed", "cancelling", "cancelled")


class ViewCollector(Collector):
    """Exports the newest view when it is scraped; costs nothing in between."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield GaugeMetricFamily("swell_epoch", "Epoch of the roster.", view.roster.epoch)
        yield GaugeMetricFamily("swell_wave", "Current wave.", view.wave)
        yield GaugeMetricFamily("swell_engines", "Engines.", len(view.roster.members))
        yield GaugeMetricFamily(
            "swell_adapters", "Names of adapters loaded by operators.", len(view.adapters)
        )
        yield GaugeMetricFamily(
            "swell_rescale_commit_seconds",
            "How long the last change kept engines from stepping.",
            view.commit_s,
        )
        yield CounterMetricFamily(
            "swell_engine_stalls", "Engines found to have stopped.", view.stalls
        )
        text = "1 for the phase of the change of engines."
        yield _phases("swell_rescale_phase", text, _PHASES, view.phase)
        yield from _scaling(view.scaling)
        yield from _upgrades(view.scaling.upgrade)
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["engine"])
            for report in view.reports:
                gauge.add_metric([str(report.rank)], read(report))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["engine"])
            for report in view.reports:
                counter.add_metric([str(report.rank)], read(report))
            yield counter


def _phases(name: str, text: str, phases: Sequence[str], current: str) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=["phase"])
    for phase in phases:
        gauge.add_metric([phase], float(phase == current))
    return gauge


def _upgrades(status: UpgradeStatus) -> Iterator[Metric]:
    text = "1 for the phase of the upgrade."
    yield _phases("swell_upgrade_phase", text, _UPGRADE_PHASES, status.phase)
    ended = CounterMetricFamily("swell_upgrades", "Upgrades that ended so.", labels=["result"])
    ended.add_metric(["done"], status.done)
    ended.add_metric(["failed"], status.failed)
    ended.add_metric(["cancelled"], status.cancelled)
    yield ended


def _scaling(counts: ScalingCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("swell_engines_target", "Engines wanted.", counts.target)
    yield GaugeMetricFamily(
        "swell_engines_pending", "Engines that wait for room in the Ray cluster.", counts.pending
    )
    yield GaugeMetricFamily(
        "swell_draining_nodes",
        "Hosts with engines that Ray will take away.",
        counts.draining_nodes,
    )
    decisions = CounterMetricFamily(
        "swell_autoscaler_decisions",
        "Changes of the target by the autoscaler.",
        labels=["direction"],
    )
    decisions.add_metric(["grow"], counts.grows)
    decisions.add_metric(["shrink"], counts.shrinks)
    yield decisions
