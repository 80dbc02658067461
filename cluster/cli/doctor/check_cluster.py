"""Checks of the cluster: what its hosts need in common to serve a configuration. These are Ray and
its resources, addresses and connections, clocks, and equal files. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from swell.cluster.cli.doctor.checks import Finding, Verdict, passed, problem, to_findings
from swell.cluster.cli.doctor.facts import HTTP, FileFacts, HostFacts, Link, StartSurvey, Survey
from swell.cluster.control.plan.resources import bundles, refusal
from swell.cluster.text.tokens.tokenizer import TOKENIZER_FILES
from swell.configs.schema import ClusterConfig

SLOWEST_CHECKS_S = 300.0
"""Longest acceptable detection of a lost host: after more time Ray replaces its actors too late."""
CLOCK_LIMIT_S = 0.5
"""Largest clock difference: with a greater one the order of log lines of two hosts is misleading.
Nothing else depends on clocks, because all deadlines are durations."""
MOST_LINKS = 20
"""Maximum number of broken pairs that are listed: a firewall may block all."""
_MODEL, _CONFIG = "model.path", "config.json"
_MOST_NAMES = 3


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
    """Checks that the room is free. Skipped while engines run, because they hold what this
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
    """Checks how fast the GCS detects a lost host. An unanswered check takes the timeout plus the
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


def interface(survey: StartSurvey) -> list[Finding]:
    wanted = survey.config.cluster.interface if survey.config else None
    expected = f"an address at cluster.interface={wanted!r}"
    verdicts = {
        host: Verdict(f"it has {', '.join(facts.addresses) or 'no address'}", expected)
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


def http_port(survey: StartSurvey) -> list[Finding]:
    """Checks the HTTP port. Skipped while engines run, because their own ingress probably has the
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
    """Checks the clocks. The error of a host is its difference from the median of all hosts,
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


def files(survey: StartSurvey) -> list[Finding]:
    if survey.config is None:
        return []
    verdicts = {
        host: Verdict(
            ", ".join(f"{key}: {path} cannot be read" for key, path in facts.unreadable.items()),
            "each at the same path on every host",
        )
        for host, facts in survey.hosts.items()
        if facts.unreadable
    }
    return to_findings("files", list(survey.hosts), verdicts, "all files can be read")


def model(survey: Survey) -> list[Finding]:
    """Checks the model on hosts that can read its folder: `files` reports the others."""
    if survey.config is None:
        return []
    verdicts = {
        host: Verdict(text, "a folder with config, tokenizer and weights, or a hub id")
        for host, facts in survey.hosts.items()
        if _MODEL not in facts.unreadable and (text := _model_problem(facts)) is not None
    }
    return to_findings("model", list(survey.hosts), verdicts, survey.config.model.path)


def _model_problem(facts: HostFacts) -> str | None:
    if facts.model_error is not None:
        return facts.model_error
    if _CONFIG in facts.files and facts.files.keys().isdisjoint(TOKENIZER_FILES):
        return f"no tokenizer: none of {', '.join(TOKENIZER_FILES)}"
    return None


def same_files(survey: Survey) -> list[Finding]:
    """Checks that hosts have the same files. Hosts that cannot read one are left out, because
    `files` reports them. So are hosts without any: a model that is not in a host's cache yet is
    downloaded at the start."""
    if survey.config is None:
        return []
    having = {
        host: facts
        for host, facts in survey.hosts.items()
        if facts.files and not facts.unreadable
    }  # fmt: skip
    if not having:
        return []
    groups: dict[str, list[str]] = {}
    for host, facts in having.items():
        groups.setdefault(repr(sorted(facts.files.items())), []).append(host)
    most = max(groups.values(), key=len)
    right = having[most[0]]
    verdicts = {
        host: Verdict(_differences(facts, right), f"as on {most[0]}")
        for host, facts in having.items()
        if host not in most
    }
    size_bytes = sum(file.size_bytes for file in right.files.values())
    value = f"{len(right.files)} files, {size_bytes // 2**20} MiB"
    return to_findings("same-files", list(having), verdicts, value)


def _differences(facts: HostFacts, right: HostFacts) -> str:
    names = sorted(
        name
        for name in facts.files.keys() | right.files.keys()
        if facts.files.get(name) != right.files.get(name)
    )
    texts = [
        f"{name}: {_shown(facts.files.get(name))}, there {_shown(right.files.get(name))}"
        for name in names[:_MOST_NAMES]
    ]
    more = len(names) - _MOST_NAMES
    return "; ".join(texts) + (f"; {more} more" if more > 0 else "")


def _shown(file: FileFacts | None) -> str:
    return "missing" if file is None else f"{file.size_bytes} bytes ({file.digest})"
