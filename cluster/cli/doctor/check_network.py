"""Checks of addresses, ports, links and clocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from swell.cluster.cli.doctor.checks import Finding, Verdict, passed, problem, to_findings
from swell.cluster.cli.doctor.facts import Link, Survey
from swell.cluster.cli.doctor.probes.links import HTTP

CLOCK_LIMIT_S = 0.5
"""Largest clock difference: with a greater one the order of log lines of two hosts is misleading.
Nothing else depends on clocks, because all deadlines are durations."""
MOST_LINKS = 20
"""Maximum number of broken pairs that are listed: a firewall may block all."""


def interface(survey: Survey) -> list[Finding]:
    wanted = survey.config.cluster.interface if survey.config else None
    verdicts = {
        host: Verdict(f"it has {', '.join(facts.addresses) or 'no address'}", str(wanted))
        for host, facts in survey.hosts.items()
        if facts.address is None
    }
    found = ", ".join(facts.address or "" for facts in list(survey.hosts.values())[:3])
    return to_findings("interface", list(survey.hosts), verdicts, found)


def ports(survey: Survey) -> list[Finding]:
    if not survey.listeners:
        return []
    verdicts = {
        host: Verdict(f"{listener.part}: {listener.error}", "a free port")
        for host, listeners in survey.listeners.items()
        for listener in listeners
        if listener.error is not None and listener.part != HTTP  # `http-port` explains it
    }
    chosen = survey.config.cluster.ports if survey.config else None
    return to_findings(
        "ports", list(survey.listeners), verdicts, chosen or "any (no cluster.ports)"
    )


def http_port(survey: Survey) -> list[Finding]:
    """Check the HTTP port. Skipped while engines run, because their own ingress probably has the
    port."""
    if survey.config is None:
        return []
    serve = survey.config.serve
    if survey.engines_running:
        return [passed("http-port", [], f"not checked: {survey.engines_running} engines run")]
    verdicts = {
        host: Verdict(facts.http_error, f"free, at {serve.host}")
        for host, facts in survey.hosts.items()
        if facts.http_error is not None
    }
    value = f"{serve.host}, port {serve.port or 'chosen at the start'}"
    return to_findings("http-port", list(survey.hosts), verdicts, value)


def links(survey: Survey) -> list[Finding]:
    return _links(survey, "links", [link for link in survey.links if link.part != HTTP])


def http_links(survey: Survey) -> list[Finding]:
    return _links(survey, "http-links", [link for link in survey.links if link.part == HTTP])


def _links(survey: Survey, check: str, links: Sequence[Link]) -> list[Finding]:
    """Returns one finding for each broken direction of a pair."""
    if not links:
        return []
    broken: dict[tuple[str, str], list[str]] = {}
    for link in links:
        if link.error is not None:
            texts = broken.setdefault((link.source, link.target), [])
            texts.append(f"{link.part} (port {link.port}): {link.error}")
    found = [
        problem(
            check,
            pair,
            f"{pair[0]} cannot connect to {pair[1]}: {'; '.join(texts)}",
            "a connection",
        )
        for pair, texts in list(broken.items())[:MOST_LINKS]
    ]
    if len(broken) > MOST_LINKS:
        more = f"{len(broken) - MOST_LINKS} more of {len(survey.tried)} directions fail"
        found.append(problem(check, [], more, "a connection"))
    return found or [passed(check, [], _tried(survey))]


def _tried(survey: Survey) -> str:
    count = len({host for pair in survey.tried for host in pair})
    tried, whole = len(survey.tried), count * (count - 1)
    return f"{tried} of {whole} directions between {count} hosts" + (
        " were tried" if tried < whole else ""
    )


def clocks(survey: Survey) -> list[Finding]:
    """Check the clocks. The error of a host is its difference from the median of all hosts,
    including itself; of two hosts either may be wrong."""
    ahead: dict[str, dict[str, list[float]]] = {}
    for link in survey.links:
        if link.error is None:
            certain_s = max(0.0, abs(link.offset_s) - link.round_trip_s / 2)
            offset_s = certain_s if link.offset_s > 0 else -certain_s
            ahead.setdefault(link.target, {}).setdefault(link.source, []).append(offset_s)
            ahead.setdefault(link.source, {}).setdefault(link.target, []).append(-offset_s)
    if not ahead:
        return []
    limit = f"at most {CLOCK_LIMIT_S:g} s"
    if len(ahead) == 2:
        first, second = sorted(ahead)
        apart_s = median(ahead[second][first])
        if abs(apart_s) > CLOCK_LIMIT_S:
            host = second if apart_s > 0 else first
            text = f"{host} is {abs(apart_s):.3f} s ahead of the other"
            return [problem("clocks", [first, second], text, limit)]
    offsets = {
        host: median([0.0, *(median(values) for values in peers.values())])
        for host, peers in ahead.items()
    }
    verdicts = {
        host: Verdict(f"{abs(s):.3f} s {'ahead of' if s > 0 else 'behind'} the others", limit)
        for host, s in offsets.items()
        if abs(s) > CLOCK_LIMIT_S
    }
    most_s = max(abs(offset) for offset in offsets.values())
    return to_findings("clocks", list(offsets), verdicts, f"at most {most_s:.3f} s from the others")
