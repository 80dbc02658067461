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
from swell.configs.schema import ClusterConfig, ServeConfig
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


def settings(stage: str) -> dict[str, str]:
    """Returns the environment of a stage."""
    lines = [rest for name, rest in stages()[stage] if name == "ENV"]
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def commands(stage: str, program: str) -> list[list[str]]:
    """Returns the words of each call of a program in a stage."""
    lines = [rest for name, rest in stages()[stage] if name == "RUN"]
    calls = [shlex.split(call) for line in lines for call in line.split("&&")]
    return [call for call in calls if call and call[0] == program]


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
    (minutes,) = re.findall(r"--start-period=(\d+)m", check)
    assert 60 * int(minutes) >= ClusterConfig().start_timeout_s


def test_caches_are_in_a_folder_that_containers_and_pods_can_write() -> None:
    found = settings("cuda")
    caches = [found[name] for name in ("SWELL_CACHE", "HF_HOME", "TRITON_CACHE_DIR")]
    assert all(path.startswith("/cache/") for path in caches)
    mounted = {mount["mountPath"] for mount in pod()["containers"][0]["volumeMounts"]}
    assert {"/cache", "/tmp"} == mounted
    (folder,) = commands("base", "install")
    assert {"--directory", "--owner=swell", "--group=swell", "/cache"} <= set(folder)
    lines = re.findall(r"^docker run .*$", PAGE.read_text().replace("\\\n", " "), re.M)
    assert len(lines) == 2
    for line in lines:
        assert {"--read-only", "--tmpfs", "/tmp"} <= set(line.split())
        assert "--volume swell-cache:/cache" in line
        assert "--publish 127.0.0.1:8000:8000" in line, "only this host until keys are set"


def test_the_account_and_the_programs_exist() -> None:
    """Earlier steps create the account, and install the programs, that the settings name."""
    (account,) = commands("base", "useradd")
    assert account[account.index("--uid") + 1] == last("cpu", "USER").split(":")[0]
    assert account[-1] == "swell" and last("cpu", "WORKDIR") == "/home/swell"
    (install,) = [call for call in commands("base", "apt-get") if "install" in call]
    check = json.loads(last("cpu", "HEALTHCHECK").partition("CMD")[2])
    tini, *_ = json.loads(last("cpu", "ENTRYPOINT"))
    assert {tini, check[0], "g++", "python3-venv", "ca-certificates"} <= set(install)
    (environment,) = [call for call in commands("source", "python3") if "venv" in call]
    assert settings("base")["PATH"].split(":")[0] == f"{environment[-1]}/bin"
    assert settings("cuda")["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert settings("cuda")["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_the_image_serves_a_model_that_it_contains() -> None:
    (link,) = commands("source", "ln")
    assert link[-2].endswith("/swell/configs/models")
    (model,) = json.loads(last("cpu", "CMD"))
    name = model.removeprefix(f"{link[-1]}/")
    assert (ROOT / "configs" / "models" / name / "config.json").is_file()


def test_the_image_installs_the_torch_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [each for each in project["dependencies"] if each.startswith("torch>")]
    (install,) = commands("cpu-environment", "pip")
    assert torch in install and install[-1] == "."


def test_the_page_builds_targets_that_exist() -> None:
    targets = re.findall(r"--target (\S+)", PAGE.read_text())
    assert targets and set(targets) <= stages().keys()
