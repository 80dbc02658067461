"""`swell doctor` with two hosts: it reports what is wrong with one host or with their link, and
starts no engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from swell.cluster.cli.doctor.doctor_command import Report
from tests.e2e.cluster import NANO
from tests.faults.hosts import hosts as hosts_module
from tests.faults.hosts.hosts import Hosts
from tests.faults.hosts.namespaces import wait_until
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

PORTS = range(29_000, 29_064)
SETTINGS = (
    *(str(NANO), "--set", f"cluster.ports={PORTS[0]}-{PORTS[-1]}", "--set", "serve.port=0"),
    *("--set", "serve.host=0.0.0.0", "--set", "parallel.pipeline=2"),
)
PARTS = {"coordinator", "engines", "collectives", "http"}
TOLERATED = {"token-authentication"}
"""Findings that do not count: Ray needs no token here, since no other network reaches the hosts."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := hosts_module.refusal():
        pytest.skip(reason)
    with Hosts(cpus=2) as running:
        yield running


def examine(hosts: Hosts, timeout_s: float = HANG_S) -> Report:
    """Runs `swell doctor` on the first host; returns its report."""
    command = [*hosts.prefix(0), sys.executable, "-m", "swell.cluster", "doctor", *SETTINGS]
    done = subprocess.run(
        [*command, "--address", hosts.ray_address, "--json", f"--timeout={timeout_s:g}"],
        capture_output=True,
        check=False,
    )
    assert done.stdout, done.stderr.decode()[-2000:]
    report = msgspec.json.decode(done.stdout, type=Report)
    assert report.exit_code == done.returncode == (1 if report.errors else 0)
    return report


def problems(report: Report) -> dict[str, tuple[str, ...]]:
    """Returns check -> the hosts of its only finding that is not ok."""
    found = [(f.check, f.hosts) for f in report.findings if f.level != "ok"]
    assert len(dict(found)) == len(found), found
    return {check: hosts for check, hosts in found if check not in TOLERATED}


def broken(report: Report) -> set[tuple[str, str, str]]:
    return {(link.source, link.target, link.part) for link in report.links if link.error}


def test_healthy_hosts_pass(hosts: Hosts) -> None:
    report = examine(hosts)
    assert problems(report) == {}
    assert sorted(report.hosts) == hosts.addresses
    assert len(report.links) == 2 * len(PARTS) and broken(report) == set()
    assert {link.part for link in report.links} == PARTS
    checked = {link.part: link.port for link in report.links}
    assert checked["coordinator"] in PORTS[:8] and checked["http"] in PORTS[8:16]
    assert checked["engines"] in PORTS[16:] and checked["collectives"] not in PORTS
    wait_until(lambda: not hosts.named(1, "HostProbe"), lambda: "it did not end with the command")


def test_a_firewall_in_one_direction_is_named_with_its_hosts(hosts: Hosts) -> None:
    first, second = hosts.addresses
    hosts.drop(1, "from", PORTS)
    try:
        report = examine(hosts)
    finally:
        hosts.heal(1)
    assert problems(report) == {"links": (second, first), "http-links": (second, first)}
    assert broken(report) == {(second, first, part) for part in ("coordinator", "engines", "http")}
    (found,) = [finding for finding in report.findings if finding.check == "links"]
    assert f"{second} cannot connect to {first}: coordinator (port " in found.value
    assert "no answer after 5 s" in found.value and report.exit_code == 1


def test_a_model_that_one_host_lacks_is_named(hosts: Hosts, tmp_path: Path) -> None:
    with hosts.folder_replaced(1, NANO, by=tmp_path):
        report = examine(hosts)
    assert problems(report) == {"files": (hosts.addresses[1],)}
    (found,) = [finding for finding in report.findings if finding.check == "files"]
    assert f"model.path: {NANO}/config.json cannot be read" in found.value


def test_a_model_that_differs_on_one_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    other = Path(shutil.copytree(NANO, tmp_path / "other"))
    (other / "generation_config.json").write_text('{"temperature": 0.5}')
    with hosts.folder_replaced(1, NANO, by=other):
        report = examine(hosts)
    ((check, named),) = problems(report).items()
    assert check == "same-files" and set(named) <= set(hosts.addresses) and len(named) == 1
    (found,) = [finding for finding in report.findings if finding.check == check]
    assert found.value.startswith("generation_config.json: ") and "more" not in found.value


def test_an_unreachable_host_delays_no_other(hosts: Hosts) -> None:
    """Runs last: Ray declares the host dead meanwhile, and prints that."""
    first, second = hosts.addresses
    hosts.drop(1, "from")
    try:
        report = examine(hosts)
    finally:
        hosts.heal(1)
    assert problems(report)["hosts"] == (second,)
    assert list(report.hosts) == [first]
    assert {"python", "files", "room"} <= {f.check for f in report.findings if f.level == "ok"}
