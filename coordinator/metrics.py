"""The Prometheus metrics of the cluster: every engine in the coordinator's view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swell.coordinator.manager_state import ScalingCounts, UpgradeStatus
from swell.coordinator.wire import ClusterView, EngineReport

# swell_sync_seconds only increases, but as a counter its name would be swell_sync_seconds_total.
_GAUGES: dict[str, tuple[str, Callable[[EngineReport], float]]] = {
    "swell_num_requests_running": (
        "Requests in the running batch of the engine.",
        lambda r: r.running,
    ),
    "swell_num_requests_waiting": (
        "Requests that wait for a place in the running batch.",
        lambda r: r.waiting,
    ),
    "swell_kv_cache_usage_ratio": (
        "Share of the KV blocks that are in use, from 0 to 1.",
        lambda r: r.kv_usage,
    ),
    "swell_adapters_loaded": (
        "Adapters in memory that requests have used.",
        lambda r: r.adapters_loaded,
    ),
    "swell_num_requests_waiting_for_adapters": (
        "Requests that wait for their adapter.",
        lambda r: r.adapters_waited_for,
    ),
    "swell_engine_sleep_level": (
        "Sleep level of the engine; 0 if it is awake.",
        lambda r: r.sleep_level,
    ),
    "swell_expert_imbalance": (
        "Load of the busiest worker in shared experts, divided by the mean load.",
        lambda r: r.expert_imbalance,
    ),
    "swell_sync_seconds": ("Seconds that steps have waited for other engines.", lambda r: r.sync_s),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineReport], float]]] = {
    "swell_engine_steps": ("Steps that the engine has computed.", lambda r: r.steps),
    "swell_num_preemptions": (
        "Requests that lost their KV blocks, to other requests or with a worker.",
        lambda r: r.preemptions,
    ),
    "swell_prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache, once for each request.",
        lambda r: r.prefix_queries,
    ),
    "swell_prefix_cache_hits": (
        "Prompt tokens found in the prefix cache.",
        lambda r: r.prefix_hits,
    ),
    "swell_kv_offload_saved_blocks": (
        "KV blocks copied from the device to host memory or disk.",
        lambda r: r.saved_blocks,
    ),
    "swell_kv_offload_loaded_blocks": (
        "KV blocks copied back to the device.",
        lambda r: r.loaded_blocks,
    ),
    "swell_draft_tokens": ("Draft tokens that were proposed and verified.", lambda r: r.drafts),
    "swell_accepted_draft_tokens": (
        "Draft tokens that were accepted.",
        lambda r: r.accepted_drafts,
    ),
    "swell_waves": ("Waves that have completed.", lambda r: r.waves),
    "swell_dummy_steps": (
        "Steps without requests, computed because other engines had some.",
        lambda r: r.dummy_steps,
    ),
    "swell_engine_repairs": (
        "Number of times that workers were replaced after a failure.",
        lambda r: r.repairs - r.wakes,
    ),
    "swell_engine_wakes": (
        "Number of times that the engine woke up from sleep.",
        lambda r: r.wakes,
    ),
    "swell_engine_resets": (
        "Number of times that the engine's groups failed and formed again.",
        lambda r: r.resets,
    ),
    "swell_nan_logits": (
        "Requests that failed because logits were NaN or infinite.",
        lambda r: r.nans_in_logits,
    ),
    "swell_adapter_loads": ("Adapters that were loaded.", lambda r: r.adapter_loads),
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
        yield GaugeMetricFamily("swell_wave", "Number of the current wave.", view.reports.wave)
        yield GaugeMetricFamily("swell_engines", "Engines in the roster.", len(view.roster.members))
        yield GaugeMetricFamily(
            "swell_adapters",
            "Names of adapters that operators have loaded.",
            len(view.reports.adapters),
        )
        yield GaugeMetricFamily(
            "swell_rescale_commit_seconds",
            "Seconds for which the last change of engines kept them from stepping.",
            view.reports.commit_s,
        )
        yield CounterMetricFamily(
            "swell_engine_stalls", "Engines that were found to have stalled.", view.reports.stalls
        )
        text = "1 for the current phase of the change of engines, 0 for the others."
        yield _phases("swell_rescale_phase", text, _PHASES, view.reports.phase)
        yield from _scaling(view.reports.scaling)
        yield from _upgrades(view.reports.scaling.upgrade)
        for name, (text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["engine"])
            for report in view.reports.engines:
                gauge.add_metric([str(report.rank)], read(report))
            yield gauge
        for name, (text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["engine"])
            for report in view.reports.engines:
                counter.add_metric([str(report.rank)], read(report))
            yield counter


def _phases(name: str, text: str, phases: Sequence[str], current: str) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=["phase"])
    for phase in phases:
        gauge.add_metric([phase], float(phase == current))
    return gauge


def _upgrades(status: UpgradeStatus) -> Iterator[Metric]:
    text = "1 for the current phase of the upgrade, 0 for the others."
    yield _phases("swell_upgrade_phase", text, _UPGRADE_PHASES, status.phase)
    ended = CounterMetricFamily("swell_upgrades", "Upgrades by their result.", labels=["result"])
    ended.add_metric(["done"], status.done)
    ended.add_metric(["failed"], status.failed)
    ended.add_metric(["cancelled"], status.cancelled)
    yield ended


def _scaling(counts: ScalingCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("swell_engines_target", "Target number of engines.", counts.target)
    yield GaugeMetricFamily(
        "swell_engines_pending", "Engines that wait for room in the Ray cluster.", counts.pending
    )
    yield GaugeMetricFamily(
        "swell_draining_nodes",
        "Hosts with engines that Ray will remove.",
        counts.draining_nodes,
    )
    decisions = CounterMetricFamily(
        "swell_autoscaler_decisions",
        "Changes of the target number of engines by the autoscaler.",
        labels=["direction"],
    )
    decisions.add_metric(["grow"], counts.grows)
    decisions.add_metric(["shrink"], counts.shrinks)
    yield decisions
