"""The identity of a configuration: an engine is adopted only by a configuration of equal
identity."""

from __future__ import annotations

import hashlib

import msgspec

from swell.configs.schema import Config

_DIGITS = 12
_NOT_OF_ENGINES: dict[str, tuple[str, ...]] = {
    "model": ("name", "special_tokens_in_text"),
    "parallel": ("data", "prefill_engines", "prefill_min_tokens"),
    "cluster": ("max_engines", "drain_timeout_s"),
}
"""Keys that may change while engines keep running: no engine, worker or coordinator reads them,
except `parallel.data`, by which an engine divides the cores of its machine when it starts. The
whole sections `serve` and `autoscaling` may change, too. All other keys count, so that a new key is
safe by default. `cluster.min_engines` counts, because workers reserve memory for the experts that
it implies."""


_OF_VERSIONS: dict[str, tuple[str, ...]] = {
    "model": (
        "path",
        "load_format",
        "dtype",
        "max_model_len",
        "device",
        "seed",
        "backend",
        "cpu_threads",
    ),
    "parallel": ("tensor", "pipeline", "executor"),
    "cache": (
        "memory_bytes",
        "memory_fraction",
        "prefix_caching",
        "session_fraction",
        "offload_bytes",
        "offload_disk_bytes",
        "offload_folder",
        "handover_folder",
        "handover_bytes",
    ),
    "scheduler": (
        "max_tokens_per_step",
        "max_rows",
        "max_chunk_tokens",
        "steps_in_flight",
        "steps_per_plan",
    ),
    "drafts": ("method", "model", "max_tokens", "min_match", "max_match", "max_step_tokens"),
}
"""Keys that engines of one cluster may have different values of. Coordinator and ingresses depend
on the others."""


def identity(config: Config) -> str:
    """A hash of all keys that engines depend on. Compute it from the configuration as it was given:
    `model.device=auto` may resolve differently after a node has joined."""
    data = msgspec.to_builtins(config)
    del data["serve"], data["autoscaling"]
    for section, keys in _NOT_OF_ENGINES.items():
        for key in keys:
            del data[section][key]
    encoded = msgspec.json.encode(data, order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]


def versioned_keys() -> frozenset[str]:
    """As `section.key`: what an upgrade may change."""
    return frozenset(f"{section}.{key}" for section, keys in _OF_VERSIONS.items() for key in keys)


def family(config: Config, text_digest: str) -> str:
    """A hash of what no upgrade changes; `text_digest`: of the files by which ingresses read and
    write text. Another configuration of the same family is a new version of the same cluster.
    Engines that share experts form one group, so theirs has no other version."""
    data = msgspec.to_builtins(config)
    data["model"]["name"] = config.model.served_name
    if config.parallel.expert:
        return identity(config)
    del data["serve"], data["autoscaling"]
    for section, keys in _OF_VERSIONS.items():
        for key in keys:
            del data[section][key]
    for section, keys in _NOT_OF_ENGINES.items():
        for key in keys:
            if (section, key) != ("model", "name"):
                del data[section][key]
    encoded = msgspec.json.encode([data, text_digest], order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]
