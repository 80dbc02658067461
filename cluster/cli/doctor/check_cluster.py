"""Checks of the Ray cluster: hosts that answer, room, settings. Pure."""

from __future__ import annotations

from swell.cluster.cli.doctor.checks import Finding, Verdict, passed, problem, to_findings
from swell.cluster.cli.doctor.facts import Survey
from swell.cluster.control.plan.room import bundles, refusal
from swell.configs.schema import ClusterConfig

SLOWEST_CHECKS_S = 300.0
"""Longest acceptable detection of a lost host: after more time Ray replaces its actors too late."""


def hosts(survey: Survey) -> list[Finding]:
    if survey.address is None:
        return []
    verdicts = {host: Verdict(why, "an answer") for host, why in survey.silent.items()}
    answered = f"{len(survey.hosts)} answered"
    return to_findings("hosts", list(survey.hosts), verdicts, answered)


def lost_hosts(survey: Survey) -> list[Finding]:
    if survey.address is None:
        return []
    verdicts = {host: Verdict(why, "alive") for host, why in survey.lost.items()}
    return to_findings("lost-hosts", [], verdicts, "no host is lost")


def room(survey: Survey) -> list[Finding]:
    config = survey.resolved
    if config is None:
        return []
    needed = config.parallel.data
    reason = refusal(config, list(survey.nodes.values()), needed)
    bundle, count = bundles(config)
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    wanted = f"parallel.data={needed}: {needed * count} times {each}, each on one host"
    if reason is not None:
        return [problem("room", [], reason, wanted)]
    return [passed("room", [], wanted)]


def free_resources(survey: Survey) -> list[Finding]:
    """Check that the room is free. Skipped while engines run, because they hold what this
    configuration may need."""
    config = survey.resolved
    if config is None or survey.address is None or survey.engines_running or room(survey)[0].remedy:
        return []
    reason = refusal(config, list(survey.free.values()), config.parallel.data)
    if reason is not None:
        return [
            problem(
                "free-resources",
                [],
                f"counting the free resources: {reason}",
                "all of these resources",
            )
        ]
    return [passed("free-resources", [], "nothing else reserves resources")]


def token_authentication(survey: Survey) -> list[Finding]:
    if len(survey.nodes) < 2:
        return []
    known = {host: facts.ray for host, facts in survey.hosts.items() if facts.ray is not None}
    verdicts = {
        host: Verdict("RAY_AUTH_MODE is not token", "token")
        for host, ray in known.items()
        if not ray.token_authentication
    }
    return to_findings("token-authentication", list(known), verdicts, "token")


def health_checks(survey: Survey) -> list[Finding]:
    """Check how fast the GCS detects a lost host. An unanswered check takes the timeout plus the
    period. TCP retransmits within twice the duration of an outage, so an outage of half the
    detection time loses no host."""
    facts = survey.hosts.get(survey.head or "")
    if facts is None or facts.ray is None or len(survey.nodes) < 2:
        return []
    ray = facts.ray
    stall_s = (survey.config.cluster if survey.config else ClusterConfig()).stall_timeout_s
    after_s = ray.check_failures * (ray.check_period_s + ray.check_timeout_s)
    value = (
        f"a lost host is found after {after_s:g} s, and an outage of {after_s / 2:g} s loses none: "
        f"RAY_health_check_failure_threshold={ray.check_failures}, "
        f"RAY_health_check_timeout_ms={1000 * ray.check_timeout_s:.0f}, "
        f"RAY_health_check_period_ms={1000 * ray.check_period_s:.0f}"
    )
    verdict = Verdict(
        value, f"from {stall_s:g} s (cluster.stall_timeout_s) to {SLOWEST_CHECKS_S:g} s"
    )
    is_good = stall_s <= after_s <= SLOWEST_CHECKS_S
    hosts = [str(survey.head)]
    return to_findings("health-checks", hosts, {hosts[0]: None if is_good else verdict}, value)


def serve_settings(survey: Survey) -> list[Finding]:
    known = {host: facts.ray for host, facts in survey.hosts.items() if facts.ray is not None}
    if not known:
        return []
    verdicts = {
        host: Verdict("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS is not 1", "1")
        for host, ray in known.items()
        if not ray.force_stop_replicas
    }
    return to_findings("serve-settings", list(known), verdicts, "1")
