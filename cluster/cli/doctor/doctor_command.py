"""`swell doctor`: checks what the hosts need before they can serve, and prints a table with
remedies, or one JSON object. `swell serve --address` runs a few of these checks before the
start."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import sys
from collections.abc import Callable, Sequence

import msgspec

from swell.cluster.cli.console import plain, print_table
from swell.cluster.cli.doctor import check_cluster, check_hosts
from swell.cluster.cli.doctor.checks import CHECKS, Finding, passed, problem
from swell.cluster.cli.doctor.facts import (
    HostFacts,
    HostRequest,
    Link,
    Requirements,
    StartSurvey,
    Survey,
    read_requirements,
)
from swell.cluster.cli.doctor.probes import links
from swell.cluster.cli.doctor.probes.host_facts import collect
from swell.cluster.cli.doctor.serve_file import read_source
from swell.cluster.cli.start import ray_settings
from swell.cluster.cli.start.start_reasons import StartupError
from swell.configs.schema import Config, ConfigError, load

FAILED, UNREACHABLE = 1, 2
_HERE = "127.0.0.1"
_MOST_HOSTS = 3
"""Maximum number of hosts that a line names."""

CHECK_FUNCTIONS: tuple[Callable[[Survey], list[Finding]], ...] = (
    check_cluster.hosts,
    check_cluster.lost_hosts,
    check_hosts.python,
    check_hosts.libraries,
    check_hosts.swell,
    check_hosts.torch,
    check_hosts.compiler,
    check_hosts.processors,
    check_hosts.cores,
    check_hosts.memory,
    check_hosts.shared_memory,
    check_hosts.disk,
    check_hosts.temporary_files,
    check_hosts.home,
    check_hosts.open_files,
    check_hosts.gpu,
    check_hosts.gpu_compiler,
    check_hosts.gpu_versions,
    check_hosts.gpu_models,
    check_hosts.gpu_errors,
    check_hosts.gpu_memory,
    check_cluster.interface,
    check_cluster.ports,
    check_cluster.http_port,
    check_cluster.links,
    check_cluster.http_links,
    check_cluster.clocks,
    check_cluster.files,
    check_cluster.model,
    check_cluster.same_files,
    check_cluster.room,
    check_cluster.free_resources,
    check_cluster.token_authentication,
    check_cluster.health_checks,
    check_cluster.serve_settings,
)
"""All checks, in the order of the report. Each one is a function from a `Survey` to findings, and
has the name of its check."""
START_CHECKS: tuple[Callable[[StartSurvey], list[Finding]], ...] = (
    check_cluster.interface,
    check_cluster.files,
    check_cluster.http_port,
)
"""The checks of `swell serve --address`: Ray may place engines, ingresses and manager on any host.
They need only facts that a host collects at once."""


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


def doctor(args: argparse.Namespace) -> int:
    """Prints all findings. Returns 1 if one is an error, 2 if the cluster does not answer."""
    report = examine(args.config, dict(args.set), args.address, args.timeout)
    (print_json if args.json else print_report)(report)
    return report.exit_code


def examine(
    source: str | None, overrides: dict[str, object], address: str | None, timeout_s: float
) -> Report:
    """Runs the checks. `source`: a configuration, or a file for Ray Serve or KubeRay. Without a
    configuration, or with an invalid one, only the checks of hosts run."""
    config, found = _load(source, overrides)
    requirements = read_requirements()
    if address is None:
        survey = _ask_machine(config, requirements, timeout_s)
        return _report(survey, [*found, *run_checks(survey)])
    from swell.cluster.cli.doctor.probes.ray_hosts import ClusterSilent, ask_cluster

    try:
        survey = ask_cluster(address, config, requirements, timeout_s)
    except ClusterSilent as error:
        survey = Survey(requirements=requirements, hosts={}, nodes={}, address=address)
        silent = problem("cluster", [], str(error), "an answer")
        return _report(survey, [*found, silent], UNREACHABLE)
    answered = passed("cluster", [], f"{address}, {len(survey.nodes)} hosts")
    return _report(survey, [*found, answered, *run_checks(survey)])


def _ask_machine(config: Config | None, requirements: Requirements, timeout_s: float) -> Survey:
    """Collects the facts of only this machine, which `swell serve` without `--address` will use."""
    request = HostRequest(
        node=_HERE,
        config=config,
        libraries=tuple(requirements.libraries),
        salt=secrets.token_bytes(links.TOKEN_BYTES),
        timeout_s=timeout_s,
    )
    facts = collect(request)
    gpus = max(len(facts.torch.gpus), len(facts.gpus.gpus))
    listeners = {}
    if facts.address is not None:
        with contextlib.closing(
            links.LinkListeners(secrets.token_bytes(links.TOKEN_BYTES))
        ) as sockets:
            listeners[_HERE] = [sockets.open(part) for part in links.parts(config, facts.address)]
    return Survey(
        requirements=requirements,
        hosts={_HERE: facts},
        nodes={_HERE: {"CPU": float(ray_settings.local_cpus()), "GPU": float(gpus)}},
        config=config,
        listeners=listeners,
    )


def check_start(config: Config) -> None:
    """Checks the hosts of the connected Ray cluster. Raises ConfigError if a host cannot read a
    file, lacks an address at `cluster.interface`, or has another server at `serve.port`, and
    StartupError if Ray does not answer."""
    from swell.cluster.cli.doctor.probes.ray_hosts import ClusterSilent, ask_start_facts

    try:
        survey = ask_start_facts(config)
    except ClusterSilent as error:
        raise StartupError(f"{error}; {CHECKS['cluster'].remedy}") from error
    found = [finding for check in START_CHECKS for finding in check(survey)]
    if failed := [finding for finding in found if finding.level == "error"]:
        raise ConfigError("; ".join(map(_refusal, failed)))


def _refusal(finding: Finding) -> str:
    where = ", ".join(finding.hosts)
    return f"on {where}: {plain(_summary(finding))}; {finding.remedy}"


def run_checks(survey: Survey) -> list[Finding]:
    """Runs all checks. Checks of hosts return nothing if no host has answered."""
    return [finding for function in CHECK_FUNCTIONS for finding in function(survey)]


def _load(source: str | None, overrides: dict[str, object]) -> tuple[Config | None, list[Finding]]:
    if source is None:
        return None, []
    try:
        named, of_file = read_source(source)
        config = load(named, {**of_file, **overrides})
    except ConfigError as error:
        return None, [problem("configuration", [], str(error), "a valid configuration")]
    return config, [passed("configuration", [], source)]


def _report(survey: Survey, findings: Sequence[Finding], exit_code: int | None = None) -> Report:
    errors = sum(finding.level == "error" for finding in findings)
    if exit_code is None:
        exit_code = FAILED if errors else 0
    return Report(
        address=survey.address,
        exit_code=exit_code,
        errors=errors,
        warnings=sum(finding.level == "warning" for finding in findings),
        findings=list(findings),
        links=survey.links,
        hosts=survey.hosts,
    )


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
