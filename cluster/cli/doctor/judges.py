"""All judges, in the order in which people read their findings: each is a function from a `Survey`
to findings, and has its check's name."""

from __future__ import annotations

from collections.abc import Callable

from swell.cluster.cli.doctor import (
    judge_cluster,
    judge_files,
    judge_machine,
    judge_network,
    judge_software,
)
from swell.cluster.cli.doctor.checks import Finding
from swell.cluster.cli.doctor.survey import Survey

JUDGES: tuple[Callable[[Survey], list[Finding]], ...] = (
    judge_cluster.hosts,
    judge_cluster.lost_hosts,
    judge_software.python,
    judge_software.libraries,
    judge_software.swell,
    judge_software.torch,
    judge_software.compiler,
    judge_machine.cores,
    judge_machine.shared_memory,
    judge_machine.disk,
    judge_machine.open_files,
    judge_machine.gpu,
    judge_machine.gpu_versions,
    judge_machine.gpu_models,
    judge_machine.gpu_errors,
    judge_machine.gpu_memory,
    judge_network.interface,
    judge_network.ports,
    judge_network.http_port,
    judge_network.links,
    judge_network.http_links,
    judge_network.clocks,
    judge_files.files,
    judge_files.model,
    judge_files.same_files,
    judge_cluster.room,
    judge_cluster.free_resources,
    judge_cluster.token_authentication,
    judge_cluster.health_checks,
    judge_cluster.serve_settings,
)


def judge(survey: Survey) -> list[Finding]:
    """What concerns a host is left out where no host has answered."""
    return [finding for function in JUDGES for finding in function(survey)]
