"""Writes `configs/grafana/swell.json`, the Grafana dashboard, from the metrics of the page.

python -m tests.configs.dashboard
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.support.paths import ROOT

DASHBOARD = ROOT / "configs" / "grafana" / "swell.json"
METRICS_PAGE = ROOT / "docs" / "operate" / "metrics.md"
METRIC = re.compile(r"\bswell_\w+")
HISTOGRAM_PART = re.compile(r"_(bucket|count|sum)$")
_REFERENCE = re.compile(r" \([^()]*`[^()]*\.py`\)| \(\[[^\]]*\]\([^)]*\)\)")

_JOB = '{job="$job"}'
_COLUMNS = 24
_WIDTH = 8
_HEIGHT = 7
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True)
class Query:
    """One query of a panel, and the name of its series."""

    legend: str
    expr: str


@dataclass(frozen=True)
class Panel:
    """One graph. `unit` is an identifier of Grafana's units."""

    title: str
    unit: str
    queries: tuple[Query, ...]


def _value(legend: str, metric: str, by: str = "") -> Query:
    """Returns a query of a gauge. All ingresses export the metrics of the whole cluster, so this
    and all other queries use the maximum over the targets."""
    return Query(legend, f"max{_by(by)} ({metric}{_JOB})")


def _rate(legend: str, metric: str, by: str = "") -> Query:
    """Returns a query of a counter's increase per second."""
    return Query(legend, f"max{_by(by)} (rate({metric}{_JOB}[$__rate_interval]))")


def _increase(legend: str, metric: str, by: str = "") -> Query:
    """Returns a query of a counter's increase within an hour, for events that are rare."""
    return Query(legend, f"max{_by(by)} (increase({metric}{_JOB}[1h]))")


def _ratio(legend: str, part: str, whole: str, by: str = "") -> Query:
    """Returns a query of the share of one counter's increase in another's."""
    return Query(legend, f"{_rate('', part, by).expr} / {_rate('', whole, by).expr}")


def _quantiles(metric: str) -> tuple[Query, ...]:
    """Returns queries of the median and two high quantiles of a histogram, and of its mean."""
    rates = f"max by (le) (rate({metric}_bucket{_JOB}[$__rate_interval]))"
    return (
        *(
            Query(f"p{percent}", f"histogram_quantile({percent / 100}, {rates})")
            for percent in (50, 95, 99)
        ),
        _ratio("mean", f"{metric}_sum", f"{metric}_count"),
    )


