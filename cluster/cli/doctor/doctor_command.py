"""`swell doctor`: checks what the hosts need before they can serve, and prints remedies."""

from __future__ import annotations

import argparse
import contextlib
import secrets
from collections.abc import Callable, Sequence

from swell.cluster.cli.doctor import (
    check_cluster,
    check_files,
    check_machine,
    check_network,
    check_software,
)
from swell.cluster.cli.doctor.checks import Finding, passed, problem
from swell.cluster.cli.doctor.facts import HostRequest, Requirements, Survey, read_requirements
from swell.cluster.cli.doctor.probes import links
from swell.cluster.cli.doctor.probes.fact_collector import collect
from swell.cluster.cli.doctor.probes.link_sockets import TOKEN_BYTES, LinkListeners
from swell.cluster.cli.doctor.probes.serve_file import read_source
from swell.cluster.cli.doctor.report import (
    FAILED,
    UNREACHABLE,
    Report,
    print_json,
    print_report,
)
from swell.cluster.cli.start import ray_settings
from swell.configs.schema import Config, ConfigError, load

_HERE = "127.0.0.1"

CHECK_FUNCTIONS: tuple[Callable[[Survey], list[Finding]], ...] = (
    check_cluster.hosts,
    check_cluster.lost_hosts,
    check_software.python,
    check_software.libraries,
    check_software.swell,
    check_software.torch,
    check_software.compiler,
    check_machine.cores,
    check_machine.memory,
    check_machine.shared_memory,
    check_machine.disk,
    check_machine.temporary_files,
    check_machine.home,
    check_machine.open_files,
    check_machine.gpu,
    check_machine.gpu_versions,
    check_machine.gpu_models,
    check_machine.gpu_errors,
    check_machine.gpu_memory,
    check_network.interface,
    check_network.ports,
    check_network.http_port,
    check_network.links,
    check_network.http_links,
    check_network.clocks,
    check_files.files,
    check_files.model,
    check_files.same_files,
    check_cluster.room,
    check_cluster.free_resources,
    check_cluster.token_authentication,
    check_cluster.health_checks,
    check_cluster.serve_settings,
)
"""All checks, in the order of the report. Each one is a function from a `Survey` to findings, and
has the name of its check."""


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
        salt=secrets.token_bytes(TOKEN_BYTES),
        timeout_s=timeout_s,
    )
    facts = collect(request)
    gpus = max(len(facts.torch.gpus), len(facts.gpus.gpus))
    listeners = {}
    if facts.address is not None:
        with contextlib.closing(LinkListeners(secrets.token_bytes(TOKEN_BYTES))) as sockets:
            listeners[_HERE] = [sockets.open(part) for part in links.parts(config, facts.address)]
    return Survey(
        requirements=requirements,
        hosts={_HERE: facts},
        nodes={_HERE: {"CPU": float(ray_settings.local_cpus()), "GPU": float(gpus)}},
        config=config,
        listeners=listeners,
    )


def run_checks(survey: Survey) -> list[Finding]:
    """Run all checks. Checks of hosts return nothing if no host has answered."""
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
