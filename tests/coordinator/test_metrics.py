"""The metrics that Prometheus reads from the coordinator's view."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from swell.coordinator.manager_state import ScalingCounts, UpgradeStatus
from swell.coordinator.metrics import ViewCollector
from swell.coordinator.roster import Roster
from swell.coordinator.wire import ClusterReports, ClusterView, EngineReport
from tests.coordinator.test_roster import roster_of


def scrape(view: ClusterView, label: str = "engine") -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    registry.register(ViewCollector(lambda: view))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, sample.labels.get(label, "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_engine_has_its_values() -> None:
    reports = [
        EngineReport(
            rank,
            running=rank + 1,
            waiting=rank + 2,
            kv_usage=0.5,
            steps=10 * rank,
            preemptions=rank,
            prefix_queries=100,
            prefix_hits=25,
            waves=rank + 7,
            dummy_steps=rank + 8,
            sync_s=rank + 0.5,
            repairs=rank + 9,
            wakes=rank + 4,
            nans_in_logits=rank + 10,
            drafts=rank + 12,
            accepted_drafts=rank + 11,
            adapters_loaded=rank + 11,
            adapters_waited_for=rank + 12,
            adapter_loads=rank + 13,
            adapter_load_failures=rank + 14,
            sleep_level=2 if rank else 0,
        )
        for rank in (0, 3)
    ]
    values = scrape(
        ClusterView(
            roster_of(0, 3), ClusterReports(engines=reports, wave=4, stalls=3, commit_s=0.25)
        )
    )
    assert values["swell_epoch", ""] == 1
    assert values["swell_wave", ""] == 4
    assert values["swell_engines", ""] == 2
    assert values["swell_engine_stalls_total", ""] == 3
    assert values["swell_rescale_commit_seconds", ""] == 0.25
    for rank in (0, 3):
        engine = str(rank)
        assert values["swell_num_requests_running", engine] == rank + 1
        assert values["swell_num_requests_waiting", engine] == rank + 2
        assert values["swell_kv_cache_usage_ratio", engine] == 0.5
        assert values["swell_engine_steps_total", engine] == 10 * rank
        assert values["swell_nan_logits_total", engine] == rank + 10
        assert values["swell_adapters_loaded", engine] == rank + 11
        assert values["swell_num_requests_waiting_for_adapters", engine] == rank + 12
        assert values["swell_adapter_loads_total", engine] == rank + 13
        assert values["swell_adapter_load_failures_total", engine] == rank + 14
        assert values["swell_engine_sleep_level", engine] == (2 if rank else 0)
        assert values["swell_num_preemptions_total", engine] == rank
        assert values["swell_draft_tokens_total", engine] == rank + 12
        assert values["swell_accepted_draft_tokens_total", engine] == rank + 11
        assert values["swell_prefix_cache_queries_total", engine] == 100
        assert values["swell_prefix_cache_hits_total", engine] == 25
        assert values["swell_waves_total", engine] == rank + 7
        assert values["swell_dummy_steps_total", engine] == rank + 8
        assert values["swell_sync_seconds", engine] == rank + 0.5
        assert values["swell_engine_repairs_total", engine] == 5
        assert values["swell_engine_wakes_total", engine] == rank + 4


def test_an_empty_cluster_has_no_series_of_engines() -> None:
    values = scrape(ClusterView(Roster()))
    assert values["swell_engines", ""] == 0
    assert not [name for name, engine in values if engine]


def test_one_phase_is_the_current_one() -> None:
    values = scrape(ClusterView(Roster(), ClusterReports(phase="drain")), "phase")
    phases = {phase: value for (name, phase), value in values.items() if "rescale_phase" in name}
    assert phases == {"idle": 0, "pending": 0, "prepare": 0, "commit": 0, "drain": 1, "failed": 0}


def test_the_target_of_the_manager_is_shown() -> None:
    values = scrape(
        ClusterView(Roster(), ClusterReports(scaling=ScalingCounts(5, 2, 3, 1, 1))), "direction"
    )
    assert values["swell_engines_target", ""] == 5
    assert values["swell_engines_pending", ""] == 2
    assert values["swell_draining_nodes", ""] == 1
    assert values["swell_autoscaler_decisions_total", "grow"] == 3
    assert values["swell_autoscaler_decisions_total", "shrink"] == 1


def test_outcomes_of_upgrades_are_shown() -> None:
    scaling = ScalingCounts(upgrade=UpgradeStatus("rolling back", 4, 2, 1))
    view = ClusterView(Roster(), ClusterReports(scaling=scaling))
    results = {result: value for (_, result), value in scrape(view, "result").items() if result}
    assert results == {"done": 4, "failed": 2, "cancelled": 1}
    values = scrape(view, "phase")
    current = [
        phase for (name, phase), value in values.items() if name == "swell_upgrade_phase" and value
    ]
    assert current == ["rolling back"]
