"""The Dockerfile: the files that pip needs, and settings that hold for both of its targets."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from typing import Any

import yaml

from swell.cluster.api.openapi.operations import OPERATIONS
from swell.cluster.cli.main import _parser
from swell.configs.schema import ServeConfig
from tests.test_layers import ROOT

FILE = ROOT / "configs" / "docker" / "Dockerfile"
PAGE = ROOT / "docs" / "operate" / "containers.md"


def stages() -> dict[str, list[tuple[str, str]]]:
    """Returns the instructions of each stage with those of the stages that it is based on."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.M).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            found[stage] = current = list(found.get(base, []))
        current.append((name, " ".join(rest.split())))
    return found


def last(stage: str, name: str) -> str:
    return [rest for each, rest in stages()[stage] if each == name][-1]


def pod() -> dict[str, Any]:
    text = (ROOT / "configs" / "k8s" / "rayservice.yaml").read_text()
    service = next(yaml.safe_load_all(text))
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    found: dict[str, Any] = workers["template"]["spec"]
    return found


def test_the_image_has_the_files_that_pip_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = set(project["tool"]["setuptools"]["package-dir"].values())
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    copied = [rest.split()[:-1] for name, rest in stages()["source"] if name == "COPY"]
    assert sorted(each for names in copied for each in names) == sorted(folders | files)


def test_both_targets_serve_as_an_unprivileged_account() -> None:
    for target in ("cpu", "cuda"):
        assert last(target, "USER") == "1000:1000"
        copied = [rest for name, rest in stages()[target] if name == "COPY"]
        assert copied == [f"--from={target}-environment /opt/swell /opt/swell"]
        tini, dashes, program, *words = json.loads(last(target, "ENTRYPOINT"))
        assert (tini, dashes, program) == ("tini", "--", "swell")
        args = _parser().parse_args([*words, *json.loads(last(target, "CMD"))])
        assert (args.command, args.host) == ("serve", "0.0.0.0")
        assert str(args.port) == last(target, "EXPOSE") == str(ServeConfig().port)


def test_the_health_check_asks_a_route_of_the_server() -> None:
    check = last("cpu", "HEALTHCHECK")
    command = json.loads(check[check.index("CMD") + len("CMD") :])
    address = f"http://127.0.0.1:{last('cpu', 'EXPOSE')}"
    path = command[-1].removeprefix(address)
    assert path in {each.path for each in OPERATIONS if each.method == "get"}


def test_caches_are_in_a_folder_that_containers_and_pods_can_write() -> None:
    settings = dict(
        word.split("=", 1)
        for name, rest in stages()["cuda"]
        if name == "ENV"
        for word in shlex.split(rest)
    )
    caches = [settings[name] for name in ("SWELL_CACHE", "HF_HOME", "TRITON_CACHE_DIR")]
    assert all(path.startswith("/cache/") for path in caches)
    mounted = {mount["mountPath"] for mount in pod()["containers"][0]["volumeMounts"]}
    assert {"/cache", "/tmp"} == mounted
    commands = PAGE.read_text().replace("\\\n", " ")
    for line in re.findall(r"^docker run .*$", commands, re.M):
        assert {"--read-only", "--tmpfs", "/tmp"} <= set(line.split())
        assert "--volume swell-cache:/cache" in line


def test_the_page_builds_targets_that_exist() -> None:
    targets = re.findall(r"--target (\S+)", PAGE.read_text())
    assert targets and set(targets) <= stages().keys()
