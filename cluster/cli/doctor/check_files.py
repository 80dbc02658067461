"""Checks of files that every host needs at the same path with the same content. Pure."""

from __future__ import annotations

from swell.cluster.cli.doctor.checks import Finding, Verdict, to_findings
from swell.cluster.cli.doctor.facts import FileFacts, HostFacts, Survey
from swell.cluster.text.tokens.tokenizer import TOKENIZER_FILES

_MODEL, _CONFIG = "model.path", "config.json"
_MOST_NAMES = 3


def files(survey: Survey) -> list[Finding]:
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
    """Check the model on hosts that can read its folder: `files` reports the others."""
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
    """Check that hosts have the same files. Hosts that cannot read one are left out, because
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
