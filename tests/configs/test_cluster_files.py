"""The files for `ray up` and KubeRay: accepted by Ray and Swell, and consistent with each other and
with the documentation."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from swell.cluster.control.plan.node_drains import HANDOVER_S
from swell.configs.schema import Config, ConfigError, load, parse_override
from tests.cluster.cli.test_documented_commands import options
from tests.support.deadlines import HANG_S
from tests.test_layers import ROOT

RAY = ROOT / "configs" / "ray"
KUBERNETES = ROOT / "configs" / "k8s"
CLUSTERS = {"local": "app", "aws": "app-gpu", "gcp": "app-gpu"}
"""File of `ray up` -> file of the application that it deploys."""
DEPLOYMENTS = {"Ingress", "Manager", "Store"}
PORT_OPTION = re.compile(r"--([a-z-]*port)=(\d+)")
SCHEMA = ROOT / "tests" / "data" / "kuberay_rayservice.json"


def read(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def cluster(name: str) -> dict[str, Any]:
    return read(RAY / f"{name}.yaml")


def documents() -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((KUBERNETES / "rayservice.yaml").read_text())]


def service() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the RayService and the Service."""
    first, second, *_ = documents()
    return first, second


def applications() -> dict[str, dict[str, Any]]:
    found = {name: read(RAY / f"{name}.yaml") for name in set(CLUSTERS.values())}
    return {**found, "k8s": yaml.safe_load(service()[0]["spec"]["serveConfigV2"])}


def environment() -> dict[str, str]:
    """Returns what `environment.sh` sets in a shell that SSH has opened on 10.0.0.9."""
    script = f". {RAY}/environment.sh; printf '%s\\0' \"SWELL_NODE=$SWELL_NODE\"; env -0"
    start = {"HOME": "/home/x", "PATH": "/bin:/usr/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euc", script],
        env={**start, "SSH_CONNECTION": "10.0.0.1 40000 10.0.0.9 22"},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if "=" in item)


def settings(arguments: dict[str, Any]) -> Config:
    """Returns the configuration of `args`, as `swell.cluster.app:build` reads it; files of a host
    are those of this checkout."""
    arguments = dict(arguments)
    source = str(arguments.pop("config")).replace("~/swell-source", str(ROOT))
    return load(source, dict(parse_override(f"{key}={value}") for key, value in arguments.items()))


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_the_cluster_file(name: str) -> None:
    validate_config(prepare_config(cluster(name)))


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_refuses_a_cluster_file_with_an_unknown_key(name: str) -> None:
    wrong = prepare_config(cluster(name))
    wrong["setup_comands"] = []
    with pytest.raises(jsonschema.ValidationError):
        validate_config(wrong)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_file_copies_the_files_that_pip_needs_and_the_token(name: str) -> None:
    mounts = cluster(name)["file_mounts"]
    assert mounts.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = set(project["tool"]["setuptools"]["package-dir"].values())
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert mounts == {f"~/swell-source/{part}": part for part in folders | files}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_starts_ray_with_the_shared_options_and_deploys(name: str) -> None:
    found = cluster(name)
    head, deploy = found["head_start_ray_commands"][1:]
    (worker,) = found["worker_start_ray_commands"][1:]
    assert "ray start --head --port=6379 $SWELL_NODE" in head
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head
    assert worker.startswith("ray start --address=$RAY_HEAD_IP:6379 $SWELL_NODE")
    assert f"serve deploy ~/swell-source/configs/ray/{CLUSTERS[name]}.yaml;" in deploy


def test_cloud_files_differ_only_in_their_hosts() -> None:
    same = ("file_mounts", "rsync_exclude", "setup_commands", "head_start_ray_commands")
    aws, gcp, local = (cluster(name) for name in ("aws", "gcp", "local"))
    assert [aws[key] for key in same] == [gcp[key] for key in same]
    assert local["file_mounts"] == aws["file_mounts"]


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_only_workers_of_a_cloud_are_spot_hosts(name: str) -> None:
    kinds = cluster(name)["available_node_types"]
    assert "SPOT" not in str(kinds["head"]).upper()
    assert "SPOT" in str(kinds["gpu"]).upper() and kinds["gpu"]["min_workers"] == 2


def test_hosts_have_the_documented_environment() -> None:
    found = environment()
    assert found["PATH"].startswith("/home/x/swell-env/bin:")
    assert found["RAY_AUTH_MODE"] == "token" and "OMP_NUM_THREADS" not in found
    assert "--node-ip-address=10.0.0.9 " in found["SWELL_NODE"]


def test_ports_of_ray_and_swell_are_disjoint_and_documented() -> None:
    page = (ROOT / "docs" / "operate" / "network.md").read_text()
    ports = [int(port) for _, port in PORT_OPTION.findall(environment()["SWELL_NODE"])]
    assert len(ports) == len(set(ports)) == 8
    *fixed, first, last = ports
    ray = {6379, 8265, *fixed, *range(first, last + 1)}
    for name, app in applications().items():
        config = settings(app["applications"][0]["args"])
        assert config.cluster.port_range is not None, name
        assert not ray & {*config.cluster.port_range, config.serve.port}, name
        assert str(config.cluster.ports) in page and str(config.serve.port) in page
    assert f"{min(fixed)}-{max(fixed)}" in page and f"{first}-{last}" in page


@pytest.mark.parametrize("name", [*sorted(set(CLUSTERS.values())), "k8s"])
def test_ray_serve_and_swell_accept_the_application_file(name: str) -> None:
    found = ServeDeploySchema(**applications()[name])
    (app,) = found.applications
    assert app.import_path == "swell.cluster.app:build"
    assert {deployment.name for deployment in app.deployments} <= DEPLOYMENTS
    config = settings(app.args)
    assert config.parallel.data == 2 and config.serve.host == "interface"


