"""The facts that `swell doctor` collects about this machine."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swell.cluster.cli.doctor.facts import HostFacts, HostRequest
from swell.cluster.cli.doctor.probes import host_facts
from swell.cluster.cli.doctor.probes.host_facts import (
    collect,
    collect_torch,
    find_c_compiler,
    find_compiler,
)
from swell.configs.runtime.process import available_cores
from swell.configs.schema import Config, load
from tests.support.deadlines import HANG_S

NODE = "127.0.0.1"


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the import of torch, which takes seconds and has a test of its own."""
    monkeypatch.setattr(host_facts, "_TORCH_PROBE", 'print(\'{"version": "2.13.0"}\')')


def ask(config: Config | None = None) -> HostFacts:
    return collect(
        HostRequest(
            node=NODE,
            config=config,
            libraries=("msgspec", "no-such-library"),
            salt=b"s",
            timeout_s=HANG_S,
        )
    )


def test_facts_of_a_machine_without_a_configuration() -> None:
    found = ask()
    assert found.python == platform.python_version()
    assert found.libraries["msgspec"] and found.libraries["no-such-library"] is None
    assert found.cores == available_cores()
    assert found.cpu is not None and found.cpu.affinity == len(os.sched_getaffinity(0))
    memory = found.memory
    assert memory is not None and 0 < memory.free_bytes < memory.total_bytes
    assert found.address == NODE and f"lo {NODE}" in found.addresses
    assert found.torch.version == "2.13.0" and found.ray is None
    assert (found.unreadable, found.files, found.model_error, found.http_error) == (
        {},
        {},
        None,
        None,
    )
    assert all(0 <= disk.free_bytes <= disk.total_bytes for disk in found.disks) and found.disks


def test_facts_include_the_needs_of_a_configuration(tmp_path: Path) -> None:
    with socket.create_server((NODE, 0)) as server:
        overrides = {"serve.port": server.getsockname()[1], "serve.chat_template": "/no/where"}
        (tmp_path / "config.json").write_text("{}")
        found = ask(load(str(tmp_path), overrides))
    assert found.http_error is not None and "is in use" in found.http_error
    assert found.unreadable == {"serve.chat_template": "/no/where"}
    assert found.model_error is not None and "has neither 'architectures'" in found.model_error
    assert list(found.files) == ["config.json"]


def test_a_missing_interface_has_no_address() -> None:
    found = ask(load("owner/name", {"cluster.interface": "10.99.99.0/24"}))
    assert found.address is None and found.http_error is None


def test_a_model_of_the_hub_needs_room_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/dev/shm/no/cache/yet")
    assert "/dev/shm" in [disk.path for disk in ask(load("owner/name")).disks]
    assert "/dev/shm" not in [disk.path for disk in ask(load(str(tmp_path))).disks]


@pytest.mark.slow
def test_facts_of_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = collect_torch(100.0)
    assert found.error is None and found.version[0].isdigit()


@pytest.mark.parametrize(
    ("probe", "error"),
    [
        ("raise ImportError('libtorch is damaged')", "ImportError: libtorch is damaged"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit code -11"),
        ("import time; time.sleep(30)", "its import has not finished after 0.3 s"),
    ],
)
def test_a_broken_torch_is_reported(
    probe: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_facts, "_TORCH_PROBE", probe)
    assert collect_torch(0.3 if "sleep" in probe else 30.0).error == error


@pytest.mark.parametrize(("find", "name"), [(find_compiler, "g++"), (find_c_compiler, "gcc")])
def test_a_broken_compiler_is_reported(
    find: Callable[[float], str | None],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert find(10.0) is None
    compiler = tmp_path / name
    compiler.write_text(f"#!{sys.executable}\nprint('13.1.0')\n")
    compiler.chmod(0o755)
    assert find(10.0) == f"{compiler} 13.1.0"
    compiler.write_text(f"#!{sys.executable}\nraise SystemExit(1)\n")
    assert find(10.0) is None
