"""The Prometheus metrics of the cluster: every engine in the coordinator's view."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swell.coordinator.wire import ClusterView, EngineReport, ScalingCounts

# swell_sync_seconds only grows; a counter would be called swell_sync_seconds_total.
_GAUGES: dict[str, tuple[str, Callable[[EngineReport], float]]] = {
    "swell_num_requests_running": ("Requests that hold a slot.", lambda r: r.running),
    "swell_num_requests_waiting": ("Requests that wait for a slot.", lambda r: r.waiting),
    "swell_kv_cache_usage_ratio": ("Share of KV blocks held.", lambda r: r.kv_usage),
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
    "swell_waves": ("Waves completed.", lambda r: r.waves),
    "swell_dummy_steps": ("Lockstep steps without rows.", lambda r: r.dummy_steps),
    "swell_engine_repairs": ("Workers replaced.", lambda r: r.repairs),
    "swell_engine_resets": ("Times that groups broke.", lambda r: r.resets),
    "swell_nan_logits": (
        "Requests that ended because logits were NaN or infinite.",
        lambda r: r.nans_in_logits,
    ),
}
_PHASES = ("idle", "pending", "prepare", "commit", "drain", "failed")


class ViewCollector(Collector):
    """Reads the newest view when it is scraped; costs nothing in between."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        view = self._view()
        yield GaugeMetricFamily("swell_epoch", "Epoch of the roster.", view.roster.epoch)
        yield GaugeMetricFamily("swell_wave", "Current wave.", view.wave)
        yield GaugeMetricFamily("swell_engines", "Engines.", len(view.roster.members))
        yield GaugeMetricFamily(
            "swell_rescale_commit_seconds",
            "How long the last change kept engines from stepping.",
            view.commit_s,
        )
        yield CounterMetricFamily(
            "swell_engine_stalls", "Engines found to have stopped.", view.stalls
        )
        phases = GaugeMetricFamily(
            "swell_rescale_phase", "1 for the phase of the change of engines.", labels=["phase"]
        )
        for phase in _PHASES:
            phases.add_metric([phase], float(phase == view.phase))
        yield phases
        yield from _scaling(view.scaling)
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
