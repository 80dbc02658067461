"""The identity of a configuration: an engine is adopted only by a configuration of equal
identity."""

from __future__ import annotations

import hashlib

import msgspec

from swell.configs.schema import Config

_DIGITS = 12
_NOT_OF_ENGINES: dict[str, tuple[str, ...]] = {
    "model": ("name",),
    "parallel": ("data",),
    "cluster": ("max_engines", "drain_timeout_s"),
}
"""Keys that may change while engines keep running: no engine, worker or coordinator reads them,
except `parallel.data`, by which an engine divides the cores of its machine when it starts. The
whole section `serve` may change, too. All other keys count, so that a new key is safe by default.
`cluster.min_engines` counts, because workers reserve memory for the experts that it implies."""


def identity(config: Config) -> str:
    """A hash of all keys that engines depend on. Compute it from the configuration as it was given:
    `model.device=auto` may resolve differently after a node has joined."""
    data = msgspec.to_builtins(config)
    del data["serve"]
    for section, keys in _NOT_OF_ENGINES.items():
        for key in keys:
            del data[section][key]
    encoded = msgspec.json.encode(data, order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]