def _by(label: str) -> str:
    return f" by ({label})" if label else ""


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Tokens",
            "short",
            (
                _rate("prompt tokens/s", "swell_prompt_tokens_total"),
                _rate("generated tokens/s", "swell_generation_tokens_total"),
            ),
        ),
        Panel(
            "Finished requests",
            "reqps",
            (_rate("{{finished_reason}}", "swell_request_success_total", "finished_reason"),),
        ),
        Panel(
            "Running and waiting requests",
            "short",
            (
                _value("running on engine {{engine}}", "swell_num_requests_running", "engine"),
                _value("waiting on engine {{engine}}", "swell_num_requests_waiting", "engine"),
            ),
        ),
        Panel("Time to first token", "s", _quantiles("swell_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", _quantiles("swell_inter_token_latency_seconds")),
        Panel("Duration of requests", "s", _quantiles("swell_e2e_request_latency_seconds")),
        Panel("Time in queues", "s", _quantiles("swell_request_queue_time_seconds")),
        Panel("Time of prompts", "s", _quantiles("swell_request_prefill_time_seconds")),
        Panel("Time of generation", "s", _quantiles("swell_request_decode_time_seconds")),
        Panel("Prompt tokens of a request", "short", _quantiles("swell_request_prompt_tokens")),
        Panel(
            "Generated tokens of a request",
            "short",
            _quantiles("swell_request_generation_tokens"),
        ),
        Panel(
            "Moved and refused requests",
            "reqps",
            (
                _rate("moved to another engine", "swell_resubmitted_requests_total"),
                _rate("moved to another numerics class", "swell_numerics_changes_total"),
                _rate("refused: {{reason}}", "swell_refused_requests_total", "reason"),
            ),
        ),
        Panel(
            "Answers with an Idempotency-Key",
            "reqps",
            (_rate("{{result}}", "swell_resumable_requests_total", "result"),),
        ),
        Panel(
            "Ignored fields",
            "reqps",
            (_rate("{{field}}", "swell_ignored_fields_total", "field"),),
        ),
        Panel("Traces", "reqps", (_rate("{{result}}", "swell_traces_total", "result"),)),
    ),
    "Cluster": (
        Panel(
            "Engines",
            "short",
            (
                _value("in the roster", "swell_engines"),
                _value("target", "swell_engines_target"),
                _value("waiting for room", "swell_engines_pending"),
            ),
        ),
        Panel(
            "Change of the number of engines",
            "short",
            (
                _value("{{phase}}", "swell_rescale_phase", "phase"),
                _increase(
                    "autoscaler: {{direction}}", "swell_autoscaler_decisions_total", "direction"
                ),
            ),
        ),
        Panel(
            "Pause of the last change",
            "s",
            (_value("steps were held", "swell_rescale_commit_seconds"),),
        ),
        Panel(
            "Upgrade",
            "short",
            (
                _value("{{phase}}", "swell_upgrade_phase", "phase"),
                _increase("{{result}} within 1 h", "swell_upgrades_total", "result"),
            ),
        ),
        Panel(
            "Faults within an hour",
            "short",
            (
                _increase("engines stalled", "swell_engine_stalls_total"),
                _increase("repairs of engine {{engine}}", "swell_engine_repairs_total", "engine"),
                _increase("resets of engine {{engine}}", "swell_engine_resets_total", "engine"),
                _increase("NaN in engine {{engine}}", "swell_nan_logits_total", "engine"),
            ),
        ),
        Panel(
            "Hosts that Ray will remove",
            "short",
            (_value("hosts with engines", "swell_draining_nodes"),),
        ),
        Panel(
            "Epoch and wave",
            "short",
            (_value("epoch", "swell_epoch"), _value("wave", "swell_wave")),
        ),
    ),
    "Engines": (
        Panel(
            "KV cache in use",
            "percentunit",
            (_value("engine {{engine}}", "swell_kv_cache_usage_ratio", "engine"),),
        ),
        Panel(
            "Prefix cache hit rate",
            "percentunit",
            (
                _ratio(
                    "engine {{engine}}",
                    "swell_prefix_cache_hits_total",
                    "swell_prefix_cache_queries_total",
                    "engine",
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "reqps",
            (_rate("engine {{engine}}", "swell_num_preemptions_total", "engine"),),
        ),
        Panel(
            "Offloaded KV blocks",
            "short",
            (
                _rate(
                    "saved/s by engine {{engine}}", "swell_kv_offload_saved_blocks_total", "engine"
                ),
                _rate(
                    "loaded/s by engine {{engine}}",
                    "swell_kv_offload_loaded_blocks_total",
                    "engine",
                ),
            ),
        ),
        Panel(
            "Steps",
            "ops",
            (
                _rate("steps/s of engine {{engine}}", "swell_engine_steps_total", "engine"),
                _rate("dummy steps/s of engine {{engine}}", "swell_dummy_steps_total", "engine"),
            ),
        ),
        Panel(
            "Accepted drafts",
            "percentunit",
            (
                _ratio(
                    "engine {{engine}}",
                    "swell_accepted_draft_tokens_total",
                    "swell_draft_tokens_total",
                    "engine",
                ),
            ),
        ),
        Panel(
            "Waves",
            "ops",
            (_rate("waves/s of engine {{engine}}", "swell_waves_total", "engine"),),
        ),
        Panel(
            "Waiting for other engines",
            "percentunit",
            (_rate("engine {{engine}}", "swell_sync_seconds", "engine"),),
        ),
        Panel(
            "Imbalance of experts",
            "short",
            (_value("engine {{engine}}", "swell_expert_imbalance", "engine"),),
        ),
        Panel(
            "Sleep",
            "short",
            (
                _value("level of engine {{engine}}", "swell_engine_sleep_level", "engine"),
                _increase("wakes of engine {{engine}}", "swell_engine_wakes_total", "engine"),
            ),
        ),
        Panel(
            "Adapters",
            "short",
            (
                _value("names", "swell_adapters"),
                _value("in memory of engine {{engine}}", "swell_adapters_loaded", "engine"),
                _value(
                    "requests waiting on engine {{engine}}",
                    "swell_num_requests_waiting_for_adapters",
                    "engine",
                ),
            ),
        ),
        Panel(
            "Loads of adapters",
            "ops",
            (
                _rate("loads by engine {{engine}}", "swell_adapter_loads_total", "engine"),
                _rate(
                    "failures of engine {{engine}}", "swell_adapter_load_failures_total", "engine"
                ),
            ),
        ),
    ),
}
"""The panels by row."""


def panels() -> Iterator[Panel]:
    for row in ROWS.values():
        yield from row


def meanings() -> dict[str, str]:
    """Returns what the tables of `docs/operate/metrics.md` say about each metric, without
    references to other pages."""
    rows = re.findall(r"^\| `(swell_\w+)[^`]*` \| (.*) \|$", METRICS_PAGE.read_text(), re.M)
    return {name: re.sub(_REFERENCE, "", text) for name, text in rows}


def metrics_of(expr: str) -> list[str]:
    """Returns the names in a query as the page writes them."""
    known = meanings()
    return [
        name if name in known else HISTOGRAM_PART.sub("", name) for name in METRIC.findall(expr)
    ]


def _description(panel: Panel) -> str:
    known = meanings()
    names = dict.fromkeys(name for query in panel.queries for name in metrics_of(query.expr))
    return "\n\n".join(f"`{name}`: {known[name]}" for name in names)


def _graph(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": _description(panel),
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {
                "displayMode": "list",
                "placement": "bottom",
                "showLegend": True,
                "calcs": [],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _placed() -> list[dict[str, Any]]:
    """Returns the panels of the dashboard, three in a line, below the title of their row."""
    placed: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        per_line = _COLUMNS // _WIDTH
        for index, panel in enumerate(row):
            line, column = divmod(index, per_line)
            placed.append(
                _graph(panel, len(placed) + 1, column * _WIDTH, y + line * _HEIGHT),
            )
        y += -(-len(row) // per_line) * _HEIGHT
    return placed


def dashboard() -> dict[str, Any]:
    """Returns the dashboard in the form that Grafana imports."""
    return {
        "uid": "swell",
        "title": "Swell",
        "description": "Requests, cluster and engines of a Swell cluster.",
        "tags": ["swell"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "job",
                    "label": "Job",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(swell_engines, job)",
                    "refresh": 2,
                    "sort": 1,
                },
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Alerts",
                    "datasource": _SOURCE,
                    "enable": True,
                    "iconColor": "red",
                    "expr": 'ALERTS{alertname=~"Swell.*", alertstate="firing"}',
                    "titleFormat": "{{alertname}}",
                }
            ]
        },
        "panels": _placed(),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.parent.mkdir(exist_ok=True)
    DASHBOARD.write_text(text())
