"""The output of `nvidia-smi` is parsed. If it fails or hangs, that is reported as a fact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swell.cluster.cli.doctor.facts import Gpu, GpuFacts
from swell.cluster.cli.doctor.probes.host_facts import collect_gpus, parse_gpus

ROW = "0, NVIDIA H100 80GB HBM3, 570.124.06, 81559, 4, 0\n"
H100 = Gpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    driver="570.124.06",
    memory_bytes=81559 * 2**20,
    used_bytes=4 * 2**20,
    uncorrected_errors=0,
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Returns a function that replaces `nvidia-smi` by a shell script."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


def test_each_row_describes_a_gpu() -> None:
    assert parse_gpus(ROW) == (H100,)
    (consumer,) = parse_gpus("1, NVIDIA GeForce RTX 4090, 570.1, [N/A], 1, [N/A]")
    assert (consumer.memory_bytes, consumer.used_bytes) == (None, 2**20)
    assert consumer.uncorrected_errors is None
    assert parse_gpus("\n") == ()


@pytest.mark.parametrize("text", ["No devices were found", "0, a, b", "x, a, b, 1, 2, 3"])
def test_an_invalid_row_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nvidia-smi printed"):
        parse_gpus(text)


def test_a_working_nvidia_smi_lists_the_gpus(program: Callable[[str], None]) -> None:
    program(f"test $# = 2 && printf '{ROW.strip()}\\n'")
    assert collect_gpus(10.0) == GpuFacts(installed=True, gpus=(H100,))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo 'NVIDIA-SMI has failed because'; exit 9", "nvidia-smi: NVIDIA-SMI has failed"),
        ("exit 3", "nvidia-smi: exit code 3"),
        ("echo ERR!", "nvidia-smi printed 'ERR!'"),
        ("exec sleep 30", "nvidia-smi did not answer within 0.2 s"),
    ],
)
def test_a_failing_nvidia_smi_is_reported(
    program: Callable[[str], None], script: str, error: str
) -> None:
    program(script)
    found = collect_gpus(0.2 if "sleep" in script else 10.0)
    assert found.installed and found.gpus == ()
    assert found.error is not None and found.error.startswith(error)


def test_a_host_without_nvidia_smi_has_no_gpus() -> None:
    assert collect_gpus(10.0, program="no-such-program") == GpuFacts()
