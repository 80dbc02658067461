"""`ray up configs/ray/local.yaml` on hosts that only have `sshd`, a home folder and Python: the
cluster serves without a login on any host, and `ray down` leaves no process running.

The test only replaces the addresses, user and key in the file. The hosts cannot reach a package
index, so they have what an image for them would contain: an environment with the dependencies.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from swell.kernels.cpu import build
from tests.e2e.cluster import ROOT
from tests.e2e.nodes import ssh_hosts
from tests.e2e.nodes.ssh_hosts import HOME, SshHosts
from tests.faults.hosts.namespaces import HostsFailed
from tests.faults.process import HTTP, title
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

CLUSTER = Path("configs/ray/local.yaml")
HEAD, WORKER, DESK = range(3)
"""Numbers of the hosts. The last one is not part of the cluster: `ray up` runs there."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Agents of Ray, which try for a minute to report that their node is gone before they exit."""
PORT = 8080
SCRIPTS = {
    "ray": "from ray.scripts.scripts import main",
    "serve": "from ray.serve.scripts import cli as main",
}
PROMPT, ANSWER = "count from 3 to 9", "3, 4, 5, 6, 7, 8, 9"


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    if reason := refusal():
        pytest.skip(reason)
    with SshHosts(3) as running:
        for host in (HEAD, WORKER, DESK):
            install_dependencies(running.home(host))
            copy_kernels(running.home(host))
        check_out(running)
        yield running


def refusal() -> str | None:
    if shutil.which("rsync") is None:
        return "there is no rsync: apt-get install rsync"
    return ssh_hosts.refusal()


def install_dependencies(home: Path) -> None:
    """Creates `~/swell-env` with the packages of these tests and the commands of Ray. `pip` must
    not use a package index."""
    environment = home / "swell-env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, line in SCRIPTS.items():
        script = environment / "bin" / name
        script.write_text(f"#!{HOME}/swell-env/bin/python\n{line}\nmain()\n")
        script.chmod(0o755)
    settings = home / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text("[install]\nno-index = true\nno-build-isolation = false\n")


def copy_kernels(home: Path) -> None:
    """Copies compiled kernels: compiling them on a host would take longer than everything else."""
    build.library()
    cache = os.environ.get("SWELL_CACHE") or Path.home() / ".cache" / "swell"
    shutil.copytree(cache, home / ".cache" / "swell")


def check_out(hosts: SshHosts) -> None:
    """Puts the files that `local.yaml` copies, and the key, in the home folder of `DESK`, and the
    addresses of these hosts in `local.yaml`."""
    desk = hosts.home(DESK)
    (desk / "checkout").mkdir()
    text = (ROOT / CLUSTER).read_text()
    for theirs, ours in {
        "10.0.0.1": hosts.addresses[HEAD],
        "10.0.0.2": hosts.addresses[WORKER],
        "ssh_user: ubuntu": f"ssh_user: {hosts.user}",
        "~/.ssh/id_ed25519": "~/key",
    }.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    for name in yaml.safe_load(text)["file_mounts"].values():
        if not name.startswith("~"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, desk / "checkout" / name)
    (desk / "checkout" / CLUSTER).write_text(text)
    shutil.copy(hosts.key, desk / "key")


def on_desk(hosts: SshHosts, words: str, limit_s: float) -> str:
    environment = "export PATH=~/swell-env/bin:$PATH RAY_USAGE_STATS_ENABLED=0"
    return hosts.run(DESK, f"exec 2>&1; cd ~/checkout && {environment} && {words}", limit_s)


def test_ray_up_makes_a_cluster_that_answers_and_ray_down_ends_it(hosts: SshHosts) -> None:
    on_desk(hosts, "ray get-auth-token --generate", HANG_S)
    try:
        on_desk(hosts, f"ray up -y {CLUSTER}", HANG_S)
        wait_until_both_serve(hosts)
        for host in (HEAD, WORKER):
            assert [ask(hosts, host, engine) for engine in (0, 1)] == [ANSWER] * 2
        with pytest.raises(HostsFailed, match=r"[Aa]uthenticat"):
            on_desk(hosts, f"ray status --address={hosts.addresses[HEAD]}:6379", HANG_S)
    finally:
        on_desk(hosts, f"ray down -y {CLUSTER}", HANG_S)
    deadline = time.monotonic() + HANG_S
    while left := [name for host in (HEAD, WORKER) for name in running_on(hosts, host)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def running_on(hosts: SshHosts, host: int) -> list[str]:
    names = (title(pid) for pid in hosts.others(host))
    return [name for name in names if not name.startswith(AGENTS)]


def wait_until_both_serve(hosts: SshHosts) -> None:
    """Waits until each host has an active engine and a ready ingress."""
    deadline, found = time.monotonic() + HANG_S, "no answer"
    while time.monotonic() < deadline:
        try:
            state = get(hosts, HEAD, "/admin/cluster").json()
            found = str(state)
            nodes = {engine["node"] for engine in state["engines"] if engine["state"] == "active"}
            ready = [get(hosts, host, "/ready").status_code for host in (HEAD, WORKER)]
            if len(nodes) == 2 and ready == [200, 200]:
                return
        except (httpx.TransportError, ValueError, KeyError):
            pass
        time.sleep(0.2)
    status = hosts.run(HEAD, ". ~/.bashrc; ray status; serve status", HANG_S)
    raise AssertionError(f"{found}\n{status}")


def get(hosts: SshHosts, host: int, path: str) -> httpx.Response:
    return HTTP.get(f"http://{hosts.addresses[host]}:{PORT}{path}", timeout=HANG_S)


def ask(hosts: SshHosts, host: int, engine: int) -> str:
    """Returns the answer of this engine through the ingress of this host."""
    answer = httpx.post(
        f"http://{hosts.addresses[host]}:{PORT}/v1/chat/completions",
        json={
            "model": "nano",
            "messages": [{"role": "user", "content": PROMPT}],
            "temperature": 0,
            "data_parallel_rank": engine,
        },
        timeout=HANG_S,
        trust_env=False,
    )
    assert answer.headers["x-swell-engine"] == str(engine), answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content
