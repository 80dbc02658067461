"""`swell doctor`: checks what the hosts need before they can serve, and prints remedies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from swell.cluster.cli.doctor.checks import Finding, passed, problem
from swell.cluster.cli.doctor.probes.serve_file import read_source
from swell.cluster.cli.doctor.report import (
    FAILED,
    UNREACHABLE,
    Report,
    print_json,
    print_report,
)
from swell.cluster.cli.doctor.run_checks import run_checks
from swell.cluster.cli.doctor.survey import Survey, read_requirements
from swell.configs.schema import Config, ConfigError, load


def doctor(args: argparse.Namespace) -> int:
    """Print all findings. Returns 1 if one is an error, 2 if the cluster does not answer."""
    report = examine(args.config, dict(args.set), args.address, args.timeout)
    (print_json if args.json else print_report)(report)
    return report.exit_code


def examine(
    source: str | None, overrides: dict[str, object], address: str | None, timeout_s: float
) -> Report:
    """Run the checks. `source`: a configuration, or a file for Ray Serve or KubeRay. Without a
    configuration, or with an invalid one, only the checks of hosts run."""
    config, found = _load(source, overrides)
    requirements = read_requirements()
    if address is None:
        from swell.cluster.cli.doctor.probes.this_machine import ask_machine

        survey = ask_machine(config, requirements, timeout_s)
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
