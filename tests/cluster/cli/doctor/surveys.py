"""Surveys of healthy hosts, and functions that add a fault to one of them."""

from __future__ import annotations

from typing import Any

import msgspec

from swell.cluster.cli.doctor.facts import (
    HTTP,
    CpuFacts,
    DiskFacts,
    FileFacts,
    Gpu,
    GpuFacts,
    HostFacts,
    Link,
    Listener,
    MemoryFacts,
    RayFacts,
    Requirements,
    Survey,
    TorchFacts,
)
from swell.cluster.cli.doctor.probes import links
from swell.configs.schema import Config, load

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
AMD = "x86_64 AuthenticAMD fma avx2 avx512f"
MODEL = "/models/m"
GPU = Gpu(
    index=0,
    name=H100,
    driver="570.1",
    memory_bytes=80 * GIB,
    used_bytes=0,
    uncorrected_errors=0,
)
WITH_GPU = {
    "gpus": GpuFacts(installed=True, gpus=(GPU,)),
    "torch": TorchFacts(version="2.13.0+cu128", cuda="12.8", nccl="2.27.3", gpus=(H100,)),
}


def config(**parts: object) -> Config:
    """Builds a configuration from `section__key=value`. By default the ingresses are reachable from
    other hosts."""
    settings = {"serve__host": "0.0.0.0", "cluster__ports": "21000-21063", **parts}
    return load(MODEL, {key.replace("__", "."): value for key, value in settings.items()})


def facts(**fields: Any) -> HostFacts:
    healthy = HostFacts(
        swell_digest="5e11",
        python="3.11.7",
        libraries={"ray": "2.60.0", "torch": "2.13.0+cpu"},
        torch=TorchFacts(version="2.13.0+cpu"),
        gpus=GpuFacts(),
        compiler="/usr/bin/g++ 12.2.0",
        c_compiler="/usr/bin/gcc 12",
        cores=8,
        processor=AMD,
        cpu=CpuFacts(affinity=8),
        memory=MemoryFacts(total_bytes=64 * GIB, free_bytes=48 * GIB),
        shm=DiskFacts(path="/dev/shm", total_bytes=8 * GIB, free_bytes=8 * GIB),
        disks=(DiskFacts(path="/tmp", total_bytes=100 * GIB, free_bytes=50 * GIB),),
        open_files=65536,
        addresses=("lo 127.0.0.1", "eth0 10.0.0.1"),
        address="10.0.0.1",
        http_error=None,
        unreadable={},
        model_error=None,
        files={
            "config.json": FileFacts(size_bytes=700, digest="aa"),
            "model.safetensors": FileFacts(size_bytes=4 * GIB, digest="bb"),
            "tokenizer.json": FileFacts(size_bytes=9000, digest="dd"),
            "serve.chat_template": FileFacts(size_bytes=20, digest="cc"),
        },
        ray=RayFacts(
            token_authentication=True,
            check_period_s=3.0,
            check_timeout_s=10.0,
            check_failures=5,
            force_stop_replicas=True,
            object_store_bytes=2 * GIB,
            session_folder="/tmp/ray",
        ),
    )
    return changed(healthy, **fields)


def name(host: int) -> str:
    return f"10.0.0.{host + 1}"


def survey(count: int = 3, *, gpus: bool = False, **fields: Any) -> Survey:
    """Returns a survey of `count` healthy hosts that all reach each other."""
    names = [name(host) for host in range(count)]
    tried = links.pairs(names)
    of_gpus = WITH_GPU if gpus else {}
    healthy = Survey(
        requirements=Requirements(
            python=">=3.11", libraries={"ray": ">=2.60,<3", "torch": ">=2.11,<2.14"}
        ),
        hosts={host: facts(address=host, **of_gpus) for host in names},
        nodes={host: {"CPU": 8.0, "GPU": 1.0} if gpus else {"CPU": 8.0} for host in names},
        config=config(),
        address="10.0.0.1:6379",
        head=names[0],
        free={host: {"CPU": 8.0, "GPU": 1.0} for host in names},
        listeners={host: [Listener(part="engines", host=host, port=21020)] for host in names},
        tried=tried,
        links=[
            Link(source=source, target=target, part=part, port=21020)
            for source, target in tried
            for part in ("engines", HTTP)
        ],
    )
    return changed(healthy, **fields)


def with_host(before: Survey, host: int, **fields: Any) -> Survey:
    """Returns the survey with some facts of one host replaced."""
    worse = changed(before.hosts[name(host)], **fields)
    return changed(before, hosts=before.hosts | {name(host): worse})


def with_link(
    before: Survey, source: int, target: int, part: str = "engines", **fields: Any
) -> Survey:
    """Returns the survey with some facts of one link replaced."""
    return changed(
        before,
        links=[
            changed(link, **fields)
            if (link.source, link.target, link.part) == (name(source), name(target), part)
            else link
            for link in before.links
        ],
    )


def with_clock(before: Survey, host: int, ahead_s: float, round_trip_s: float = 0.0) -> Survey:
    """Returns the survey with the clock of one host ahead by `ahead_s` seconds, as every link shows
    it."""
    return changed(
        before,
        links=[
            changed(
                link,
                offset_s=ahead_s * ((link.target == name(host)) - (link.source == name(host))),
                round_trip_s=round_trip_s,
            )
            for link in before.links
        ],
    )


def changed(value: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(value, **fields)
