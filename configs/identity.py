"""Which configurations are the same to an engine: only engines of an equal one are adopted."""

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
"""Keys that may change while engines stay: no engine, worker or coordinator reads them, but for
`parallel.data`, by which an engine shares out the cores of its machine as it starts. So may the
whole section `serve`. What is not listed counts, so that a new key is safe before it is thought
about: `cluster.min_engines` does, workers reserve memory for as many experts as it leaves them."""


def identity(config: Config) -> str:
    """A hash of everything that engines are built from. Take it of the configuration as it was
    given: `model.device=auto` may be resolved otherwise where another node has come."""
    data = msgspec.to_builtins(config)
    del data["serve"]
    for section, keys in _NOT_OF_ENGINES.items():
        for key in keys:
            del data[section][key]
    encoded = msgspec.json.encode(data, order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]
