"""The resources that engines reserve, and the hosts that have them."""

from __future__ import annotations

import pytest

from swell.cluster.control.plan.resources import bundles, gpus_of_process, refusal, resolve_device
from swell.configs.schema import Config, load


def config(**parts: object) -> Config:
    return load("owner/name", {key.replace("__", "."): value for key, value in parts.items()})


def test_a_bundle_is_a_stage_and_its_tensor_ranks_share_a_host() -> None:
    split = {"parallel__tensor": 2, "parallel__pipeline": 3}
    on_cpu = config(model__device="cpu", cluster__cpus_per_worker=0.5, **split)
    assert bundles(on_cpu) == ({"CPU": 1.0}, 3)
    assert bundles(config(model__device="cuda", **split)) == ({"GPU": 2.0}, 3)
    assert bundles(config(model__device="cuda", cluster__gpus_per_worker=0.25)) == (
        {"GPU": 0.25},
        1,
    )
    together = config(model__device="cuda", parallel__executor="inproc", **split)
    assert bundles(together) == ({"GPU": 6.0}, 1)


@pytest.mark.parametrize(
    ("parts", "gpus"),
    [({}, 1.0), ({"parallel__tensor": 2}, 0.0), ({"parallel__executor": "ray"}, 0.0)],
)
def test_gpus_of_worker_threads_belong_to_their_engine(
    parts: dict[str, object], gpus: float
) -> None:
    assert gpus_of_process(config(model__device="cuda", **parts)) == gpus
    assert gpus_of_process(config(model__device="cpu", **parts)) == 0.0


def test_room_is_counted_in_whole_bundles_of_a_host() -> None:
    pairs = config(model__device="cuda", parallel__tensor=2)
    hosts = [{"GPU": 3.0}, {"GPU": 3.0}, {"CPU": 8.0}]
    assert refusal(pairs, hosts, 2) is None
    assert refusal(pairs, hosts, 3) == (
        "no room for 3 engines: 2 workers of each must share a host (tensor ranks, or all of "
        "executor inproc) and need 2 GPU there; the hosts have 3, 3, 0, which is room for 2 of 3"
    )
    assert refusal(pairs, hosts, 4) == (
        "no room for 4 engines: their 8 workers need 8 GPU, but the Ray cluster has 6"
    )


def test_auto_means_cuda_if_a_host_has_a_gpu() -> None:
    assert resolve_device(config(), {"CPU": 4.0}).model.device == "cpu"
    assert resolve_device(config(), {"GPU": 1.0}).model.device == "cuda"
    assert resolve_device(config(model__device="cpu"), {"GPU": 1.0}).model.device == "cpu"
