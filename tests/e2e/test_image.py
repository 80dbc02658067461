"""The image for CPUs: built by the steps of its Dockerfile, and serving as it would in a container:
with its account and command, a read-only root file system, and no network but its own.

Building takes some minutes, 10 GB of disk and the registries of Debian and Python, so only
`SWELL_IMAGE=1` runs it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.cluster import ROOT
from tests.support.deadlines import HANG_S

BASE = "docker.io/library/debian:bookworm-slim"
MIRROR = "http://deb.debian.org/debian"
MAX_BYTES = 1.5e9
BUILD_S, START_S, STOP_S = 3600, 600, 120
POLL_S = 1.0
TOOLS = ("buildah", "debootstrap")
ENTER = """
set -e
ip link set lo up
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/dev"
for name in null zero random urandom full tty; do
    touch "$1/dev/$name" && mount --bind "/dev/$name" "$1/dev/$name"
done
mkdir "$1/dev/shm" && mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
mount -t tmpfs -o mode=1777,noexec tmpfs "$1/tmp"
mount -t tmpfs -o "mode=755,uid=$2,gid=$3" tmpfs "$1/cache"
mount -o remount,bind,ro "$1"
exec chroot --userspec="$2:$3" --groups= "$1" "${@:4}"
"""
"""Arguments: the root of the image, the user and the group, then a command."""


def refusal() -> str | None:
    """Returns why the image cannot be built here; None: it can."""
    if os.environ.get("SWELL_IMAGE") != "1":
        return "SWELL_IMAGE=1 builds the image: some minutes, and 10 GB of disk"
    if os.geteuid():
        return "only root can build the image without a container engine"
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"there is no {', '.join(missing)}: apt-get install {' '.join(missing)}"
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(BUILD_S + START_S),
    pytest.mark.skipif(refusal() is not None, reason=str(refusal())),
]


class Image(NamedTuple):
    root: Path
    config: dict[str, Any]
    num_bytes: int

    def enter(self, command: list[str]) -> list[str]:
        """Returns the command line that runs a command as a container of the image would."""
        user, group = self.config["User"].split(":")
        environment = ["/usr/bin/env", "-i", *self.config["Env"], "HOME=/home/swell"]
        isolated = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
        script = ["bash", "-c", ENTER, "enter", str(self.root), user, group]
        return [*isolated, *script, *environment, *command]


class Builder:
    """Builds in a store of its own."""

    def __init__(self, folder: Path) -> None:
        self._options = ["--root", str(folder / "store"), "--runroot", str(folder / "run")]
        self._options += ["--storage-driver", "vfs"]

    def __call__(self, *arguments: str) -> str:
        command = ["buildah", *self._options, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout.strip()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """`SWELL_IMAGE_OPTIONS`: further options of `buildah build`, such as a mirror."""
    folder = tmp_path_factory.mktemp("image")
    buildah = Builder(folder)
    base = folder / "base"
    bootstrap = ["debootstrap", "--variant=minbase", "bookworm", str(base), MIRROR]
    subprocess.run(bootstrap, check=True, capture_output=True, timeout=BUILD_S)
    shutil.rmtree(base / "var" / "cache" / "apt" / "archives")
    empty = buildah("from", "scratch")
    buildah("add", "--quiet", empty, str(base), "/")
    buildah("commit", "--quiet", empty, BASE)
    shutil.rmtree(base)
    options = os.environ.get("SWELL_IMAGE_OPTIONS", "").split()
    file = str(ROOT / "configs" / "docker" / "Dockerfile")
    buildah(
        *("bud", "--isolation", "chroot", "--pull-never", "--format", "docker"),
        *("--target", "cpu", "--tag", "swell", *options, "--file", file, str(ROOT)),
    )
    container = buildah("from", "--pull-never", "localhost/swell")
    found = json.loads(buildah("inspect", container))["Docker"]["config"]
    root = Path(buildah("mount", container))
    num_bytes = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())
    yield Image(root, found, num_bytes)
    buildah("rm", container)


def test_the_image_is_small(image: Image) -> None:
    assert image.num_bytes < MAX_BYTES


def test_the_image_serves_as_its_account_on_a_read_only_root(image: Image, tmp_path: Path) -> None:
    command = [*image.config["Entrypoint"], *image.config["Cmd"]]
    log = tmp_path / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(image.enter(command), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while b"ready: " not in log.read_bytes():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(POLL_S)
        inside = Inside(image, server.pid)
        kind, *probe = image.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        inside.run(*probe)
        message = {"role": "user", "content": "upper: hello"}
        body = {"model": "nano", "messages": [message], "temperature": 0}
        address = "http://127.0.0.1:8000/v1/chat/completions"
        wget = ("wget", "--quiet", "--output-document=-", f"--post-data={json.dumps(body)}")
        answer = inside.run(*wget, "--header=content-type: application/json", address)
        assert json.loads(answer)["choices"][0]["message"]["content"] == "HELLO"
        owner = inside.run("stat", "--format=%u:%g", "/proc/1").strip()  # of the entry point
        assert owner == image.config["User"] and not owner.startswith("0:")
        assert "Read-only" in inside.refused("touch", "/opt/swell/new")
        (entry_point,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(entry_point), signal.SIGTERM)
        assert server.wait(STOP_S) == 0
    finally:
        server.kill()


class Inside:
    """Runs commands in the namespaces of the server."""

    def __init__(self, image: Image, pid: int) -> None:
        user, group = image.config["User"].split(":")
        self._enter = ["nsenter", f"--target={pid}", "--mount", "--net", "chroot"]
        self._enter += [f"--userspec={user}:{group}", "--groups=", str(image.root)]

    def run(self, *command: str) -> str:
        done = self._done(command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *command: str) -> str:
        done = self._done(command)
        assert done.returncode
        return done.stderr

    def _done(self, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        full = [*self._enter, *command]
        return subprocess.run(full, capture_output=True, text=True, timeout=HANG_S)
