"""The Ray resources that the engines of a configuration reserve, and whether the hosts have them.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from swell.configs.schema import Config

_EPSILON = 1e-6
"""Tolerance for rounding errors of sums of resources."""


def resolve_device(config: Config, total_resources: Mapping[str, float]) -> Config:
    """Replaces the device `auto`: by cuda if the Ray cluster has a GPU, else by cpu."""
    if config.model.device != "auto":
        return config
    device = "cuda" if total_resources.get("GPU", 0) >= 1 else "cpu"
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, device=device)
    )


def bundles(config: Config) -> tuple[dict[str, float], int]:
    """Returns the Ray resources of one bundle of an engine, and the number of its bundles: one for
    each pipeline stage, because neither a bundle nor a group of tensor ranks may span hosts."""
    parallel = config.parallel
    count = 1 if _is_in_process(config) else parallel.pipeline
    workers = parallel.world // count
    if config.model.device == "cuda":
        return {"GPU": config.cluster.gpus_per_worker * workers}, count
    return {"CPU": config.cluster.cpus_per_worker * workers}, count


def gpus_of_process(config: Config) -> float:
    """Returns the GPUs of an engine's own process: those of its workers if they are threads of it,
    else 0."""
    return bundles(config)[0].get("GPU", 0.0) if _is_in_process(config) else 0.0


def refusal(config: Config, nodes: Sequence[Mapping[str, float]], engines: int) -> str | None:
    """Returns why hosts with these resources can never hold this many engines; None: they could if
    they were empty."""
    bundle, count = bundles(config)
    workers = engines * config.parallel.world
    all_engines = "1 engine" if engines == 1 else f"{engines} engines"
    for name, amount in bundle.items():
        needed, there = amount * count * engines, sum(node.get(name, 0.0) for node in nodes)
        if needed > there + _EPSILON:
            return (
                f"no room for {all_engines}: their {workers} workers need {needed:g} {name}, but "
                f"the Ray cluster has {there:g}"
            )
        room = sum(int((node.get(name, 0.0) + _EPSILON) // amount) for node in nodes)
        if room < engines * count:
            together = workers // (engines * count)
            hosts = ", ".join(f"{node.get(name, 0.0):g}" for node in nodes)
            return (
                f"no room for {all_engines}: {together} workers of each must share a host (tensor "
                f"ranks, or all of executor inproc) and need {amount:g} {name} there; the hosts "
                f"have {hosts}, which is room for {room} of {engines * count}"
            )
    return None


def _is_in_process(config: Config) -> bool:
    """Whether the workers of an engine are threads of its process."""
    parallel = config.parallel
    alone = parallel.executor == "auto" and parallel.world == 1
    return alone or parallel.executor == "inproc"
