"""Every command in the documentation and in the cluster files exists, with its options."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import ray.scripts.scripts
import ray.serve.scripts

from swell.cluster.cli import main
from tests.test_layers import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "configs" / "ray").iterdir()),
    *sorted((ROOT / "configs" / "k8s").rglob("*.yaml")),
    ROOT / "configs" / "docker" / "Dockerfile",
    *sorted((ROOT / "cluster" / "cli").rglob("*.py")),
]
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
COMMAND = r"(swell|ray|serve) ([a-z][a-z-]*)((?: (?:[^\s`'|&;)]+|\|(?=\w)))*)"
IN_CODE = re.compile(rf"(?:^|[`'|;&(])\s*(?:\.venv/bin/)?{COMMAND}", re.MULTILINE)
IN_FILE = re.compile(rf"(?<![\w./=-])(?<!swell ){COMMAND}")
"""Matches commands in prose too, so every word after `swell`, `ray` or `serve` must be a
subcommand."""
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)")
MAKE = re.compile(r"`make ([a-z-]+)")


@cache
def options(program: str) -> dict[str, set[str]]:
    """Returns the options of each subcommand."""
    if program == "swell":
        found = main._parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
        assert found is not None
        return {name: set(parser._option_string_actions) for name, parser in found.items()}
    group = ray.scripts.scripts.cli if program == "ray" else ray.serve.scripts.cli
    return {
        name: {text for option in command.params for text in (*option.opts, *option.secondary_opts)}
        for name, command in group.commands.items()
    }


def code_of(path: Path) -> list[str]:
    """Returns the code blocks of a page, or the whole text of another file. Joins continued
    lines."""
    text = path.read_text()
    parts = [text] if path.suffix != ".md" else CODE.findall(text)
    return [re.sub(r"\\\n\s*|\n\s*(?=--)", " ", part) for part in parts]


def commands(text: str, pattern: re.Pattern[str]) -> list[tuple[str, str, list[str]]]:
    """Returns (program, subcommand, options) of each command. A comment ends a command."""
    return [
        (program, name, OPTION.findall(rest.partition(" #")[0]))
        for program, name, rest in pattern.findall(text)
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_documented_commands_exist(path: Path) -> None:
    is_page = path.suffix == ".md"
    for text in code_of(path):
        for program, name, used in commands(text, IN_CODE if is_page else IN_FILE):
            known = options(program)
            if name in known:
                assert set(used) <= known[name], f"{program} {name}: {text}"
            else:
                assert not (is_page or used), f"{program} {name}: {text}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_targets_of_make_exist(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(MAKE.findall(path.read_text())) <= targets


def test_options_of_ray_on_every_host_exist() -> None:
    script = (ROOT / "configs" / "ray" / "environment.sh").read_text()
    shared = script.partition('SWELL_NODE="')[2]
    used = OPTION.findall(shared)
    assert len(used) > 8
    assert set(used) <= options("ray")["start"]


def test_a_command_that_does_not_exist_is_found() -> None:
    text = "`swell upgrad new.yaml --url u` and `ray drain-node --when now`"
    assert commands(text, IN_CODE) == [
        ("swell", "upgrad", ["--url"]),
        ("ray", "drain-node", ["--when"]),
    ]
    assert "upgrad" not in options("swell")
    assert "--when" not in options("ray")["drain-node"]
    assert {"--node-id", "--reason"} <= options("ray")["drain-node"]
