"""Every configuration key, default, metric, route and field that the documentation names exists."""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

import msgspec
import pytest

from swell.cluster.api.admin.protocol import ClusterState
from swell.cluster.api.openapi.document import openapi_document
from swell.cluster.text.prompt import tokenizer_files
from swell.configs.config_hash import versioned_keys
from swell.configs.schema import Config
from tests.configs.test_alerts import samples
from tests.test_layers import ROOT

SECTIONS = {field.name: field.type for field in msgspec.structs.fields(Config)}
KEY = re.compile(rf"`({'|'.join(SECTIONS)})\.([a-z_]+)[`:= ]")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCALING = ROOT / "docs" / "operate" / "scaling.md"
UPGRADES = ROOT / "docs" / "operate" / "upgrades.md"
METRIC = re.compile(r"\bswell_[a-z0-9_]+\b(?:\{([a-z_]+)\})?")
ROUTE = re.compile(r"`(GET|POST|DELETE) (/[^ `?]*)")
PROBE = re.compile(r"`(/(?:v1/|admin/)?[a-z_]+(?:\.json)?)`")
NO_ROUTES = {"/admin", "/cache", "/tmp", "/proc", "/v1", "/v1/traces", "/invocations"}
"""Path prefixes, folders, and routes of other servers, which are not checked."""
FIELD = re.compile(r"`((?:rescale|upgrade|autoscaling|pending|leftovers)\.[a-z_.]+)[`:]")
NAMES = re.compile(r"`([a-z0-9_.]+)`")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pages
def test_keys_on_the_pages_exist(page) -> None:
    keys = set(KEY.findall(page.read_text()))
    unknown = {
        f"{section}.{key}"
        for section, key in keys
        if key not in {field.name for field in msgspec.structs.fields(SECTIONS[section])}
        and key not in vars(SECTIONS[section])
        and f"{section}.{key}" not in state_fields(ClusterState)
    }
    assert unknown == set()


def test_an_unknown_key_is_found() -> None:
    assert KEY.findall("set `cache.kv_type: fp8` and `cluster.ports`") == [
        ("cache", "kv_type"),
        ("cluster", "ports"),
    ]
    assert "kv_type" not in {field.name for field in msgspec.structs.fields(SECTIONS["cache"])}


def test_the_defaults_of_the_autoscaler_are_those_on_the_page() -> None:
    table = SCALING.read_text().partition("| key of `autoscaling` |")[2].partition("\n\n")[0]
    shown = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+?) \|", table, re.MULTILINE))
    kind = SECTIONS["autoscaling"]
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    special = {"enabled": "`false`", "add_nodes": "as `enabled`", "ttft_s": "none"}
    assert [defaults[name] for name in special] == [False, None, None]
    rest = {name: value for name, value in defaults.items() if name not in special}
    assert shown == {**special, **{name: shown.get(name) for name in rest}}
    assert {name: float(shown[name]) for name in rest} == rest


def test_the_keys_that_an_upgrade_changes_are_those_on_the_page() -> None:
    """The keys that an upgrade changes are those on the page; a name without a section belongs to
    the previous section."""
    text = UPGRADES.read_text().partition("\n### Keys that an upgrade changes\n")[2]
    text, _, rest = text.partition("\n#")[0].partition("- `scheduler`: all keys but ")
    found, section = set(), ""
    for name in NAMES.findall(text):
        section = name.partition(".")[0] if "." in name else section
        found.add(name if "." in name else f"{section}.{name}")
    kept = set(NAMES.findall(rest))
    fields = {field.name for field in msgspec.structs.fields(SECTIONS["scheduler"])}
    assert found | {f"scheduler.{name}" for name in fields - kept} == versioned_keys()


def test_the_keys_of_a_model_that_no_upgrade_changes_are_on_the_page() -> None:
    named = set(NAMES.findall(UPGRADES.read_text()))
    assert set(tokenizer_files._CONFIG_KEYS) <= named


def exported() -> dict[str, set[str]]:
    """Returns the labels of each metric, also under the name of a histogram."""
    found: dict[str, set[str]] = {}
    for name, labels in samples().items():
        for each in {name, re.sub(r"_(bucket|count|sum)$", "", name)}:
            found.setdefault(each, set()).update(*labels)
    return found


@pages
def test_the_metrics_on_a_page_exist(page) -> None:
    metrics = exported()
    for match in METRIC.finditer(page.read_text()):
        name, label = match[0].partition("{")[0], match[1]
        assert name in metrics, name
        assert label is None or label in metrics[name], match[0]


def test_the_page_of_metrics_lists_all_metrics() -> None:
    page = (ROOT / "docs" / "operate" / "metrics.md").read_text()
    named = {match[0].partition("{")[0] for match in METRIC.finditer(page)}
    derived = re.compile(r"_(bucket|count|sum|created)$")
    assert {name for name in exported() if not derived.search(name)} == named


def routes() -> set[tuple[str, str]]:
    return {
        (method.upper(), path)
        for path, item in openapi_document()["paths"].items()
        for method in item
    }


@pages
def test_the_routes_on_a_page_exist(page) -> None:
    """The routes on a page exist; `ID` and other words in capitals are parameters."""
    there = {(method, re.sub(r"\{[^}]+\}", "*", path)) for method, path in routes()}
    for method, path in ROUTE.findall(page.read_text()):
        assert (method, re.sub(r"\b[A-Z]+\b|\{[^}]+\}", "*", path)) in there, f"{method} {path}"
    named = set(PROBE.findall(page.read_text())) - NO_ROUTES
    assert named <= {path for _, path in there}


def state_fields(kind: type, path: str = "") -> set[str]:
    """Returns the fields of a body and of its nested structs, such as `rescale.phase`."""
    found = set()
    for name, hint in get_type_hints(kind).items():
        found.add(f"{path}{name}")
        for each in (hint, *get_args(hint)):
            if msgspec.inspect.is_struct_type(each):
                found |= state_fields(each, f"{path}{name}.")
    return found


@pages
def test_the_fields_of_the_cluster_on_a_page_exist(page) -> None:
    keys = {f"autoscaling.{name}" for name in SECTIONS["autoscaling"].__struct_fields__}
    assert set(FIELD.findall(page.read_text())) <= state_fields(ClusterState) | keys


def test_unknown_names_on_a_page_are_found() -> None:
    text = "`GET /admin/nothing`, `/reedy`, `rescale.reason` and `swell_nothing_total{engine}`"
    assert [*ROUTE.findall(text), *PROBE.findall(text), *FIELD.findall(text)] == [
        ("GET", "/admin/nothing"),
        "/reedy",
        "rescale.reason",
    ]
    assert "rescale.reason" not in state_fields(ClusterState)
    assert [match[1] for match in METRIC.finditer(text)] == ["engine"]
