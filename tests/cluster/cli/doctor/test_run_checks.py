"""Each check passes on healthy hosts. Each fault of a host is found by its own check and by no
other."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from swell.cluster.cli.doctor.check_cluster import MOST_LINKS
from swell.cluster.cli.doctor.checks import CHECKS, Finding
from swell.cluster.cli.doctor.doctor_command import CHECK_FUNCTIONS, run_checks
from swell.cluster.cli.doctor.facts import (
    HTTP,
    CpuFacts,
    DiskFacts,
    FileFacts,
    GpuFacts,
    Listener,
    MemoryFacts,
    Survey,
    TorchFacts,
)
from swell.cluster.cli.doctor.probes.links import pairs
from tests.cluster.cli.doctor.surveys import (
    GIB,
    GPU,
    WITH_GPU,
    changed,
    config,
    facts,
    name,
    survey,
    with_clock,
    with_host,
    with_link,
)

OF_THE_COMMAND = {"configuration", "cluster"}
"""Checks that run before there is a survey, tested in `test_doctor_command.py`."""


class Fault(NamedTuple):
    survey: Survey
    check: str
    hosts: tuple[int, ...]
    value: str
    """A substring of the reported value."""


def ray(**fields: Any) -> Any:
    return changed(facts().ray, **fields)


def of_gpu(**fields: Any) -> dict[str, Any]:
    return {"gpus": GpuFacts(installed=True, gpus=(changed(GPU, **fields),))}


HEALTHY, ON_GPUS = survey(), survey(gpus=True)
FILES = facts().files
DRIVER = {"torch": changed(WITH_GPU["torch"], nccl="2.26.2")}
OTHER_GPU = {"torch": changed(WITH_GPU["torch"], gpus=("NVIDIA A100",))}
NOT_ALL_FREE = changed(ON_GPUS, free={name(host): {"GPU": 0.0} for host in range(3)})
NOWHERE_TOGETHER = changed(
    HEALTHY,
    config=config(parallel__tensor=2, parallel__data=1, cluster__cpus_per_worker=1),
    free={name(host): {"CPU": 1.0} for host in range(3)},
)
"""There are enough cores in total, but no host has two."""
UNREADABLE = {"model.path": "/models/m/config.json"}
DAMAGED = FILES | {"model.safetensors": FileFacts(size_bytes=4 * GIB, digest="b0")}

CPU_QUOTA = CpuFacts(affinity=8, quota=1.5, quota_source="/cpu.max")
MEMORY_LIMIT = MemoryFacts(
    total_bytes=64 * GIB,
    free_bytes=4608 * 2**20,
    limit_bytes=8 * GIB,
    limit_source="/memory.max",
)
"""Too little memory for weights of 4 GiB on CPUs, but enough for a host whose GPUs hold the
weights."""

FAULTS = [
    Fault(changed(HEALTHY, silent={name(1): "no answer after 60 s"}), "hosts", (1,), "no answer"),
    Fault(changed(HEALTHY, lost={"10.0.0.9": "health check"}), "lost-hosts", (8,), "health check"),
    Fault(with_host(HEALTHY, 1, python="3.11.9"), "python", (1,), "3.11.9"),
    Fault(changed(survey(1), hosts={name(0): facts(python="3.10.2")}), "python", (0,), "3.10.2"),
    Fault(
        with_host(HEALTHY, 2, libraries={"ray": "2.61.0", "torch": "2.13.0"}),
        "libraries",
        (2,),
        "ray 2.61.0",
    ),
    Fault(
        with_host(HEALTHY, 2, libraries={"ray": "2.60.0", "torch": None}),
        "libraries",
        (2,),
        "torch not installed",
    ),
    Fault(
        changed(survey(1), hosts={name(0): facts(libraries={"ray": "2.59.1", "torch": "2.13.0"})}),
        "libraries",
        (0,),
        "ray 2.59.1",
    ),
    Fault(with_host(HEALTHY, 0, swell_digest="0001"), "swell", (0,), "source 0001"),
    Fault(with_host(HEALTHY, 0, torch=TorchFacts(error="no libc")), "torch", (0,), "no libc"),
    Fault(with_host(HEALTHY, 0, compiler=None), "compiler", (0,), "no g++"),
    Fault(with_host(HEALTHY, 0, compiler="/usr/bin/g++ 9.4.0"), "compiler", (0,), "9.4.0"),
    Fault(
        with_host(HEALTHY, 1, processor="x86_64 GenuineIntel fma avx2"),
        "processors",
        (1,),
        "GenuineIntel",
    ),
    Fault(with_host(ON_GPUS, 2, c_compiler=None), "gpu-compiler", (2,), "no gcc or clang"),
    Fault(with_host(HEALTHY, 1, cores=1), "cores", (1,), "1"),
    Fault(with_host(HEALTHY, 1, cores=1, cpu=CPU_QUOTA), "cores", (1,), "/cpu.max allows 1.5 of 8"),
    Fault(
        with_host(HEALTHY, 1, memory=MEMORY_LIMIT),
        "memory",
        (1,),
        "4608 MiB free: /memory.max allows 8192 MiB of 65536 MiB",
    ),
    Fault(
        with_host(ON_GPUS, 1, memory=changed(MEMORY_LIMIT, free_bytes=512 * 2**20)),
        "memory",
        (1,),
        "512 MiB free",
    ),
    Fault(with_host(HEALTHY, 1, shm=None), "shared-memory", (1,), "does not exist"),
    Fault(
        with_host(HEALTHY, 1, shm=DiskFacts(path="/dev/shm", total_bytes=GIB, free_bytes=GIB)),
        "shared-memory",
        (1,),
        "/dev/shm has 1024 MiB",
    ),
    Fault(
        with_host(
            HEALTHY, 1, shm=DiskFacts(path="/dev/shm", total_bytes=8 * GIB, free_bytes=64 * 2**20)
        ),
        "shared-memory",
        (1,),
        "64 MiB free",
    ),
    Fault(
        with_host(
            HEALTHY, 2, disks=(DiskFacts(path="/tmp", total_bytes=100 * GIB, free_bytes=3 * GIB),)
        ),
        "disk",
        (2,),
        "/tmp has 3072 MiB free",
    ),
    Fault(with_host(HEALTHY, 2, tmp_error="/tmp is full"), "temporary-files", (2,), "is full"),
    Fault(with_host(HEALTHY, 0, home_error="no home"), "home", (0,), "no home"),
    Fault(with_host(HEALTHY, 0, open_files=4096), "open-files", (0,), "4096"),
    Fault(
        with_host(ON_GPUS, 0, gpus=GpuFacts(installed=True, error="nvidia-smi: no driver")),
        "gpu",
        (0,),
        "no driver",
    ),
    Fault(
        with_host(HEALTHY, 1, gpus=GpuFacts(installed=True, error="no answer after 15 s")),
        "gpu",
        (1,),
        "no answer",
    ),
    Fault(
        changed(ON_GPUS, nodes=ON_GPUS.nodes | {name(1): {"GPU": 2.0}}),
        "gpu",
        (1,),
        "torch can use 1 GPUs",
    ),
    Fault(
        changed(ON_GPUS, nodes=ON_GPUS.nodes | {name(2): {"CPU": 8.0}}),
        "gpu",
        (2,),
        "Ray counts 0 of 1",
    ),
    Fault(with_host(ON_GPUS, 2, **DRIVER), "gpu-versions", (2,), "NCCL 2.26.2"),
    Fault(with_host(ON_GPUS, 1, **of_gpu(driver="535.5")), "gpu-versions", (1,), "driver 535.5"),
    Fault(with_host(ON_GPUS, 2, **OTHER_GPU), "gpu-models", (2,), "A100"),
    Fault(
        with_host(ON_GPUS, 0, **of_gpu(uncorrected_errors=2)), "gpu-errors", (0,), "GPU 0: 2 errors"
    ),
    Fault(
        with_host(ON_GPUS, 0, **of_gpu(used_bytes=40 * GIB)),
        "gpu-memory",
        (0,),
        "GPU 0: 40960 MiB of 81920 MiB used",
    ),
    Fault(with_host(HEALTHY, 1, address=None), "interface", (1,), "eth0 10.0.0.1"),
    Fault(
        changed(
            HEALTHY,
            listeners=HEALTHY.listeners
            | {name(1): [Listener(part="coordinator", host=name(1), error="none is free")]},
        ),
        "ports",
        (1,),
        "coordinator: none is free",
    ),
    Fault(with_host(HEALTHY, 0, http_error="8000 in use"), "http-port", (0,), "8000 in use"),
    Fault(
        with_link(HEALTHY, 2, 0, error="no answer after 5 s"),
        "links",
        (2, 0),
        "10.0.0.3 cannot connect to 10.0.0.1: engines (port 21020): no answer after 5 s",
    ),
    Fault(
        with_link(HEALTHY, 0, 2, HTTP, error="refused"),
        "http-links",
        (0, 2),
        "http (port 21020): refused",
    ),
    Fault(
        with_clock(HEALTHY, 2, 4.0, round_trip_s=0.2), "clocks", (2,), "3.900 s ahead of the others"
    ),
    Fault(with_clock(HEALTHY, 0, -2.0), "clocks", (0,), "2.000 s behind the others"),
    Fault(
        with_clock(survey(2), 1, 2.0), "clocks", (0, 1), "10.0.0.2 is 2.000 s ahead of the other"
    ),
    Fault(with_host(HEALTHY, 1, unreadable=UNREADABLE), "files", (1,), "/models/m/config.json"),
    Fault(with_host(HEALTHY, 1, model_error="lacks 2 shards"), "model", (1,), "lacks 2 shards"),
    Fault(
        with_host(survey(1), 0, files={"config.json": FILES["config.json"]}),
        "model",
        (0,),
        "no tokenizer: none of tokenizer.json, ",
    ),
    Fault(
        with_host(HEALTHY, 1, files=DAMAGED),
        "same-files",
        (1,),
        f"model.safetensors: {4 * GIB} bytes (b0), there {4 * GIB} bytes (bb)",
    ),
    Fault(
        with_host(HEALTHY, 0, files={"tokenizer.json": FILES["tokenizer.json"]}),
        "same-files",
        (0,),
        "config.json: missing",
    ),
    Fault(
        changed(ON_GPUS, config=config(parallel__data=4)),
        "room",
        (),
        "4 workers need 4 GPU, but the Ray cluster has 3",
    ),
    Fault(
        changed(ON_GPUS, config=config(parallel__tensor=2)),
        "room",
        (),
        "must share a host",
    ),
    Fault(NOT_ALL_FREE, "free-resources", (), "counting the free resources: no room for"),
    Fault(NOWHERE_TOGETHER, "free-resources", (), "must share a host"),
    Fault(
        with_host(HEALTHY, 1, ray=ray(token_authentication=False)),
        "token-authentication",
        (1,),
        "not token",
    ),
    Fault(
        with_host(HEALTHY, 0, ray=ray(check_failures=1)),
        "health-checks",
        (0,),
        "after 13 s, and an outage of 6.5 s loses none: RAY_health_check_failure_threshold=1",
    ),
    Fault(
        with_host(HEALTHY, 0, ray=ray(check_period_s=100.0)),
        "health-checks",
        (0,),
        "after 550 s",
    ),
    Fault(
        with_host(HEALTHY, 1, ray=ray(force_stop_replicas=False)),
        "serve-settings",
        (1,),
        "is not 1",
    ),
]


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.check)
def test_exactly_the_host_with_a_fault_is_reported(fault: Fault) -> None:
    (found,) = bad(run_checks(fault.survey))
    assert found.check == fault.check
    assert found.level == CHECKS[fault.check].level
    assert found.remedy == CHECKS[fault.check].remedy != ""
    assert found.hosts == tuple(map(name, fault.hosts))
    assert fault.value in found.value and found.expected


def test_every_check_has_a_fault_that_shows_it() -> None:
    assert {fault.check for fault in FAULTS} == CHECKS.keys() - OF_THE_COMMAND


@pytest.mark.parametrize("healthy", [HEALTHY, ON_GPUS, survey(1), survey(2, gpus=True)])
def test_healthy_hosts_pass(healthy: Survey) -> None:
    assert bad(run_checks(healthy)) == []


def test_settings_for_lost_hosts_are_named_on_healthy_hosts() -> None:
    (found,) = [one for one in run_checks(HEALTHY) if one.check == "health-checks"]
    assert found.level == "ok"
    for text in (
        "after 65 s",
        "RAY_health_check_failure_threshold=5",
        "RAY_health_check_timeout_ms=10000",
        "RAY_health_check_period_ms=3000",
    ):
        assert text in found.value


def test_every_check_has_an_answer_on_healthy_hosts() -> None:
    found = [finding.check for finding in [*run_checks(HEALTHY), *run_checks(ON_GPUS)]]
    assert set(found) == CHECKS.keys() - OF_THE_COMMAND
    assert all(finding.value for finding in run_checks(HEALTHY))


def test_a_function_has_the_name_of_its_check() -> None:
    names = [function.__name__.replace("_", "-") for function in CHECK_FUNCTIONS]
    assert sorted(names) == sorted(CHECKS.keys() - OF_THE_COMMAND)


def test_without_a_configuration_only_hosts_are_checked() -> None:
    found = run_checks(changed(HEALTHY, config=None))
    assert bad(found) == []
    of_config = {"files", "model", "same-files", "room", "free-resources", "http-port"}
    assert not {finding.check for finding in found} & of_config


def test_hosts_that_share_a_fault_share_a_finding() -> None:
    both = with_host(with_host(HEALTHY, 1, cores=1), 2, cores=1)
    (found,) = bad(run_checks(both))
    assert found.hosts == (name(1), name(2))


def test_a_host_that_answers_is_not_blamed_for_a_silent_one() -> None:
    """The findings about the other hosts are still reported."""
    alone = survey(1)
    silent = changed(
        alone, silent={name(1): "no answer"}, nodes=alone.nodes | {name(1): {"CPU": 8.0}}
    )
    assert [finding.check for finding in bad(run_checks(silent))] == ["hosts"]
    nobody = changed(HEALTHY, hosts={}, silent=dict.fromkeys(HEALTHY.hosts, "x"), listeners={})
    nobody = changed(nobody, links=[], tried=[])
    assert [finding.check for finding in bad(run_checks(nobody))] == ["hosts"]


def test_hosts_with_torch_for_cpu_and_for_cuda_are_reported() -> None:
    """A head node without a GPU may have the smaller CPU build of torch."""
    mixed = with_host(ON_GPUS, 0, torch=TorchFacts(version="2.13.0+cpu"), gpus=GpuFacts())
    mixed = changed(mixed, nodes=mixed.nodes | {name(0): {"CPU": 8.0}})
    assert bad(run_checks(mixed)) == []


def test_memory_of_running_engines_counts_as_available() -> None:
    busy = changed(NOT_ALL_FREE, engines_running=3)
    busy = with_host(busy, 0, http_error="8000 in use", **of_gpu(used_bytes=70 * GIB))
    assert bad(run_checks(busy)) == []


def test_a_missing_model_is_not_reported_as_a_different_model() -> None:
    missing = with_host(HEALTHY, 1, unreadable=UNREADABLE, model_error="is not a folder", files={})
    assert [finding.check for finding in bad(run_checks(missing))] == ["files"]


def test_a_host_of_gpus_needs_no_memory_for_weights() -> None:
    assert bad(run_checks(with_host(ON_GPUS, 1, memory=MEMORY_LIMIT))) == []


def test_a_quota_that_allows_a_host_all_its_cores_is_not_shown() -> None:
    wide = with_host(survey(1), 0, cpu=changed(CPU_QUOTA, quota=8.0))
    (found,) = [finding for finding in run_checks(wide) if finding.check == "cores"]
    assert found.value == "8"


def test_a_clock_difference_within_the_round_trip_time_is_accepted() -> None:
    near = with_clock(survey(2), 1, 0.9, round_trip_s=1.0)
    assert bad(run_checks(near)) == []


def test_a_firewall_between_all_hosts_is_not_named_pair_by_pair() -> None:
    names = [name(host) for host in range(12)]
    broken = survey(12)
    for source in range(12):
        for target in range(source):
            broken = with_link(broken, source, target, error="refused")
    found = [finding for finding in bad(run_checks(broken)) if finding.check == "links"]
    assert len(found) == MOST_LINKS + 1
    assert found[-1].value == f"{66 - MOST_LINKS} more of {len(pairs(names))} directions fail"


def test_the_number_of_tried_pairs_is_bounded() -> None:
    (found,) = [finding for finding in run_checks(survey(40)) if finding.check == "links"]
    assert found.value == "640 of 1560 directions between 40 hosts were tried"
