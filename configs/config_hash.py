"""Hashes of a configuration. The manager adopts a running engine only if the hash of its
configuration is the same; two configurations with one cluster id are versions of one cluster."""

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
"""Keys that may change while engines keep running. No engine, worker or coordinator reads them,
except `parallel.data`, by which an engine divides the cores of its machine when it starts, and
`cluster.max_engines` (see `_not_of_engines`). The whole sections `serve` and `autoscaling` may
change, too. All other keys count, so that a new key is safe by default. `cluster.min_engines`
counts, because workers reserve memory for the experts that it implies."""


_OF_VERSIONS: dict[str, tuple[str, ...]] = {
    "model": (
        "path",
        "load_format",
        "dtype",
        "quantize",
        "activations",
        "max_model_len",
        "device",
        "seed",
        "backend",
        "enforce_eager",
        "exact",
        "numerics",
        "cpu_threads",
    ),
    "parallel": ("tensor", "pipeline", "executor"),
    "cache": (
        "dtype",
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
"""Keys whose values may differ between the engines of one cluster. The coordinator and the
ingresses depend on all other keys."""


def config_hash(config: Config) -> str:
    """Returns a hash of all keys that engines depend on. Compute it from the configuration as the
    user wrote it: `model.device=auto` may resolve differently after a node has joined."""
    data = msgspec.to_builtins(config)
    del data["serve"], data["autoscaling"]
    for section, key in _not_of_engines(config):
        del data[section][key]
    encoded = msgspec.json.encode(data, order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]


def _not_of_engines(config: Config) -> set[tuple[str, str]]:
    """Returns the sections and keys that may change while engines keep running. Workers of engines
    that share experts reserve memory for the exchange between `cluster.max_engines` engines."""
    keys = {(section, key) for section, keys in _NOT_OF_ENGINES.items() for key in keys}
    return keys - {("cluster", "max_engines")} if config.parallel.expert else keys


def versioned_keys() -> frozenset[str]:
    """Returns the keys, as `section.key`, that an upgrade may change."""
    return frozenset(f"{section}.{key}" for section, keys in _OF_VERSIONS.items() for key in keys)


def cluster_id(config: Config, text_digest: str) -> str:
    """Returns a hash of everything that no upgrade changes. `text_digest` is a digest of the files
    by which ingresses read and write text. Another configuration with the same cluster id is a new
    version of the same cluster. Engines that share experts form one group, so they cannot run two
    versions: their cluster id is the hash of the whole configuration."""
    data = msgspec.to_builtins(config)
    data["model"]["name"] = config.model.served_name
    if config.parallel.expert:
        return config_hash(config)
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
