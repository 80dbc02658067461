"""The numbers and lists in the operator documentation are those of the code."""

from __future__ import annotations

import re

import pytest

from swell.cluster.api.admin import admin_routes
from swell.cluster.api.openapi.document import openapi_document
from swell.cluster.cli.doctor.probes import ray_hosts
from swell.cluster.client.routing.admission import WINDOW_S
from swell.cluster.control.engines import placement
from swell.cluster.control.plan import autoscaler, backoff, load_signals, node_drains
from swell.cluster.text import partial_arguments
from swell.cluster.text.json_grammar import number_ranges, object_merging, string_terminals
from swell.cluster.text.schema import json_size, strict_json
from swell.configs import schema
from swell.configs.files import yaml_text
from swell.configs.runtime import network
from swell.coordinator.transport import handshakes
from swell.coordinator.transport.ports import CHOSEN_PORTS
from tests.test_layers import ROOT

MIB = 2**20
HOURS = {4: "four"}
COUNTS = {2: "doubles", 5: "five", 8: "eighth"}
LIMITS = {
    "scaling": [
        f"A queue that will be empty within {autoscaler.DRAIN_S:g} s does not count",
        f"nine of ten requests of the last {WINDOW_S:g} s",
        f"(at least {load_signals._MIN_REQUESTS} of them)",
        f"each signal below {autoscaler.LOW:g} of its target",
        f"Twice as long, up to {autoscaler.MAX_CAUTION} times",
        f"One decision {COUNTS[int(autoscaler._FACTOR)]} the engines",
        f"one that finds no room within {placement._RESERVE_TIMEOUT_S:g} s is taken back",
        f"and {node_drains.HANDOVER_S:g} s before the end (the only engine: "
        f"{node_drains.HANDOVER_S:g} s before)",
    ],
    "upgrades": [f"up to {HOURS[int(schema.MAX_DRAIN_S / 3600)]} hours"],
    "monitoring": [
        f"engines are missing after {COUNTS[backoff.MAX_FAILURES]} attempts",
        f"{COUNTS[int(backoff._LONGEST_S / 60)]} minutes after the last attempt at the latest",
    ],
    "security": [
        f"Bodies of the admin API have at most {admin_routes._MAX_BODY_BYTES // 1024} KiB",
        f"more than {strict_json.MAX_DEPTH} objects and arrays in each other",
        f"have at most {yaml_text.MAX_YAML_BYTES // 1024} KiB, {yaml_text.MAX_DEPTH} levels, and "
        f"{yaml_text.MAX_NODES:,} keys and values",
        f"| {handshakes.HANDSHAKE_S:g} s | `HANDSHAKE_S` in",
        f"| {handshakes.MAX_PENDING}; further ones are shut down at once | `MAX_PENDING` |",
        f"| {handshakes.MAX_MESSAGE_BYTES // MIB} MiB | `MAX_MESSAGE_BYTES`;",
        f"`serve.max_body_bytes` may be {schema.MAX_BODY_BYTES // MIB} MiB at most",
    ],
    "network": [
        f"{CHOSEN_PORTS[0]}-{CHOSEN_PORTS[-1]}",
        f"the first {COUNTS[network._KEPT_PART]}",
    ],
    "structured-output": [
        f"**Numbers** have at most {number_ranges.MAX_INT_DIGITS} digits before the point, "
        f"{number_ranges.MAX_FRACTION_DIGITS} after it, and an exponent of "
        f"{number_ranges.MAX_EXPONENT_DIGITS} digits",
        f"up to {number_ranges.MAX_BOUND_DIGITS})",
        f"names may be of {object_merging.MAX_NAME_PARTS} kinds by the patterns",
        f"are at most 10^{len(str(string_terminals.MAX_MULTIPLE)) - 1}",
    ],
    "limits": [
        f"{partial_arguments.MAX_DEPTH} objects and arrays in each other, "
        f"{json_size.MAX_NUMBER_CHARS} characters a number; under a grammar "
        f"{number_ranges.MAX_INT_DIGITS} digits before the point and "
        f"{number_ranges.MAX_FRACTION_DIGITS} after it",
    ],
    "doctor": [f"one attempt of {ray_hosts._LINK_S:g} s in each direction"],
}


@pytest.mark.parametrize("page", LIMITS)
def test_the_limits_on_a_page_equal_those_in_the_code(page: str) -> None:
    (path,) = (ROOT / "docs").rglob(f"{page}.md")
    text = " ".join(path.read_text().split())
    assert [limit for limit in LIMITS[page] if limit not in text] == []


def test_the_routes_without_a_key_are_those_on_the_page() -> None:
    page = " ".join((ROOT / "docs" / "operate" / "security.md").read_text().split())
    listed = re.search(r"in constant time\. ((?:`/[^`]*`[, and]*)+) need no key", page)
    assert listed is not None
    open_paths = {
        path
        for path, item in openapi_document()["paths"].items()
        if any("401" not in operation["responses"] for operation in item.values())
    }
    assert set(re.findall(r"`([^`]+)`", listed[1])) == open_paths
