"""Each claim of `docs/design/failover.md` is on the page and is asserted by tests that exist."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache

import pytest

from tests.faults.hosts import hosts
from tests.support.reliability_claims import LIMITS, MECHANISMS, PROMISE
from tests.test_layers import ROOT

PAGE = (ROOT / "docs" / "design" / "failover.md").read_text()
SETTINGS = ("failure_threshold", "timeout_ms", "period_ms")
NOT_OURS = {
    "The client of an ingress that dies sees a cut connection.",
    "The host of Ray's GCS.",
}
"""Limits without any protection: they only say what is lost."""


def points() -> dict[int, str]:
    """Returns number -> text of the numbered mechanisms on the page."""
    text = PAGE.partition("## How it works\n")[2].partition("\n## ")[0]
    parts = re.split(r"^(\d+)\. ", text, flags=re.MULTILINE)[1:]
    return {int(number): body for number, body in zip(parts[::2], parts[1::2], strict=True)}


def limits() -> dict[str, str]:
    text = PAGE.partition("\n## Limits\n")[2]
    items = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
    return {re.match(r"\*\*(.+?)\*\*", item)[1]: item for item in items}  # type: ignore[index]


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def all_tests() -> Iterator[str]:
    for claims in (PROMISE, *MECHANISMS.values(), *LIMITS.values()):
        for tests in claims.values():
            yield from tests


def assert_quoted(claims: Mapping[str, tuple[str, ...]], text: str) -> None:
    """Quotes are compared without line breaks."""
    text = " ".join(text.split())
    for quote, tests in claims.items():
        assert quote in text, f"not on the page: {quote!r}"
        assert tests, f"no test asserts {quote!r}"


def test_the_promise_is_quoted() -> None:
    assert_quoted(PROMISE, PAGE)


def test_each_mechanism_has_a_test_that_asserts_it() -> None:
    found = points()
    assert found.keys() == MECHANISMS.keys()
    for number, claims in MECHANISMS.items():
        assert claims, f"point {number} is asserted by no test"
        assert_quoted(claims, found[number])


def test_each_limit_has_a_test_that_asserts_it() -> None:
    found = limits()
    starts = {
        start: text for title, text in found.items() for start in LIMITS if title.startswith(start)
    }
    assert starts.keys() == LIMITS.keys() and len(found) == len(LIMITS)
    for start, claims in LIMITS.items():
        assert claims or start in NOT_OURS, f"{start} is asserted by no test"
        assert_quoted(claims, starts[start])


@pytest.mark.parametrize("name", sorted(set(all_tests())))
def test_the_tests_exist(name: str) -> None:
    file, _, function = name.partition("::")
    assert function in functions(file)


def defaults_of_ray() -> dict[str, int]:
    """Returns the values in a new process without settings of Ray: a process keeps those that it
    had when it first imported Ray."""
    code = (
        "import json; from ray._raylet import Config; "
        f"print(json.dumps([getattr(Config, 'health_check_' + name)() for name in {SETTINGS}]))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = [sys.executable, "-c", code]
    values = subprocess.run(run, env=env, capture_output=True, text=True, check=True).stdout
    return dict(zip(SETTINGS, json.loads(values.splitlines()[-1]), strict=True))


def test_the_times_of_health_checks_are_those_on_the_page() -> None:
    """Compares the defaults of Ray, the files for `ray up`, and the host tool."""
    own = defaults_of_ray()
    script = (ROOT / "configs" / "ray" / "environment.sh").read_text()
    ours = {
        name: int(re.search(rf"RAY_health_check_{name}=(\d+)", script)[1])  # type: ignore[index]
        for name in SETTINGS
    }
    tool = {name: int(hosts._NODE_SETTINGS[f"RAY_health_check_{name}"]) for name in SETTINGS}
    shown = " ".join(limits()["Ray learns late that a host is lost"].split())
    for values, text in (
        (own, "(5 checks of 10 s and 3 s) that is {} s at most"),
        (ours, "`configs/ray` {} s (18 checks of 3 s and 2 s)"),
        (tool, "those of the fault tool {} s (6 of them)"),
    ):
        each_ms = values["timeout_ms"] + values["period_ms"]
        assert text.format(values["failure_threshold"] * each_ms // 1000) in shown
