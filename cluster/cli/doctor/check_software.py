"""Checks of versions: in the supported range and the same on all hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.specifiers import SpecifierSet

from swell.cluster.cli.doctor.checks import Finding, Verdict, minority, to_findings
from swell.cluster.cli.doctor.facts import Survey

_COMPILER_MAJOR = 12


def python(survey: Survey) -> list[Finding]:
    """Check Python. Ray also refuses processes with another patch level."""
    values = {host: facts.python for host, facts in survey.hosts.items()}
    specifier = survey.requirements.python
    verdicts = {
        **minority(values),
        **{
            host: Verdict(value, specifier)
            for host, value in values.items()
            if not _is_in(value, specifier)
        },
    }
    return to_findings("python", list(values), verdicts, _one(values.values()))


def libraries(survey: Survey) -> list[Finding]:
    """Returns one finding for each library with a wrong version on some host. For torch only the
    part before `+` counts: hosts without a GPU may have its CPU build."""
    names = survey.requirements.libraries
    versions = {
        name: {
            host: (facts.libraries.get(name) or "not installed").partition("+")[0]
            for host, facts in survey.hosts.items()
        }
        for name in names
    }
    found = []
    for name, values in versions.items():
        odd = minority(values) | {
            host: Verdict(value, names[name] or "installed")
            for host, value in values.items()
            if value == "not installed" or not _is_in(value, names[name])
        }
        verdicts = {
            host: Verdict(f"{name} {verdict.value}", verdict.expected)
            for host, verdict in odd.items()
        }
        found += to_findings("libraries", list(values), verdicts, "") if verdicts else []
    texts = (f"{name} {_one(values.values())}" for name, values in versions.items())
    return found or to_findings("libraries", list(survey.hosts), {}, ", ".join(texts))


def swell(survey: Survey) -> list[Finding]:
    values = {host: f"source {facts.swell_digest}" for host, facts in survey.hosts.items()}
    return to_findings("swell", list(values), minority(values), _one(values.values()))


def torch(survey: Survey) -> list[Finding]:
    verdicts = {
        host: Verdict(facts.torch.error, "torch can be imported")
        for host, facts in survey.hosts.items()
        if facts.torch.error is not None
    }
    builds = sorted({facts.torch.version for facts in survey.hosts.values()})
    return to_findings("torch", list(survey.hosts), verdicts, ", ".join(builds))


def compiler(survey: Survey) -> list[Finding]:
    """Check the compiler, unless engines run on GPUs: CPU kernels are compiled where engines run on
    CPUs."""
    config = survey.resolved
    if config is not None and config.model.device == "cuda":
        return []
    expected = f"g++ {_COMPILER_MAJOR} or later"
    verdicts = {
        host: Verdict(facts.compiler or "no g++ that runs", expected)
        for host, facts in survey.hosts.items()
        if _major(facts.compiler) < _COMPILER_MAJOR
    }
    texts = sorted({facts.compiler or "" for facts in survey.hosts.values()})
    return to_findings("compiler", list(survey.hosts), verdicts, ", ".join(texts))


def _major(compiler: str | None) -> int:
    """Returns the major version; 0: there is no compiler. An unknown version counts as new."""
    if compiler is None:
        return 0
    number = compiler.rpartition(" ")[2].partition(".")[0]
    return int(number) if number.isdigit() else _COMPILER_MAJOR


def _is_in(version: str, specifier: str) -> bool:
    return version == "not installed" or SpecifierSet(specifier).contains(version, prereleases=True)


def _one(values: Iterable[str]) -> str:
    """Returns the value that all share; empty without hosts."""
    return next(iter(values), "")
