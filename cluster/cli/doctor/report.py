"""Output of `swell doctor`: a table with remedies, or one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from swell.cluster.cli.console import plain, print_table
from swell.cluster.cli.doctor.checks import Finding
from swell.cluster.cli.doctor.facts import HostFacts, Link

FAILED, UNREACHABLE = 1, 2
_MOST_HOSTS = 3


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The object that `--json` prints."""

    address: str | None
    """The address of the Ray cluster; None: only this machine was checked."""
    exit_code: int
    """0: no finding is an error; 1: some are; 2: the cluster did not answer."""
    errors: int
    warnings: int
    findings: list[Finding]
    links: list[Link]
    """All attempts of hosts to connect to others."""
    hosts: dict[str, HostFacts]
    """The facts of each host that answered."""


def print_json(report: Report) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")


def print_report(report: Report) -> None:
    rows = [
        (
            finding.level,
            finding.check,
            _where(finding, report),
            plain(finding.value),
            plain(finding.expected),
        )
        for finding in report.findings
    ]
    print_table("", ("", "check", "where", "found", "expected"), rows, left=5)
    for finding in report.findings:
        if finding.level != "ok":
            where = _where(finding, report)
            print(f"{finding.level}: {finding.check} ({where}): {plain(_summary(finding))}")
            print(f"  -> {finding.remedy}")
    print(_last_line(report))


def _where(finding: Finding, report: Report) -> str:
    hosts = finding.hosts
    if report.address is None:
        return "here"
    if not hosts:
        return "cluster"
    if len(hosts) > 1 and set(hosts) == set(report.hosts):
        return f"all {len(hosts)} hosts"
    return _named(hosts)


def _named(hosts: Sequence[str]) -> str:
    more = len(hosts) - _MOST_HOSTS
    return ", ".join(hosts[:_MOST_HOSTS]) + (f" and {more} more" if more > 0 else "")


def _summary(finding: Finding) -> str:
    expected = f"; expected: {finding.expected}" if finding.expected else ""
    return f"{finding.value}{expected}"


def _last_line(report: Report) -> str:
    who = "the cluster" if report.address else "this machine"
    if report.exit_code == UNREACHABLE:
        return "the Ray cluster does not answer"
    if report.errors:
        return f"{_count(report.errors, 'error')}: {who} cannot serve"
    warned = f"{_count(report.warnings, 'warning')}: " if report.warnings else ""
    return f"{warned}{who} can serve"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