def test_swell_refuses_an_application_file_with_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match=r"serve\.prot"):
        settings({"config": "nano", "serve.prot": 1})


def check_ray_service(found: dict[str, Any]) -> None:
    """Raises ValidationError if KubeRay would refuse the file."""
    jsonschema.validate(found, json.loads(SCHEMA.read_text()))


def test_kuberay_accepts_the_ray_service() -> None:
    found, _ = service()
    check_ray_service(found)
    ray = found["spec"]["rayClusterConfig"]
    (worker,) = ray["workerGroupSpecs"]
    assert ray["authOptions"] == {"mode": "token"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (installed,) = [each for each in project["dependencies"] if each.startswith("ray[")]
    assert ray["rayVersion"] in Requirement(installed).specifier
    assert 1 <= worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("", {"serveConfig": ""}),
        ("rayClusterConfig", {"authOptions": {"mode": "none"}}),
        ("rayClusterConfig", {"enableAutoscaling": True}),
        ("rayClusterConfig/headGroupSpec", {"rayStartParams": {"num-cpus": 0}}),
        ("rayClusterConfig/workerGroupSpecs/0", {"groupName": None}),
        ("rayClusterConfig/workerGroupSpecs/0", {"minReplicas": "2"}),
        ("rayClusterConfig/workerGroupSpecs/0", {"template": {"spec": {"containers": []}}}),
    ],
)
def test_kuberay_refuses_a_wrong_ray_service(place: str, change: dict[str, Any]) -> None:
    found, _ = service()
    part: Any = found["spec"]
    for name in filter(None, place.split("/")):
        part = part[int(name) if name.isdigit() else name]
    part.update(change)
    with pytest.raises(jsonschema.ValidationError):
        check_ray_service(found)


def test_pods_are_restricted_and_write_only_to_volumes() -> None:
    """Each pod has the account of the image, and a read-only root file system."""
    ray = service()[0]["spec"]["rayClusterConfig"]
    dockerfile = (ROOT / "configs" / "docker" / "Dockerfile").read_text()
    for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        account = pod["securityContext"]
        assert account["runAsNonRoot"] is True
        assert account["fsGroup"] == account["runAsGroup"], "it may write to the volumes"
        assert f"USER {account['runAsUser']}:{account['runAsGroup']}\n" in dockerfile
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        written = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(written) == {"/tmp", "/cache"}
        assert {volume["name"] for volume in pod["volumes"]} == set(written.values())


def test_pods_with_gpus_run_on_nodes_that_only_they_tolerate() -> None:
    """NVIDIA's device plugin and clouds taint nodes with GPUs by the name of the resource."""
    pod = service()[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    (container,) = pod["containers"]
    resource = "nvidia.com/gpu"
    assert container["resources"]["limits"][resource] == "1"
    assert container["resources"]["requests"] == container["resources"]["limits"]
    (toleration,) = pod["tolerations"]
    assert toleration == {"key": resource, "operator": "Exists", "effect": "NoSchedule"}


def test_traffic_reaches_only_ready_pods() -> None:
    found, http = service()
    worker = found["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    (container,) = worker["spec"]["containers"]
    assert http["spec"]["selector"].items() <= worker["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probe = container["readinessProbe"]["httpGet"]
    assert probe["path"] == "/ready"
    arguments = applications()["k8s"]["applications"][0]["args"]
    assert ports[probe["port"]] == arguments["serve.port"]
    assert [port["targetPort"] for port in http["spec"]["ports"]] == [probe["port"]]


def test_terminating_pods_have_time_to_drain() -> None:
    """Pods that terminate have enough time to drain, and at most one serving pod is evicted at a
    time."""
    found, http = service()
    pod = found["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    told, waited = re.findall(r"remaining-seconds=(\d+);\s*sleep (\d+)$", script)[0]
    assert told == waited and int(told) < pod["terminationGracePeriodSeconds"]
    drain_s = settings(applications()["k8s"]["applications"][0]["args"]).cluster.drain_timeout_s
    assert drain_s + HANDOVER_S < int(told)
    (budget,) = documents()[2:]
    assert (budget["apiVersion"], budget["kind"]) == ("policy/v1", "PodDisruptionBudget")
    assert budget["spec"] == {
        "maxUnavailable": 1,
        "selector": {"matchLabels": http["spec"]["selector"]},
    }


def test_a_terminating_pod_names_its_own_node(tmp_path: Path) -> None:
    """A pod that terminates names its own node: the preStop script runs with a `ray` stub that
    prints its arguments, next to a process that Ray would start."""
    pod = service()[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    processes = tmp_path / "proc" / "12"
    processes.mkdir(parents=True)
    (processes / "cmdline").write_bytes(b"raylet\0--x=1\0--node_id=abc123\0")
    for name, text in (("ray", 'echo "$@"'), ("sleep", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", script.replace("/proc/", f"{tmp_path}/proc/")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_ADDRESS": "head:6379"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    words = done.stdout.split()
    assert words[:3] == ["drain-node", "--address=head:6379", "--node-id=abc123"]
    assert {word.partition("=")[0] for word in words[1:]} <= set(options("ray")["drain-node"])


def test_pods_have_the_environment_of_hosts() -> None:
    ray = service()[0]["spec"]["rayClusterConfig"]
    templates = [ray["headGroupSpec"]["template"], ray["workerGroupSpecs"][0]["template"]]
    hosts = {key: value for key, value in environment().items() if key.startswith("RAY_")}
    del hosts["RAY_AUTH_MODE"]  # KubeRay sets this mode, with the token
    for template in templates:
        pod = template["spec"]["containers"][0]["env"]
        assert {item["name"]: item["value"] for item in pod} == hosts
