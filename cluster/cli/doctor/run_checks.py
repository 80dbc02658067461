"""All checks, in the order of the report. Each one is a function from a `Survey` to findings, and
has the name of its check."""

from __future__ import annotations

from collections.abc import Callable

from swell.cluster.cli.doctor import (
    check_cluster,
    check_files,
    check_machine,
    check_network,
    check_software,
)
from swell.cluster.cli.doctor.checks import Finding
from swell.cluster.cli.doctor.survey import Survey

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


def run_checks(survey: Survey) -> list[Finding]:
    """Run all checks. Checks of hosts return nothing if no host has answered."""
    return [finding for function in CHECK_FUNCTIONS for finding in function(survey)]
