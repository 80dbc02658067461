"""The code blocks of the pages are right: commands parse, Python runs, configurations load.

The requests of `curl` are sent to a server in `test_page_requests.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

import swell
from swell.cluster.api.openapi.operations import OPERATIONS
from swell.cluster.cli import main
from swell.cluster.local import LLM
from swell.configs.schema import ConfigError, load
from tests.faults.__main__ import parser as faults_parser
from tests.pages.blocks import LANGUAGES, Block, blocks, blocks_of, commands, page_commands
from tests.pages.curl import request_of
from tests.support.deadlines import HANG_S
from tests.support.paths import ROOT

OTHER_PROGRAMS = {
    "docker",
    "git",
    "helm",
    "kubectl",
    "ray",
    "source",
    "chmod",
    "export",
    "cd",
    "mkdir",
    "npm",
    "tar",
}
"""Programs whose commands are not checked here: they need their own services, hosts or shell.
`tests/cluster/cli/test_documented_commands.py` checks the options of Ray's."""
OTHER_CONFIGURATIONS = {"docs/operate/proxy.md": "Envoy reads it"}
RUN = {"README.md", "docs/guide/quickstart.md"}
"""The pages whose Python is run. That of other pages needs a model, a client or tensors of the
reader, so its syntax and its calls of `LLM` are checked."""


def of_language(language: str) -> list[Any]:
    found = [block for block in blocks() if block.language == language]
    return [pytest.param(block, id=block.place) for block in found]


def test_every_block_names_its_language() -> None:
    assert len(blocks()) > 40
    assert [one.place for one in blocks() if one.language not in LANGUAGES] == []


# ---------------------------------------------------------------------------------------- commands


def check_command(words: list[str]) -> None:
    """Raises an error if a command of ours is wrong."""
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "swell":
        _check_swell(arguments)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE), f"no target {arguments[0]}"
    elif program == "python":
        assert arguments[0] == "-m", "scripts of ours are modules"
        _check_module(*arguments[1:])
    elif program == "curl":
        request = request_of(arguments)
        assert _operation(request.method, request.path), f"no route {request.method} {request.path}"
    else:
        assert program in OTHER_PROGRAMS or re.match(r"[A-Z]+=", program), f"what is {program}?"


def _check_swell(arguments: list[str]) -> None:
    """Parses the command. Brackets mark optional arguments, `...` a repetition, and a capital
    letter a number."""
    plain = [word.strip("[]") for word in arguments if word.strip("[]") != "..."]
    numbers = [re.sub(r"\A[A-Z]\Z", "1", word) for word in plain]
    try:
        main._parser().parse_args(numbers)
    except SystemExit:
        raise AssertionError(f"swell {' '.join(arguments)} is no command") from None


def _check_module(name: str, *arguments: str) -> None:
    assert name == "pytest" or importlib.util.find_spec(name), f"no module {name}"
    if name == "tests.faults":
        try:
            faults_parser().parse_args(arguments)
        except SystemExit:
            raise AssertionError(f"{name} has no {arguments}") from None
    for path in arguments if name == "pytest" else ():
        assert not path.startswith("tests/") or (ROOT / path).exists(), path


def _operation(method: str, path: str) -> bool:
    patterns = (
        re.sub(r"\{\w+(:path)?\}", "[^/]+", one.path) for one in OPERATIONS if one.method == method
    )
    return any(re.fullmatch(pattern, path) for pattern in patterns)


@pytest.mark.parametrize("page", sorted({one.page for one in blocks() if one.language == "bash"}))
def test_commands_exist(page: str) -> None:
    found = page_commands(page, "http://127.0.0.1:8000")
    assert found
    for words in found:
        check_command(words)


@pytest.mark.parametrize(
    "wrong",
    [
        "swell serv configs/demo.yaml",
        "swell scale two",
        "swell sleep --levels 2",
        "make everything",
        "python -m tests.nothing",
        "python -m tests.faults --rows kill-nobody",
        "curl http://127.0.0.1:8000/v1/chats -d '{}'",
        "curl http://127.0.0.1:8000/v1/chat/completions -d '{'",
        "rm -rf /",
    ],
)
def test_a_wrong_command_is_found(wrong: str) -> None:
    (words,) = commands(wrong)
    with pytest.raises((AssertionError, ValueError)):
        check_command(words)


# ------------------------------------------------------------------------------------------ Python


def check_python(code: str) -> None:
    """Raises an error if the code does not compile, or calls `LLM` or our package wrongly."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "swell":
            for alias in node.names:
                assert hasattr(swell, alias.name), f"swell has no {alias.name}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("llm."):
            method = getattr(LLM, ast.unparse(node.func).removeprefix("llm."))
            names = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(method).bind(None, *node.args, **names)


@pytest.mark.parametrize("block", of_language("python"))
def test_python_compiles_and_calls_what_exists(block: Block) -> None:
    check_python(block.code)


@pytest.mark.parametrize(
    "wrong",
    ["from swell import Nothing", "llm.generat('a')", "llm.generate('a', temperature=0)", "a ="],
)
def test_wrong_python_is_found(wrong: str) -> None:
    with pytest.raises((AssertionError, AttributeError, TypeError, SyntaxError)):
        check_python(wrong)


@pytest.mark.slow
def test_python_of_the_first_pages_runs() -> None:
    codes = {one.code for one in blocks() if one.page in RUN and one.language == "python"}
    assert {one.page for one in blocks() if one.code in codes} == RUN
    for code in codes:
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout == "nettik\n"


# ----------------------------------------------------------------------------- YAML, JSON and text


def check_configuration(code: str) -> None:
    """Loads a part of a configuration: the model may be missing."""
    part = yaml.safe_load(code)
    load({"model": {"path": "."}, **part})


@pytest.mark.parametrize("block", of_language("yaml"))
def test_configurations_load(block: Block) -> None:
    if reason := OTHER_CONFIGURATIONS.get(block.page):
        assert [*yaml.safe_load_all(block.code)], reason
        return
    check_configuration(block.code)


@pytest.mark.parametrize(
    "wrong", ["parallel: {dat: 2}", "drafts: {method: guess}", "cache: {memory_bytes: -1}", "a: [1"]
)
def test_a_wrong_configuration_is_found(wrong: str) -> None:
    with pytest.raises((ConfigError, yaml.YAMLError)):
        check_configuration(wrong)


def test_json_parses() -> None:
    for block in blocks():
        if block.language == "json":
            json.loads(block.code)


# --------------------------------------------------------------------------------- the reader here


def test_blocks_and_commands_are_read_as_a_shell_reads_them() -> None:
    text = 'a\n\n1. b\n   ```bash\n   A=1; curl $A/x \\\n     -d "y $A"   # c\n   ```\n'
    (block,) = blocks_of("page.md", text)
    assert (block.place, block.language) == ("page.md:4", "bash")
    assert commands(block.code) == [["A=1"], ["curl", "1/x", "-d", "y 1"]]
